"""On a device, each reader waits for the writer's stream, and memory outlives its readers.

Streams are simulated, so no GPU is needed.
"""

from copy import deepcopy
from functools import partial
from unittest import mock

import pytest
import torch

from lightning_sparse import AdamCorrection, LocalSteps
from lightning_sparse.compressors import TopK
from lightning_sparse.engine import Engine
from lightning_sparse.engine.collectives import ExchangeWorker
from lightning_sparse.engine.settings import Settings
from lightning_sparse.engine.step.reducer import SparseReducer
from lightning_sparse.engine.step.topology import ShardedModel, UnwrappedModule
from tests.helpers import racing
from tests.helpers.racing import CUDA, Skipping, Way, played, train

STEPS = 5  # the first step is dense and determines the order
ADAM = {
    "given": {"optimizer_correction": AdamCorrection(warmup_steps=2, density_decay_steps=0, second_moment_interval=2)},
    "build": partial(torch.optim.AdamW, lr=0.001),
}
WAYS = {
    "gather": Way(),
    "gather, bfloat16": Way({"wire": "bfloat16", "schedule": "single"}),
    "gather, 4 bits": Way({"wire": "4bit"}),
    "owners": Way({"exchange": "owners"}),
    "union": Way({"compressor": "exdyna"}),
    "reduce": Way({"compressor": "dense", "density": None}),
    "reduce, 4 bits": Way({"compressor": "qsgd", "density": None}),
    "merged": Way({"compressor": "omgs", "schedule": "single"}),
    "momentum": Way({"compressor": "dgc"}, partial(torch.optim.SGD, lr=0.1, momentum=0.9), clips=True),
    "learning rate": Way({"compressor": "sdagc"}, lambda each: torch.optim.SGD(each, torch.full((), 0.1, device=CUDA))),
    "Adam": Way(**ADAM),
    "Adam, clipped, of two levels": Way(**ADAM, local_world_size=2, clips=True),
    "Adam, unused": Way(**ADAM, skips=True),
    "Adam, scaled, several backwards": Way(**ADAM, backwards=2, scales=True),
    "two levels": Way(local_world_size=2),
    "two levels, unused": Way(local_world_size=2, skips=True),
    "narrow": Way(dtype=torch.bfloat16, local_world_size=2),
    "unused": Way(skips=True),
    "several backwards": Way(backwards=2, scales=True),
    "rounds": Way({"local_steps": LocalSteps(2, 0.7, 0.9)}),
    "rounds, two levels": Way({"local_steps": LocalSteps(2)}, local_world_size=2),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_read_or_given_out_again_before_it_is_done(way):
    with played() as device:
        assert len(list(train(WAYS[way], STEPS))) == STEPS
    assert device.races == []


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", ["gather", "Adam", "two levels", "rounds"])
@pytest.mark.parametrize("wait", ["wait_event", "wait_stream"])
def test_who_does_not_wait_is_seen(wait, way):
    # The worker's stream waits for gradient events, and the readers of means for the worker's stream.
    with played() as device, mock.patch.object(racing.Stream, wait):
        list(train(WAYS[way], STEPS))
    late = "on default" if wait == "wait_stream" else f"on {device.streams[-1].name}"
    assert any(late in race for race in device.races)


class OwnStreams:
    """Write and accumulate each gradient on a separate stream, as a retained graph may do."""

    def __init__(self, device):
        self._device, self._entered, self._take = device, [], SparseReducer._on_grad_ready

    def begin(self, parameter):
        stream = self._device.Stream()
        stream.wait_stream(self._device.current_stream())
        self._entered.append(self._device.stream(stream))
        self._entered[-1].__enter__()
        parameter.grad.mul_(2.0)

    def take(self, source, member, parameter):
        self._take(source, member, parameter)
        self._entered.pop().__exit__(None, None, None)


@pytest.mark.parametrize(
    ("is_sharded", "compressor"),
    [
        (False, "topk"),
        (False, "a2sgd"),
        (False, "dense"),
        (True, "topk"),
        (True, "dense"),
    ],  # A2SGD averages whole models
)
def test_a_group_starts_after_all_of_its_gradients_whatever_streams_wrote_them(is_sharded, compressor):
    with played() as device:
        net, streams = Skipping().to(CUDA), OwnStreams(device)
        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(streams.begin)
        settings = Settings.of(compressor, schedule="single", warmup_steps=0)
        with mock.patch.object(SparseReducer, "_on_grad_ready", lambda *of_one: streams.take(*of_one)):
            engine = Engine(
                (ShardedModel if is_sharded else UnwrappedModule)(net), settings, local_world_size=1 + is_sharded
            )
        for _ in range(3):  # the first step only determines the order
            engine.reducer.prepare_for_backward()
            net(torch.randn(4, 64, device=CUDA), False).backward()
            engine.reducer.finalize_backward()
            torch._foreach_add_([*map(torch.Tensor.detach, net.parameters())], [each.grad for each in net.parameters()])
            net.zero_grad()
            engine.end_step()
        engine.close()
    assert device.races == []
    assert len(device.streams) > 2 * 6


class Remembering(TopK):
    """Top-k with device state that each step replaces, and notes of the streams that read the state."""

    def __init__(self):
        self._sums = {}
        self.streams = set()

    def finish_step(self, names, means, finite, all_gather):
        self._sums = {name: self._sums.get(name, 0.0) + mean.values.sum() for name, mean in zip(names, means)}

    def state_dict(self):
        return dict(self._sums)

    def load_state_dict(self, state):
        self._sums = {name: each.clone() for name, each in state.items()}
        self.streams.add(torch.get_device_module(CUDA).current_stream().name)


@pytest.mark.parametrize("way", ["momentum", "Adam", "union", "rounds", "gather"])
def test_a_state_is_taken_up_on_the_stream_that_reads_it_from_then_on(way):
    # It also drops parts of the state, and the memory returns to the allocating stream at once.
    given, compressor = WAYS[way].given, Remembering()
    if way == "gather":
        given = {"compressor": compressor}
    with played() as device:
        for step, handle in enumerate(train(WAYS[way]._replace(given=given), 2 * STEPS)):
            if step == STEPS:
                with handle.shared_model():
                    state, weights = handle.training.state(together=True), deepcopy(handle.module.state_dict())
                handle.training.load(state)
                handle.module.load_state_dict(weights)
                del state, weights
            handle.module.last.requires_grad_(step != STEPS + 2)
    assert device.races == []
    assert "default" not in compressor.streams


@pytest.mark.parametrize("wait", [lambda worker: worker.run(lambda: None), ExchangeWorker.close], ids=["run", "close"])
def test_who_waits_for_tasks_waits_for_their_work_too(wait):
    with played() as device:
        worker, residual = ExchangeWorker(CUDA), torch.zeros(3, device=CUDA)
        worker.submit(lambda: residual.add_(1.0))
        wait(worker)
        assert residual.clone().sum() == 3
        worker.close()
    assert device.races == []


def leave():
    raise SystemExit


def test_whatever_a_task_raises_is_raised_by_all_that_wait_and_ends_no_thread():
    with played():
        worker = ExchangeWorker(CUDA)
        _, second = (worker.submit(leave) for _ in range(2))
        for wait in (lambda: worker.wait(second), worker.drain):
            with pytest.raises(SystemExit):
                wait()
        assert worker.close()


def test_an_exchange_that_a_graph_would_repeat_is_refused_before_it_begins():
    with played() as device:
        device.is_current_stream_capturing = lambda: True
        worker, done = ExchangeWorker(CUDA), []
        with pytest.raises(RuntimeError, match="make_graphed_callables"):
            worker.submit(partial(done.append, "exchanged"))
        assert worker.close()
    assert (done, device.races) == ([], [])
