import pytest
import torch

from lightning_sparse.engine.observe import ParameterSamples
from tests.helpers.sparse_ddp import (
    DENSITY,
    DIFFERENT_NAMES,
    Edges,
    batch,
    parameters_of,
    sgd_steps,
    sparse_ddp,
    watch_gradients,
)

STEPS = 4


def losses_of(rank, ddp, engine, asks):
    for step in range(STEPS):
        engine.recorder.samples = None
        if asks and step % 2:
            engine.recorder.samples = ParameterSamples()
        engine.begin_backward()
        yield ddp(batch(rank, step))


def train(rank, compressor, schedule, asks):
    torch.manual_seed(0)
    book = []
    with sparse_ddp(Edges(), compressor, DENSITY[compressor], schedule) as (ddp, engine):
        gradients = watch_gradients(ddp.module)
        for _ in sgd_steps(ddp, engine, losses_of(rank, ddp, engine, asks), lr=0.1):
            residuals = engine.memory.state_dict().get("residual", {})
            outside = {
                name: (
                    gradient.numel(),
                    float(gradient.norm()),
                    float(residuals[name].norm()) if name in residuals else 0.0,
                )
                for name, gradient in gradients.items()
            }
            samples = engine.pipeline.recorder.last_samples
            inside = {} if samples is None else samples.facts()
            book.append((inside, outside, engine.compression_stats()))
            engine.end_step()
        return book, parameters_of(ddp)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("compressor", DIFFERENT_NAMES)
def test_samples_say_what_the_step_did(pair, compressor):
    for book, _ in pair.run(train, compressor, "merged", True):
        assert book[0][0] == {}
        for inside, outside, stats in book[1::2]:
            assert inside.keys() == outside.keys()
            for name, fact in inside.items():
                numel, gradient_norm, residual_norm = outside[name]
                assert fact.numel == numel
                assert fact.gradient_norm == pytest.approx(gradient_norm, rel=1e-5)
                assert fact.residual_norm == pytest.approx(residual_norm, rel=1e-5, abs=1e-12)
            elements = sum(fact.numel for fact in inside.values())
            assert sum(fact.sent for fact in inside.values()) == pytest.approx(stats["density"] * elements)
