import math
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_sparse.engine.observe import ParameterSamples, Recorder, Span, StepRecord, mean_stats
from lightning_sparse.testing.wrapping import residuals_like
from tests.helpers.sparse_ddp import (
    DENSITY,
    DIFFERENT_NAMES,
    Edges,
    backpropagate,
    batch,
    sgd_steps,
    sparse_ddp,
    watch_gradients,
)


def reachable_bytes(thing):
    """Return the bytes of all tensors with more than one element that an object references."""
    if isinstance(thing, Tensor):
        return thing.nbytes if thing.numel() > 1 else 0
    if isinstance(thing, dict):
        thing = list(thing.values())
    parts = thing if isinstance(thing, (list, tuple)) else vars(thing).values() if hasattr(thing, "__dict__") else ()
    return sum(map(reachable_bytes, parts))


def held_of_a_step(rank, compressor):
    torch.manual_seed(0)
    with sparse_ddp(Edges(), compressor, DENSITY[compressor]) as (ddp, engine):
        engine.begin_backward()
        backpropagate(ddp, engine, ddp(batch(rank, 0)))
        return reachable_bytes(engine.recorder.last)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("compressor", DIFFERENT_NAMES)
def test_what_is_held_of_a_step_does_not_grow_with_ranks(pair, compressor):
    assert pair.run(held_of_a_step, compressor) == [0, 0]


class Event:
    """A device event that may be incomplete."""

    def __init__(self, seconds, has_passed=False):
        self.seconds = seconds
        self.has_passed = has_passed

    def synchronize(self):
        self.has_passed = True

    def elapsed_time(self, end):
        assert self.has_passed
        assert end.has_passed
        return 1e3 * (end.seconds - self.seconds)


def step(backward_end, end):
    record = StepRecord(elements=100, wire_bytes=60.0)
    record.spans = [Span("exposed", backward_end, end)]
    return record


def recorder_of(*records, local_world_size=1):
    recorder = Recorder(torch.device("cpu"), 4, local_world_size)
    for record in records:
        recorder._append(record)
    return recorder


def test_the_share_is_of_the_median_step_so_that_plain_steps_and_validations_do_not_count(monkeypatch):
    now = iter([0.0, 2.0, 5.0, 7.0, 99.0])
    monkeypatch.setattr("lightning_sparse.engine.observe.perf_counter", lambda: next(now))
    recorder = recorder_of()
    assert "exposed_share" not in recorder.total_stats()
    for is_dense in (False, True, False, False):  # 2 s, 3 s in DDP, 2 s, 92 s with a validation
        if is_dense:
            recorder.add_dense_step(100, 400)
        else:
            recorder._append(step(Event(1.0, True), Event(1.5, True)))
        recorder.end_step()
    stats = recorder.total_stats()
    assert stats["total_steps"] == 4
    assert stats["exposed_share"] == 0.5 / 2
    recorder.last.spans = [Span("exposed", Event(1.0, True), Event(10.0, True))]
    assert recorder.total_stats()["exposed_share"] == 1
    recorder.records.clear()
    assert math.isnan(recorder.total_stats()["exposed_share"])


def test_a_wait_after_a_step_counts_once():
    recorder = Recorder(torch.device("cpu"), world_size=4)
    marks = [Event(each) for each in (1.0, 1.5, 2.0, 2.25)]
    with mock.patch.object(recorder.clock, "mark", iter(marks).__next__):
        recorder.current.backward_end = recorder.clock.mark()
        recorder.end_exchange()
        with recorder.waiting():
            pass
    for mark in marks:
        mark.has_passed = True
    assert mean_stats(recorder.last_step, has_levels=False)["exposed_seconds"] == 0.75


def losses_of(rank, ddp, engine):
    for step in range(4):
        engine.recorder.samples = ParameterSamples() if step % 2 else None
        engine.begin_backward()
        yield ddp(batch(rank, step))


def samples_of(rank, compressor):
    """Return the samples of each step, sizes and norms outside of the engine, and the density of the step."""
    torch.manual_seed(0)
    book = []
    with sparse_ddp(Edges(), compressor, DENSITY[compressor]) as (ddp, engine):
        gradients = watch_gradients(ddp.module)
        for _ in sgd_steps(ddp, engine, losses_of(rank, ddp, engine), lr=0.1):
            residuals = residuals_like(engine, gradients)
            outside = {
                name: (gradient.numel(), float(gradient.norm()), float(residuals[name].norm()))
                for name, gradient in gradients.items()
            }
            samples = engine.pipeline.recorder.last_samples
            book.append(({} if samples is None else samples.facts(), outside, engine.compression_stats()["density"]))
            engine.end_step()
    return book


@pytest.mark.sampled(3)
@pytest.mark.parametrize("compressor", DIFFERENT_NAMES)
def test_samples_say_what_the_step_did(pair, compressor):
    for book in pair.run(samples_of, compressor):
        assert book[0][0] == {}
        for inside, outside, density in book[1::2]:
            assert inside.keys() == outside.keys()
            for name, fact in inside.items():
                numel, gradient_norm, residual_norm = outside[name]
                assert fact.numel == numel
                assert fact.gradient_norm == pytest.approx(gradient_norm, rel=1e-5)
                assert fact.residual_norm == pytest.approx(residual_norm, rel=1e-5, abs=1e-12)
            elements = sum(fact.numel for fact in inside.values())
            assert sum(fact.sent for fact in inside.values()) == pytest.approx(density * elements)
