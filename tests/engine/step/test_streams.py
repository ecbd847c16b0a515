"""On a device, everybody waits for the stream whose work they read. Streams are played here: no GPU has to be there."""

import threading
from contextlib import contextmanager
from typing import ClassVar
from unittest import mock

import pytest
import torch
from torch import nn

import lightning_sparse.engine.engine as engine_module
import lightning_sparse.strategy.ddp_wrapping as wrapping_module
from lightning_sparse.compressors import TopK
from lightning_sparse.engine.step.exchange import Exchange
from lightning_sparse.engine.step.worker import ExchangeWorker, LaunchQueue
from tests.compressors.virtual import Net
from tests.helpers.sparse_ddp import batch, sparse_ddp


class Stream:
    """A stream that knows which pieces of work, by name, are done before whatever is queued on it next."""

    def __init__(self, device=None, priority=0):
        self.done = set()
        self.priority = priority

    def record_event(self):
        return frozenset(self.done)

    def wait_event(self, event):
        self.done |= event

    def wait_stream(self, stream):
        """Do what is queued next after what another stream holds."""
        self.done |= stream.done


class Event:
    """A point in a stream, for which a thread waits without the lock of Python, and asleep."""

    waited_for: ClassVar[list[frozenset[str]]] = []

    def __init__(self, blocking):
        assert blocking

    def record(self, stream):
        self.done = stream.record_event()

    def synchronize(self):
        self.waited_for.append(self.done)


class PlayedDevice(threading.local):
    """What ``torch.get_device_module`` returns, as far as it is needed; each thread starts on a stream of its own."""

    Stream, Event = Stream, Event

    def __init__(self):
        self.present = Stream()

    def current_stream(self, device=None):
        return self.present

    def set_device(self, device):
        """Do nothing: there is one device."""

    @contextmanager
    def stream(self, stream):
        before, self.present = self.present, stream
        yield
        self.present = before


class PlayedWorker(ExchangeWorker):
    """A worker that takes the played device for its own."""

    played: PlayedDevice

    def __init__(self, device=None):
        with mock.patch.object(torch, "get_device_module", return_value=self.played):
            super().__init__(torch.device("cuda", 0))


@pytest.fixture
def played():
    """Return the device that workers made in this test take for theirs."""
    PlayedWorker.played = PlayedDevice()
    return PlayedWorker.played


def test_a_task_starts_after_what_the_stream_of_its_caller_holds(played):
    worker, seen = PlayedWorker(), []
    played.current_stream().done.add("gradient")
    worker.submit(lambda: seen.append(set(played.current_stream().done)))
    worker.close()
    assert seen == [{"gradient"}]


def leave():
    raise SystemExit


def test_whatever_a_task_raises_is_raised_by_all_that_wait_and_ends_no_thread(played):
    worker, second = PlayedWorker(), threading.Event()
    for done in (threading.Event(), second):
        worker.submit(leave, done)
    assert second.wait(10.0)
    for wait in (lambda: worker.wait(second), worker.drain):
        with pytest.raises(SystemExit):
            wait()
    assert worker.close()


def test_small_kernels_of_the_exchange_come_before_those_of_backward(played):
    assert PlayedWorker()._stream.priority < 0


def test_the_host_waits_for_all_but_the_last_part_of_what_it_has_launched(played):
    """Of parts that are called by number, ``n`` begins when all before ``n - 1`` have been done."""
    Event.waited_for.clear()
    queue = LaunchQueue(torch.device("cuda", 0))
    with mock.patch.object(torch, "get_device_module", return_value=played):
        for part in range(4):
            queue.begin_part()
            played.current_stream().done.add(part)
    assert Event.waited_for == [frozenset(range(last)) for last in range(3)]
    LaunchQueue(torch.device("cpu")).begin_part()
    assert len(Event.waited_for) == 3


def test_a_group_starts_after_all_of_its_gradients_whatever_streams_wrote_them(pair):
    assert pair.run(exchange_from_two_streams) == [True] * 2


def exchange_from_two_streams(rank):
    """Have each gradient written on a stream of its own; return whether the group of all of them follows each."""
    PlayedWorker.played = played = PlayedDevice()
    ready, written, seen = Exchange._ready, list[str](), list[set[str]]()

    def write(exchange, member, parameter):
        written.append(f"piece {len(written)}")
        with played.stream(Stream()):
            played.current_stream().done.add(written[-1])
            ready(exchange, member, parameter)

    with (
        mock.patch.object(engine_module, "ExchangeWorker", PlayedWorker),
        mock.patch.object(Exchange, "_ready", write),
        sparse_ddp(Net(), "topk", 0.05, "single") as (ddp, engine),
    ):
        exchange = engine.pipeline.exchange
        engine.pipeline.exchange = lambda *group: (seen.append(set(played.current_stream().done)), exchange(*group))[1]
        for step in range(2):  # the first only tells the order
            ddp(batch(rank, step)).backward()
        engine.worker.drain()
    return len(written) > 3 and seen[-1] == set(written)


@pytest.mark.parametrize("wait", [lambda worker: worker.run(lambda: None), ExchangeWorker.close], ids=["run", "close"])
def test_who_waits_for_tasks_waits_for_their_work_too(played, wait):
    worker = PlayedWorker()
    worker.submit(lambda: played.current_stream().done.add("residuals"))
    wait(worker)
    assert "residuals" in played.current_stream().done
    worker.close()


class Stateful(TopK):
    """Top-k that notes on which stream it is given a state, or starts anew, and what is done by then."""

    def __init__(self):
        self.stream = None
        self.done = set()

    def load_state_dict(self, state):
        self.stream = PlayedWorker.played.current_stream()
        self.done = set(self.stream.done)


def take_up(rank, freezes):
    """Have a state taken up; return whether the worker's stream does, and whether that is after what was read."""
    PlayedWorker.played, compressor = PlayedDevice(), Stateful()
    with (
        mock.patch.object(engine_module, "ExchangeWorker", PlayedWorker),
        sparse_ddp(Net(), compressor, 0.05, "single") as (ddp, engine),
    ):
        ddp(batch(rank, 0)).backward()
        caller = PlayedWorker.played.current_stream()
        caller.done.add("read from a file")
        if freezes:
            next(ddp.module.parameters()).requires_grad_(False)
            engine.track(ddp.module)
        else:
            engine.load_state_dict(engine.state_dict())
        return compressor.stream not in (None, caller), "read from a file" in compressor.done


@pytest.mark.parametrize("freezes", [False, True], ids=["from a checkpoint", "for other parameters"])
def test_a_state_is_taken_up_on_the_stream_that_reads_it_from_then_on(pair, freezes):
    # It also drops parts of it, whose memory goes back at once to the stream for which it was allocated.
    assert pair.run(take_up, freezes) == [(True, True)] * 2


def test_a_model_is_wrapped_on_another_stream_after_what_is_written_and_before_more_is(monkeypatch):
    played, wrapped = PlayedDevice(), []

    class Wrapped(nn.Identity):
        def __init__(self, **arguments):
            super().__init__()
            stream = played.current_stream()
            wrapped.append((stream, set(stream.done)))
            stream.done.add("wrapped")

    for name in ("Stream", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(played, name))
    monkeypatch.setattr(wrapping_module, "Silent", Wrapped)
    caller = played.current_stream()
    caller.done.add("parameters written")
    wrapping_module.wrap(nn.Linear(2, 2), [0], {"init_sync": False})
    ((stream, done),) = wrapped
    assert stream is not caller
    assert "parameters written" in done
    assert "wrapped" in caller.done
