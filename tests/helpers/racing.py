"""A simulated device on the host that detects races: streams, events, memory reuse, and host waits.

Tensors are in host memory and report a GPU as their device. Each stream has a vector clock. The clocks decide whether
two accesses to a tensor's memory are ordered, independent of the order of the host's calls. There is only one rank:
each collective behaves as if all ranks sent this rank's tensors.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import lightning_sparse
from lightning_sparse import sparsify_gradients
from lightning_sparse.engine import Engine, collectives
from lightning_sparse.loop import training

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
_PACKAGE = f"{lightning_sparse.__path__[0]}/"
_real_device = torch.Tensor.device.__get__


class Wait(NamedTuple):
    what: str
    where: str  # calling function of this package; "" if the caller is outside


class Clock(dict):
    def join(self, other):
        for number, time in other.items():
            self[number] = max(self.get(number, 0), time)

    def knows(self, number, time):
        return self.get(number, 0) >= time


class Event:
    def __init__(self, device, enable_timing=False):
        self._device, self._clock = device, Clock()

    def record(self, stream=None):
        self._clock = Clock((stream or self._device.current_stream()).clock)

    def wait(self, stream=None):
        (stream or self._device.current_stream()).clock.join(self._clock)

    def synchronize(self):
        self._device.wait("synchronize", self._clock)

    def elapsed_time(self, end):
        return 1.0


class Stream:
    def __init__(self, device, name=None, priority=0):
        self._device, self.clock, self.number, self.priority = device, Clock(), len(device.streams), priority
        self.name = name or f"stream {self.number}"
        device.streams.append(self)

    def record_event(self, event=None):
        event = event or Event(self._device)
        event.record(self)
        return event

    def wait_event(self, event):
        event.wait(self)

    def wait_stream(self, other):
        self.clock.join(other.clock)


class _Memory:
    """The stream that allocated a tensor's memory, and the last operations of each stream on the memory."""

    def __init__(self, stream):
        self.stream = stream
        self.written = ()  # (stream number, time, operation), or empty
        self.read = {}  # (time, operation) by stream number


class _Host(threading.local):
    """A host thread: its current stream, and the clock of the last wait."""

    def __init__(self, first):
        self.stream, self.clock = first, Clock()
        self.asked = None  # device requested by the current call
        self.is_seen = False


class Device:
    """The subset of ``torch.get_device_module`` that the package uses; records ``races`` and ``waits``."""

    def __init__(self):
        self.races, self.waits, self.streams = [], [], []
        self.Stream = lambda device=None, priority=0: Stream(self, priority=priority)
        self.Event = partial(Event, self)
        self._memories = {}  # device memory by storage address
        self._lock = threading.RLock()
        self._default = Stream(self, "default")
        self._host = _Host(self._default)

    def current_stream(self, device=None):
        return self._host.stream

    def set_device(self, device):
        """Do nothing, because there is a single device."""

    @contextmanager
    def stream(self, stream):
        before, self._host.stream = self._host.stream, stream
        try:
            with self.seen():
                yield
        finally:
            self._host.stream = before

    @contextmanager
    def seen(self):
        if self._host.is_seen:
            yield
            return
        self._host.is_seen = True
        try:
            with _Calls(self, self._host), _Operations(self, self._host):
                yield
        finally:
            self._host.is_seen = False

    def wait(self, what, clock=None):
        """Let the host wait for its stream, or for a clock."""
        self._host.clock.join(self._host.stream.clock if clock is None else clock)
        self.waits.append(Wait(what, _place()))

    def holds(self, tensor):
        return _key(tensor) in self._memories

    def take(self, tensor):
        """Allocate device memory for a tensor without memory on the device."""
        if (key := _key(tensor)) in self._memories:
            return
        self._memories[key] = _Memory(self._host.stream)
        weakref.finalize(tensor.untyped_storage(), self._give_back, key).atexit = False

    def use(self, operation, read, written):
        """Queue an operation on the current stream, and record a race if an access is unordered."""
        with self._lock:
            stream = self._host.stream
            stream.clock.join(self._host.clock)
            time = stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
            for memory in filter(None, (self._memories.get(_key(each)) for each in read)):
                self._look(memory.written, f"{operation} reads")
                memory.read[stream.number] = time, operation
            for memory in filter(None, (self._memories.get(_key(each)) for each in written)):
                for earlier in (memory.written, *((number, *work) for number, work in memory.read.items())):
                    self._look(earlier, f"{operation} writes")
                memory.written, memory.read = (stream.number, time, operation), {}

    def _look(self, earlier, what):
        stream = self._host.stream
        if earlier and not stream.clock.knows(*earlier[:2]):
            other = self.streams[earlier[0]].name
            self.races.append(f"{what} on {stream.name} at {_place()}, beside {earlier[2]} on {other}")

    def _give_back(self, key):
        with self._lock:
            memory = self._memories.pop(key)
            works = [(number, *work) for number, work in memory.read.items()] + [memory.written] * bool(memory.written)
            for number, time, operation in works:
                if not (memory.stream.clock.knows(number, time) or self._host.clock.knows(number, time)):
                    names = memory.stream.name, self.streams[number].name
                    self.races.append(f"memory of {names[0]} is given out again beside {operation} on {names[1]}")


def _key(tensor):
    return torch._C._storage_address(tensor)


def _place():
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename.removeprefix(_PACKAGE)}:{frame.f_code.co_name}"


_MADE_ON_HOST = ("tensor", "as_tensor", "asarray", "new_tensor")  # blocking copies of host values
_READ_BY_HOST = ("tolist", "numpy")  # host reads of values, besides scalar reads
_WAITED_FOR = ("_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "masked_select", "equal", "bincount")
_WITHOUT_WORK = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view")
_JOINING = ("cat", "stack")  # operations without 0-dim host arguments beside device tensors
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
_BETWEEN_DEVICES = ("copy_", "_to_copy", *_INDEXING)


class _Calls(TorchFunctionMode):
    """Record the device that each call requests, and run the call on the host."""

    def __init__(self, device, host):
        super().__init__()
        self._device, self._host = device, host

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        is_held = first is not None and self._device.holds(first)
        asked = _asked(name, args, kwargs)
        is_made = name in _MADE_ON_HOST and (asked == CUDA or (asked is None and is_held))
        if is_made or (is_held and name in _READ_BY_HOST):
            self._device.wait(name)
        asked = CUDA if is_made else asked
        if asked is None or name == "_parse_to":  # ``_parse_to`` only parses the arguments of ``module.to``
            return func(*args, **kwargs)
        if name in ("cpu", "cuda", "to") and is_held != (asked == CUDA):
            func, args, kwargs = torch.Tensor.to, args if name == "to" else (first, CPU), {**kwargs, "copy": True}
        args, kwargs = tree_map(_on_host, (args, kwargs))
        before, self._host.asked = self._host.asked, asked
        try:
            return func(*args, **kwargs)
        finally:
            self._host.asked = before


def _asked(name, args, kwargs):
    """Return the requested device: this device, the host, or ``None``."""
    if name in ("cpu", "cuda"):
        return CPU if name == "cpu" else CUDA
    named = (torch.device(each) for each in _leaves(args, kwargs) if _names_device(each))
    return next((CPU if each.type == "cpu" else CUDA for each in named if each.type != "meta"), None)


def _names_device(argument):
    return isinstance(argument, torch.device) or (isinstance(argument, str) and argument.startswith("cuda"))


def _on_host(argument):
    return CPU if _names_device(argument) and torch.device(argument).type == "cuda" else argument


class _Operations(TorchDispatchMode):
    """Record which tensors an operation reads and writes, and whether the host waits."""

    def __init__(self, device, host):
        super().__init__()
        self._device, self._host = device, host

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        given = list(_tensors(args, kwargs))
        is_held = any(map(self._device.holds, given))
        if self._waits(name, args, kwargs, given, is_held):
            self._device.wait(name)
        result = func(*args, **kwargs)
        made = list(_tensors(result))
        changed = [args[place] if place < len(args) else kwargs.get(key) for place, key in _changed_by(func)]
        if name.startswith("_foreach"):  # torch does not count in-place _foreach changes in a dispatch mode
            torch.autograd.graph.increment_version(list(_tensors(*changed)))
        if self._host.asked == CUDA or (self._host.asked is None and is_held):
            for each in made:
                self._device.take(each)
        if not (func.is_view or name in _WITHOUT_WORK):
            self._device.use(name, given, [*_tensors(*changed), *made])
        return result

    def _waits(self, name, args, kwargs, given, is_held):
        """Return whether the host waits for an operation. Raise an error if a device does not support the operation."""
        elsewhere = [each for each in given if (each.dim() or name in _JOINING) and not self._device.holds(each)]
        if is_held and elsewhere and name not in _BETWEEN_DEVICES:
            raise RuntimeError(f"{name} was given tensors of the host beside a device's")
        # A blocking copy to the device has read its source when the copy returns.
        is_blocking = not (kwargs.get("non_blocking", False) or (args[2:3] and args[2] is True))
        if name == "_to_copy" and self._host.asked is not None and is_held != (self._host.asked == CUDA):
            return is_held or is_blocking
        if name == "copy_" and len(set(map(self._device.holds, args[:2]))) > 1:
            return self._device.holds(args[1]) or is_blocking
        if name in _INDEXING and is_held:
            return bool(elsewhere) or any(each.dtype in (torch.bool, torch.uint8) for each in _tensors(args[1]))
        has_any_size = name == "repeat_interleave" and kwargs.get("output_size") is None
        return is_held and (name in _WAITED_FOR or has_any_size)


def _leaves(*trees):
    for tree in trees:
        if isinstance(tree, (list, tuple)):
            yield from _leaves(*tree)
        elif isinstance(tree, dict):
            yield from _leaves(*tree.values())
        else:
            yield tree


def _tensors(*trees):
    return (each for each in _leaves(*trees) if isinstance(each, torch.Tensor))


@cache
def _changed_by(func):
    """Return index and name of the arguments that an operation writes."""
    arguments = enumerate(func._schema.arguments)
    return [(place, each.name) for place, each in arguments if each.alias_info is not None and each.alias_info.is_write]


@contextmanager
def played(ranks=4):
    """Simulate a device and ``ranks`` ranks that all send this rank's tensors."""
    device = Device()

    def said(tensor):
        real = _real_device(tensor)
        return CUDA if real.type == "cpu" and device.holds(tensor) else real

    def gather(received, tensor, group=None):
        received.view(dist.get_world_size(group), -1).copy_(tensor.expand(dist.get_world_size(group), -1))

    def exchange(received, tensor, group=None):
        rows = tensor.view(dist.get_world_size(group), -1)
        received.view_as(rows).copy_(rows[0].expand_as(rows))

    def add_up(tensor, op=None, group=None):
        tensor.mul_(dist.get_world_size(group))

    def run_backward(*args, **kwargs):
        with _Calls(device, device._host):  # the backward call and its hooks run outside the outer mode
            return real_backward(*args, **kwargs)

    real_backward = torch.autograd._engine_run_backward
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with (
            mock.patch.object(torch, "get_device_module", return_value=device),
            mock.patch.object(torch.Tensor, "device", property(said), create=True),
            mock.patch.object(torch.autograd, "_engine_run_backward", run_backward),
            mock.patch.object(collectives, "_all_gather_into", gather),
            mock.patch.object(dist, "all_to_all_single", exchange),
            mock.patch.object(dist, "all_reduce", add_up),
            device.seen(),
        ):
            yield device
    finally:
        dist.destroy_process_group()


SYSTEMS = {  # settings of an exchange
    **{name: {"compressor": name} for name in ("topk", "lags", "omgs", "dgc", "sdagc", "exdyna", "micro")},
    **{name: {"compressor": name, "density": None} for name in ("qsgd", "dense")},
    "owners": {"exchange": "owners"},
    "bfloat16": {"wire": "bfloat16"},
    "4 bits": {"wire": "4bit"},
    "2 bits": {"wire": "2bit"},
}


class Way(NamedTuple):
    given: Mapping[str, Any] = {}  # settings of the exchange
    build: Callable[[Any], torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.1)
    local_world_size: int = 1
    dtype: torch.dtype = torch.float32
    backwards: int = 1  # backwards per step
    clips: bool = False
    scales: bool = False
    skips: bool = False  # whether every second step skips a layer


class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.between, self.last = nn.Linear(64, 48), nn.Linear(48, 48), nn.Linear(48, 20)

    def forward(self, inputs, skips):
        hidden = torch.tanh(self.first(inputs))
        return self.last(hidden if skips else self.between(hidden)).square().mean()


def train(way, steps):
    """Train on the simulated device and yield the handle after each step."""
    torch.manual_seed(0)
    net = Skipping().to(CUDA, way.dtype)
    optimizer = way.build(net.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if way.scales else None

    def engine(ddp, settings, timeout, say, local_world_size, *around):
        return Engine(ddp, settings, timeout, say, way.local_world_size, *around)

    given = {"density": 0.05, "schedule": "layerwise", "warmup_steps": 0, **way.given}
    with (
        mock.patch.object(training, "Engine", engine),
        sparsify_gradients(net, optimizer, scaler=scaler, levels=1, **given) as handle,
    ):
        for step in range(steps):
            for _ in range(way.backwards):
                loss = net(torch.randn(4, 64, device=CUDA, dtype=way.dtype), way.skips and step % 2 == 1)
                (loss if scaler is None else scaler.scale(loss)).backward()
            if way.clips:
                if scaler is not None:
                    scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step() if scaler is None else scaler.step(optimizer)
            if scaler is not None:
                scaler.update()
            optimizer.zero_grad()
            yield handle
