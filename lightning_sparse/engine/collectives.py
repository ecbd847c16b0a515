"""Collectives of torch.distributed, and the thread that runs collectives during backward."""

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cached_property
from typing import Any, Optional, TypeVar, Union

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GroupMember
from torch.nn import Module, Parameter, functional
from typing_extensions import Self

from lightning_sparse.engine.observe import Recorder
from lightning_sparse.engine.store import raise_exchange_error
from lightning_sparse.engine.wire.base import Payload
from lightning_sparse.schedule.costs import DIRECT_BYTES, SENT_SHARES, sent_bytes

_BROADCAST_BYTES = 250 << 20  # approximate bytes of one broadcast; DDP uses the same number


class SharedOnCopy:
    """Base class of objects that deep copies share, for example threads."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def backend_of(device: torch.device, group: Optional[dist.ProcessGroup] = None) -> str:
    """Return the name of a process group's backend for a device's type, or ``""`` if no backend supports this type."""
    by_kind: dict[str, str] = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    return by_kind.get(device.type, "")


def default_group() -> dist.ProcessGroup:
    """Return the default process group, which has all ranks of the job."""
    assert GroupMember.WORLD is not None
    return GroupMember.WORLD


def timeout_of_job(device: torch.device) -> Optional[timedelta]:
    """Return the timeout of the default process group, or ``None`` if the backend does not reveal the timeout."""
    with suppress(RuntimeError, AttributeError):
        timeout: timedelta = default_group()._get_backend(device).options._timeout
        return timeout
    return None


def all_gather_object(thing: Any, group: Optional[dist.ProcessGroup] = None) -> list[Any]:
    """Gather a picklable object from every rank of a process group, by default of the group of all ranks."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, thing, group)
    return gathered


def broadcast_tensors(tensors: Iterable[Tensor], group: Optional[dist.ProcessGroup]) -> None:
    """Overwrite tensors with the values of the process group's first rank. All ranks of the group must call this."""
    if held := [each.detach() for each in tensors if each.numel()]:
        dist._broadcast_coalesced(group, held, _BROADCAST_BYTES, 0)  # type: ignore[arg-type, attr-defined]  # as DDP does


def ddp_ignored_names(module: Module) -> frozenset[str]:
    """Return the names of parameters and buffers that DDP is set to ignore."""
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def ddp_parameters(module: Module) -> dict[str, Parameter]:
    """Return the parameters that DDP does not ignore, by name."""
    ignored = ddp_ignored_names(module)
    return {name: each for name, each in module.named_parameters() if name not in ignored}


def broadcast_buffers(module: Module) -> None:
    """Overwrite a module's buffers with rank 0's values. ``.data`` hides the writes from autograd's version checks."""
    left_out = ddp_ignored_names(module)
    buffers = (each.data for name, each in module.named_buffers() if name not in left_out)
    broadcast_tensors(buffers, default_group())


@contextmanager
def translate_backend_errors(subject: str, name: str, timeout: Optional[timedelta]) -> Iterator[None]:
    """Convert errors of collectives to :class:`ExchangeError`, except errors of this rank's device."""
    try:
        yield
    except RuntimeError as error:
        raise_exchange_error(error, subject, name, timeout)


# torch 2.13 renamed all_gather_into_tensor() to all_gather_single(). The old name causes a warning.
_all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_CAPTURED = (
    "an exchange of gradients ran while a device captured a graph. Each replay of the graph would use the densities and"
    " the step count of this step. Capture only forward and backward of a part of the model, without the exchange and"
    " the optimizer step: use torch.cuda.make_graphed_callables or torch.compile(mode='reduce-overhead')."
)
_ONE_HOP = 2  # number of ranks for which a ring algorithm needs only one hop

Result = TypeVar("Result")
Phases = Generator[Payload, Tensor, Result]
# A task has a function, a future for the function's result, and the GPU events to wait for first.
_Task = tuple[Callable[[], Any], Future[Any], Sequence[Any]]


class Communicator(SharedOnCopy):
    """Run collectives in one process group, and record bytes and seconds.

    The process group is new, because user code may start collectives in an existing group on another thread. The order
    of collectives in the existing group could then differ between ranks.

    Args:
        ranks: global ranks of the group.
        timeout: timeout of each collective; by default the timeout of the job's process group.
        parts: ranks of each group to create, for example of one group per node; by default only the group of ``ranks``.
        recorder: recorder of bytes and seconds; by default a new recorder.
        is_inside_node: whether the recorder counts the bytes as bytes that stay inside a node.
    """

    def __init__(
        self,
        ranks: list[int],
        device: torch.device,
        timeout: Optional[timedelta] = None,
        parts: Optional[Sequence[list[int]]] = None,
        recorder: Optional[Recorder] = None,
        is_inside_node: bool = False,
    ) -> None:
        timeout = timeout_of_job(device) if timeout is None else timeout
        self._timeout = timeout
        # All ranks of the job create each group. With torch's use_local_synchronization, a new group could get the
        # name of a destroyed group. The new group would then read stale addresses from the store.
        groups = [(part, dist.new_group(part, timeout=timeout)) for part in parts or [ranks]]
        self.group: Optional[dist.ProcessGroup] = next(group for part, group in groups if part == ranks)
        self.device = device
        self.rank = dist.get_rank(self.group)
        self.world_size = dist.get_world_size(self.group)
        self.recorder = Recorder(device, self.world_size) if recorder is None else recorder
        self._is_inside_node = is_inside_node
        self._goes_around = self.backend == "gloo" and self.world_size > _ONE_HOP

    @property
    def backend(self) -> str:
        """Name of the process group's backend for the device."""
        return backend_of(self.device, self.group)

    def run(self, phases: Phases[Result]) -> Result:
        """Run the collective of each payload that a generator yields, and send each result back to the generator."""
        received: Optional[Tensor] = None
        while True:
            try:
                with self.recorder.span("encode"):
                    payload = phases.send(received)  # type: ignore[arg-type]  # a generator starts with None
            except StopIteration as stop:
                result: Result = stop.value
                return result
            received = self.call(payload)

    def call(self, payload: Payload) -> Tensor:
        """Run the collective of a payload, and record the sent bytes and the seconds."""
        name, tensor = payload
        self.recorder.add_bytes(self._shares[name] * tensor.nbytes, self._is_inside_node)
        with self.recorder.span("exchange"), self.translate_errors(self.recorder.subject, name):
            return self.issue(name, tensor)

    def issue(self, name: str, tensor: Tensor) -> Tensor:
        """Run the collective ``name``, and record no bytes or seconds."""
        received: Tensor = getattr(self, name)(tensor)
        return received

    @cached_property
    def _shares(self) -> dict[str, float]:
        """Bytes that a rank sends per byte of input, by collective: ``2 (n - 1) / n`` for a ring all-reduce."""
        return {name: sent_bytes(name, 1, self.world_size) for name in SENT_SHARES}

    def translate_errors(self, subject: str, name: str = "all_gather") -> AbstractContextManager[None]:
        """Return a context that converts errors of collectives to :class:`ExchangeError`."""
        return translate_backend_errors(subject, name, self._timeout)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Gather a flat tensor of equal size from every rank into ``[world_size, numel]``."""
        # gloo's all-gather goes around a ring of ranks. An all-to-all sends the same bytes in one round trip.
        if self._goes_around and 0 < self.world_size * tensor.nbytes <= DIRECT_BYTES:
            return self.all_to_all(tensor.expand(self.world_size, -1).contiguous())
        gathered = tensor.new_empty(self.world_size, tensor.numel())
        _all_gather_into(gathered.view(-1), tensor, group=self.group)
        return gathered

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Send row ``r`` of ``[world_size, numel]`` to rank ``r``. Row ``r`` of the result is from rank ``r``."""
        received = torch.empty_like(tensor)
        # gloo lacks some 16-bit dtypes, so the rows are sent as bytes.
        dist.all_to_all_single(received.view(torch.uint8), tensor.view(torch.uint8), group=self.group)
        return received

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over ranks, in place."""
        if not (self._goes_around and 0 < tensor.nbytes <= DIRECT_BYTES):
            dist.all_reduce(tensor, group=self.group)
            return tensor
        # A reduce-scatter and an all-gather take two round trips. gloo's all-reduce goes twice around a ring.
        parts = functional.pad(tensor.flatten(), (0, -tensor.numel() % self.world_size)).view(self.world_size, -1)
        mine = self.all_to_all(parts).sum(dim=0, dtype=tensor.dtype)
        return tensor.copy_(self.all_gather(mine).view(-1)[: tensor.numel()].view_as(tensor))

    def gather_numbers(self, numbers: Union[Sequence[float], Tensor]) -> Tensor:
        """Gather numbers, as float64, or a tensor from every rank, as ``[world_size, len(numbers)]`` on the device."""
        with self.translate_errors(f"{len(numbers)} numbers on which ranks agree"):
            if not isinstance(numbers, Tensor):
                numbers = torch.tensor(numbers, dtype=torch.float64).to(self.device, non_blocking=True)
            return self.all_gather(numbers)

    def mean_of_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Return the mean of each number over ranks. The means are bitwise identical on all ranks."""
        handed_in = torch.tensor(numbers, dtype=torch.float64).to(self.device, non_blocking=True)
        with self.translate_errors(f"{len(numbers)} numbers to average", "all_reduce"):
            means: list[float] = (self.all_reduce(handed_in) / self.world_size).tolist()
        return means

    def close(self, has_failed: bool = False) -> None:
        """Destroy the process group. After an error (``has_failed``) destroy only gloo groups."""
        # After an error, the end of a gloo group also ends the wait of other ranks. NCCL would first wait here for the
        # other ranks, and this rank's error would not appear. An NCCL group therefore lives until the process ends.
        is_there = self.group is not None and dist.is_initialized()
        if is_there and not (has_failed and self.backend != "gloo"):
            dist.destroy_process_group(self.group)
        self.group = None


class ExchangeWorker:
    """Run tasks in order on a separate thread and, on a GPU, on a separate stream.

    After an error of a task, later tasks are skipped. All collectives of an exchange start on this thread, because
    gloo has a race if a callback of one collective starts another collective.
    """

    def __init__(self, device: torch.device) -> None:
        self.error: Optional[BaseException] = None
        self._device = device
        self._device_module = None if device.type == "cpu" else torch.get_device_module(device)
        # The stream has high priority, so that a task's many small kernels do not wait behind the kernels of backward.
        self._stream = self._device_module.Stream(device, priority=-1) if self._device_module else None
        # Only some device types can capture graphs of kernels.
        self._is_captured = getattr(self._device_module, "is_current_stream_capturing", lambda: False)
        self._updated: set[Any] = set()  # streams with work that the next task must wait for
        self._tasks: queue.SimpleQueue[Optional[_Task]] = queue.SimpleQueue()
        # A daemon thread does not block the interpreter's exit while a collective waits for a dead rank.
        self._thread = threading.Thread(target=self._loop, name="lightning_sparse.exchange", daemon=True)
        self._thread.start()

    def wait_for_caller(self) -> None:
        """Make the next task wait for the work that the calling thread has queued on the current stream so far."""
        if self._device_module:
            self._updated.add(self._device_module.current_stream(self._device))

    def submit(self, task: Callable[[], Result]) -> Future[Result]:
        """Queue a task. On a GPU, the task starts after the work queued so far on the caller's current stream."""
        if self._is_captured():
            raise RuntimeError(_CAPTURED)
        self.wait_for_caller()
        ready = [stream.record_event() for stream in self._updated]
        self._updated.clear()
        result: Future[Result] = Future()
        self._tasks.put((task, result, ready))
        return result

    def run(self, task: Callable[[], Result]) -> Result:
        """Run a task behind the queued tasks, and return the result. Raise an error of this or an earlier task."""
        return self.wait(self.submit(task))

    def drain(self) -> None:
        """Wait for the queued tasks. If a task has failed, raise the error of the first failed task."""
        self.run(lambda: None)

    def wait(self, submitted: Future[Result]) -> Result:
        """Wait for a task. On a GPU, the caller's stream then waits for the worker's stream."""
        result = submitted.result()
        self.raise_error()
        self._sync_caller_stream()
        return result

    def raise_error(self) -> None:
        """If a task has failed, raise the error of the first failed task."""
        if self.error is not None:
            raise self.error

    def close(self, patience: float = 5.0) -> bool:
        """End the thread after the queued tasks. Return whether the thread has ended within ``patience`` seconds."""
        self._tasks.put(None)
        self._thread.join(patience)
        has_ended = not self._thread.is_alive()
        if has_ended:
            # After an interrupted backward, the worker's kernels may still run. The caller may next read residuals that
            # the kernels write, or reuse the memory of gradients.
            self._sync_caller_stream()
        return has_ended

    def _sync_caller_stream(self) -> None:
        if self._device_module:
            self._device_module.current_stream(self._device).wait_stream(self._stream)

    def _loop(self) -> None:
        if self._device_module:
            self._device_module.set_device(self._device)  # a new thread's current device is device 0
        with torch.no_grad(), self._device_module.stream(self._stream) if self._device_module else nullcontext():
            while (task := self._tasks.get()) is not None:
                self._perform(*task)
                del task  # frees the task's gradients before the thread waits again

    def _perform(self, task: Callable[[], Result], submitted: Future[Optional[Result]], ready: Sequence[Any]) -> None:
        result = None
        try:
            if self.error is None:
                if self._stream is not None:
                    for event in ready:
                        self._stream.wait_event(event)
                result = task()
        except BaseException as error:  # raise_error() raises this error on the caller's thread
            self.error = self.error or error
        submitted.set_result(result)  # After an error, the result is None, and wait() raises the error.
