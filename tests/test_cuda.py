import traceback
import warnings

import pytest
import torch

from lightning_sparse.compressors import TopK
from lightning_sparse.engine.memory import Hyperparameters
from lightning_sparse.engine.step.step import StepContext
from lightning_sparse.schedule import FixedSize, Layerwise, Single
from lightning_sparse.testing.invariants import balance
from lightning_sparse.testing.pool import Pool
from tests.compressors.virtual import Net
from tests.helpers.devices import DEVICE, needs_cuda
from tests.helpers.sparse_ddp import (
    COMPRESSOR_NAMES,
    DENSITY,
    SCHEDULE_NAMES,
    WIRES,
    batch,
    sparse_ddp,
    watch_gradients,
)

pytestmark = needs_cuda

SLEEP_CYCLES = 20_000_000  # about 10 ms, so that the device falls far behind the host


@pytest.fixture(scope="module")
def nccl():
    pool = Pool(1, backend="nccl")
    yield pool
    pool.stop()


class Late(TopK):
    """Top-k with a busy stream, so that a read without a wait is too early."""

    def select(self, names, accumulated, counts):
        torch.cuda._sleep(SLEEP_CYCLES)
        return super().select(names, accumulated, counts)


def delayed(gradient):
    """Delay a gradient on the backward stream, so that a read without a wait is too early."""
    torch.cuda._sleep(SLEEP_CYCLES)
    return gradient * 1.0


def train_late(rank, schedule, steps):
    torch.manual_seed(0)
    history, arrived = [], []
    with sparse_ddp(Net(), Late(), 0.05, schedule) as (ddp, engine):
        for parameter in ddp.parameters():
            parameter.register_hook(delayed)
        gradients = watch_gradients(ddp.module)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
        for step in range(steps):
            optimizer.zero_grad()
            ddp(batch(rank, step)).backward()
            optimizer.step()
            arrived.append({name: gradient.flatten().clone() for name, gradient in gradients.items()})
            history.append({name: tensor.detach().clone() for name, tensor in ddp.module.named_parameters()})
        engine.worker.raise_error()
    return arrived, history


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_one_rank_on_nccl_is_error_feedback_and_every_stream_waits_for_the_other(nccl, schedule):
    torch.manual_seed(0)
    parameters = {name: tensor.detach().clone() for name, tensor in Net().named_parameters()}
    residuals = {name: torch.zeros(tensor.numel()) for name, tensor in parameters.items()}
    ((arrived, history),) = nccl.run(train_late, schedule, 6)
    for gradients, trained in zip(arrived, history):
        for name, gradient in gradients.items():
            accumulated = residuals[name] + gradient
            count = max(1, round(0.05 * gradient.numel()))
            sent = accumulated.abs().argsort(descending=True)[:count]
            applied = torch.zeros_like(accumulated).index_copy(0, sent, accumulated[sent])
            residuals[name] = accumulated - applied
            parameters[name] -= 0.5 * applied.view_as(parameters[name])
            assert gradient.any()
            torch.testing.assert_close(trained[name], parameters[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
@pytest.mark.parametrize("compressor", COMPRESSOR_NAMES)
def test_what_every_compressor_applies_on_nccl_is_what_it_does_not_keep(nccl, compressor, schedule, wire):
    settings = {"compressor": compressor, "density": DENSITY[compressor], "schedule": schedule, "wire": wire}
    (book,) = nccl.run(balance, settings, 4)
    for entry in book:
        for name, gradient in entry["gradient"].items():
            owed = entry["before"][name] + gradient
            difference = (entry["applied"][name] + entry["after"][name] - owed).abs().max()
            assert difference <= 2e-6 * owed.abs().max() + 1e-12


# ExDyna and MiCRO are absent because their message sizes depend on counts from other ranks.
NEVER_WAITING = ["topk", "lags", "omgs", "dgc", "sdagc", "a2sgd", "qsgd", "dense"]


def backward_without_waiting(rank, settings):
    torch.manual_seed(0)
    with sparse_ddp(Net(), **settings) as (ddp, engine):
        hyperparameters = {name: Hyperparameters(0.1, 0.9) for name, _ in ddp.module.named_parameters()}
        loss_scale = torch.full((), 1024.0, device=DEVICE)
        for step in range(8):
            ddp.zero_grad()
            loss = ddp(batch(rank, step)) * loss_scale
            engine.begin_backward(StepContext(loss_scale, hyperparameters))
            try:
                warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
                # The first steps determine sizes, codecs and buckets, and may wait.
                torch.cuda.set_sync_debug_mode("error" if step >= 4 else "default")
                loss.backward()
                engine.worker.raise_error()
            except RuntimeError as error:
                return "".join(traceback.format_exception(error))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert all(parameter.grad.isfinite().all() and parameter.grad.any() for parameter in ddp.parameters())
    return None


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("schedule", [Layerwise(), FixedSize(2000), Single()], ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("compressor", NEVER_WAITING)
def test_the_host_never_waits_for_the_device(nccl, compressor, schedule, wire):
    # Only NCCL and fixed buckets: gloo copies to the host, and a new plan needs an agreement of all ranks.
    settings = {"compressor": compressor, "density": DENSITY[compressor], "schedule": schedule, "wire": wire}
    assert nccl.run(backward_without_waiting, settings) == [None]
