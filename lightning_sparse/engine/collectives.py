"""Collective calls of torch.distributed, and errors if a rank fails."""

import json
import re
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import cached_property, reduce
from itertools import accumulate, groupby
from textwrap import shorten
from typing import Any, Optional, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GroupMember
from torch.distributed.constants import default_pg_timeout
from torch.nn import Module, Parameter, functional
from typing_extensions import Self

from lightning_sparse.engine.observe import Recorder
from lightning_sparse.engine.wire.base import Payload
from lightning_sparse.schedule.network import DIRECT_BYTES, sent_bytes

_BROADCAST_BYTES = 250 << 20  # bytes per broadcast, as in DDP


class ExchangeError(RuntimeError):
    """A collective failed because another rank died, is too slow, cannot be reached, or has finished."""


class SharedOnCopy:
    """An object that exists once per process, for example a thread or a process group. Deep copies share the object."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class Watch(SharedOnCopy):
    """A module hook that calls ``act``, except on copies of the module."""

    def __init__(self, module: Optional[Module], act: Callable[..., None]) -> None:
        self._module = module
        self._act = act

    def __call__(self, module: Module, *arguments: Any) -> None:
        """Call ``act`` if the hook belongs to this module."""
        if module is self._module:
            self._act(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return Watch, (None, None)


def backend_of(device: torch.device, group: Optional[dist.ProcessGroup] = None) -> str:
    """Return the name of a group's backend for a device, or ``""`` without a backend."""
    by_kind: dict[str, str] = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    return by_kind.get(device.type, "")


def _default_group() -> dist.ProcessGroup:
    assert GroupMember.WORLD is not None
    return GroupMember.WORLD


def timeout_of_job(device: torch.device) -> Optional[timedelta]:
    """Return the timeout of the default process group, or ``None`` if the backend hides the timeout."""
    with suppress(RuntimeError, AttributeError):
        timeout: timedelta = _default_group()._get_backend(device).options._timeout
        return timeout
    return None


def all_gather_object(thing: Any, group: Optional[dist.ProcessGroup] = None) -> list[Any]:
    """Gather a picklable object from every rank of a group (default: all ranks)."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, thing, group)
    return gathered


def broadcast_tensors(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite tensors by the group's first rank's tensors. All ranks of the group must call this."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for each in tensors:
        if each.numel():
            by_dtype.setdefault(each.dtype, []).append(each)
    for alike in by_dtype.values():
        ends = accumulate(each.nbytes for each in alike)
        for _, message in groupby(zip(alike, ends), key=lambda pair: pair[1] // _BROADCAST_BYTES):
            _broadcast_message([each for each, _ in message], group)


@torch.no_grad()
def _broadcast_message(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    flat = torch.cat([each.reshape(-1) for each in tensors])
    dist.broadcast(flat, dist.get_global_rank(group, 0), group)
    if dist.get_rank(group) != 0:
        received = flat.split([each.numel() for each in tensors])
        torch._foreach_copy_(list(tensors), [one.view(each.shape) for one, each in zip(received, tensors)])


def ddp_ignored_names(module: Module) -> frozenset[str]:
    """Return the names of parameters and buffers that DDP is set to ignore."""
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def ddp_parameters(module: Module) -> dict[str, Parameter]:
    """Return the parameters that DDP does not ignore, by name."""
    ignored = ddp_ignored_names(module)
    return {name: each for name, each in module.named_parameters() if name not in ignored}


def sync_module_states(module: Module, known: Iterable[str] = ()) -> None:
    """Copy parameters and buffers from rank 0 in place, except the names in ``known``. Raise if shapes differ."""
    group, left_out = _default_group(), ddp_ignored_names(module) | set(known)
    parameters: list[Tensor] = [each for name, each in module.named_parameters() if name not in left_out]
    if len(set(map(str, all_gather_object([list(each.shape) for each in parameters])))) > 1:
        raise RuntimeError("the models of ranks differ in parameter number or shape: build the same model on all ranks")
    buffers = (each for name, each in module.named_buffers() if name not in left_out)
    broadcast_tensors([*parameters, *buffers], group)


def broadcast_buffers(module: Module, group: Optional[dist.ProcessGroup] = None) -> None:
    """Copy buffers from a group's first rank in place, without an error in a backward of an earlier forward."""
    group, left_out = group or _default_group(), ddp_ignored_names(module)
    buffers = (each.data for name, each in module.named_buffers() if name not in left_out)  # .data: no version changes
    broadcast_tensors(buffers, group)


def all_reduce_sum(tensor: Tensor, group: Optional[dist.ProcessGroup] = None) -> Tensor:
    """Sum a tensor in place over the ranks of a group (default: all ranks)."""
    dist.all_reduce(tensor, group=group)
    return tensor


def all_gather_via_store(line: str, timeout: Optional[timedelta] = None) -> list[str]:
    """Gather a string from every rank through the job's store, not through a process group.

    Other ranks may still be in a step. A collective on a group in use would pair with a collective of the step.
    """
    store, rank, world_size = default_store(), dist.get_rank(), dist.get_world_size()
    limit = default_pg_timeout if timeout is None else timeout
    # Each rank counts its calls, so that all ranks use the same key in the same call.
    place = f"lightning_sparse/gathered/{store.add(f'lightning_sparse/gatherings/{rank}', 1)}"
    store.set(f"{place}/{rank}", line)
    if rank == 0:
        handed_in = [f"{place}/{each}" for each in range(world_size)]
        store.wait(handed_in, limit)
        store.set(place, json.dumps([store.get(each).decode() for each in handed_in]))
    store.wait([place], limit)
    gathered: list[str] = json.loads(store.get(place))
    return gathered


@contextmanager
def translate_backend_errors(subject: str, name: str, timeout: Optional[timedelta]) -> Iterator[None]:
    """Raise :class:`ExchangeError` for a backend's error inside, except an error of this rank's device.

    The message has the ``subject`` (the exchanged data), the collective's ``name`` and the ``timeout``.
    """
    try:
        yield
    except RuntimeError as error:
        if _is_of_this_rank(error):
            raise
        raise ExchangeError(
            f"rank {dist.get_rank()} of {dist.get_world_size()} waited in vain in {name} of {subject}, with a"
            f" timeout of {timeout}: {_errors_of_others() or _UNKNOWN_CAUSE} To continue, start the job again"
            f" from the last checkpoint (ckpt_path=...). The backend's error: {error}"
        ) from error


def post_error(error: Optional[BaseException]) -> None:
    """Store this rank's error, or ``None``, for the ranks that wait for this rank."""
    if dist.is_initialized() and not isinstance(error, ExchangeError):  # An ExchangeError names another rank.
        with suppress(Exception):  # A failing store must not hide the error itself.
            line = "" if error is None else shorten(f"{type(error).__name__}: {error}", _MAX_CHARACTERS)
            default_store().set(_ERROR_KEY.format(dist.get_rank()), line)


def _errors_of_others() -> str:
    found: dict[int, str] = {}

    def read() -> None:
        with suppress(Exception):
            for rank in set(range(dist.get_world_size())) - {dist.get_rank()}:
                if default_store().check([key := _ERROR_KEY.format(rank)]):
                    found[rank] = default_store().get(key).decode()

    # The store's calls block without a timeout if the rank that hosts the store has stopped.
    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    reading.join(_PATIENCE_WITH_STORE)
    return " ".join(f"rank {rank} has failed with {line.rstrip('.')}." for rank, line in sorted(found.items()) if line)


def _is_of_this_rank(error: RuntimeError) -> bool:
    return isinstance(error, _ERRORS_OF_THIS_RANK) or re.search(_NCCL_OF_THIS_RANK, str(error)) is not None


def default_store() -> Any:
    """Return the store of the default process group."""
    return _default_group().get_group_store()


_UNKNOWN_CAUSE = (
    "another rank has died, exceeded the process group's timeout, or has finished, because ranks have different numbers"
    " of batches. Look for the first error in the output of all ranks; give SparseDDPStrategy a longer timeout=... if"
    " ranks are only slow."
)
_ERROR_KEY = "lightning_sparse/error/{}"
_MAX_CHARACTERS = 300  # length of a stored error
_PATIENCE_WITH_STORE = 3.0  # seconds
_NCCL_OF_THIS_RANK = "ncclUnhandledCudaError|ncclInvalid"
_ERRORS_OF_THIS_RANK = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))


# torch 2.13 renamed the function, and the old name warns.
_all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Result = TypeVar("Result")
Phases = Generator[Payload, Tensor, Result]


class Communicator(SharedOnCopy):
    """Collectives over one process group, with records of bytes and seconds.

    User code launches collectives from another thread, so in a shared group the order could differ between ranks.

    Args:
        ranks: global ranks of the group.
        timeout: timeout of each collective; by default the timeout of the job's process group.
        parts: all groups of ranks to create, if the ranks are divided; ``None`` for a single group.
        shared: an existing group to use, because each NCCL group takes GPU memory.
        recorder: the recorder of the engine; by default a new one.
        is_inside_node: whether all bytes stay inside a node.
    """

    def __init__(
        self,
        ranks: list[int],
        device: torch.device,
        timeout: Optional[timedelta] = None,
        parts: Optional[Sequence[list[int]]] = None,
        shared: Optional[dist.ProcessGroup] = None,
        recorder: Optional[Recorder] = None,
        is_inside_node: bool = False,
    ) -> None:
        timeout = timeout_of_job(device) if timeout is None else timeout
        self._timeout = timeout
        self._is_shared = shared is not None
        self.group = shared
        if shared is not None and timeout is not None:
            # Meshes create groups with torch's default timeout. TORCH_DISTRIBUTED_DEBUG hides the setter.
            with suppress(RuntimeError):
                shared.set_timeout(timeout)
        elif shared is None:
            # All ranks of the job create each group. With use_local_synchronization a new group could get the name of
            # a destroyed group, and would read stale addresses from the store.
            groups = [(part, dist.new_group(part, timeout=timeout)) for part in parts or [ranks]]
            self.group = next(group for part, group in groups if part == ranks)
        self.device = device
        self.rank = dist.get_rank(self.group)
        self.world_size = dist.get_world_size(self.group)
        self.recorder = Recorder(device, self.world_size) if recorder is None else recorder
        self._is_inside_node = is_inside_node
        self._goes_around = self.backend == "gloo" and self.world_size > _ONE_HOP

    @property
    def backend(self) -> str:
        """Name of the group's backend for the device."""
        return backend_of(self.device, self.group)

    def run(self, phases: Phases[Result]) -> Result:
        """Run the collective of each phase, and send the result to the next phase."""
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
        """Run a collective, and record bytes and seconds."""
        self.recorder.add_bytes(self.sent_bytes(payload.collective, payload.tensor), self._is_inside_node)
        with self.recorder.span("exchange"), self.translate_errors(self.recorder.subject, payload.collective):
            return self.issue(*payload)

    def issue(self, name: str, tensor: Tensor, out: Optional[Tensor] = None) -> Tensor:
        """Run the collective called ``name``. ``out`` may be a buffer for the result."""
        received: Tensor = getattr(self, name)(tensor, out)
        return received

    def translate_errors(self, subject: str, name: str = "all_gather") -> AbstractContextManager[None]:
        """Call :func:`translate_backend_errors` with the timeout of this group."""
        return translate_backend_errors(subject, name, self._timeout)

    @cached_property
    def _shares(self) -> dict[str, float]:
        """Bytes sent per input byte for each collective: ``2 (n - 1) / n`` for a ring all-reduce."""
        return {name: sent_bytes(name, 1, self.world_size) for name in _PROBE_SHAPES}

    def sent_bytes(self, name: str, tensor: Tensor) -> float:
        """Return the bytes that this rank sends in a collective of equally large tensors."""
        return self._shares[name] * (tensor.numel() * tensor.element_size())

    def all_gather(self, tensor: Tensor, out: Optional[Tensor] = None) -> Tensor:
        """Gather a flat tensor of equal size from every rank into ``[world_size, numel]``."""
        gathered = tensor.new_empty(self.world_size, tensor.numel()) if out is None else out
        # gloo's all-gather takes a ring of steps. An all-to-all sends the same bytes in a single round trip.
        if self._goes_around and 0 < gathered.nbytes <= DIRECT_BYTES:
            return self.all_to_all(tensor.expand(self.world_size, -1).contiguous(), gathered)
        _all_gather_into(gathered.view(-1), tensor, group=self.group)
        return gathered

    def all_to_all(self, tensor: Tensor, out: Optional[Tensor] = None) -> Tensor:
        """Send row ``r`` of ``[world_size, numel]`` to rank ``r``. Row ``r`` of the result came from rank ``r``."""
        received = torch.empty_like(tensor) if out is None else out
        # gloo lacks some 16-bit dtypes, so the rows are sent as bytes.
        dist.all_to_all_single(received.view(torch.uint8), tensor.view(torch.uint8), group=self.group)
        return received

    def all_reduce(self, tensor: Tensor, out: Optional[Tensor] = None) -> Tensor:
        """Sum a tensor over ranks, in place."""
        if not self._goes_direct(tensor):
            dist.all_reduce(tensor, group=self.group)
            return tensor
        # A reduce-scatter and an all-gather: two round trips, while gloo's all-reduce goes twice around a ring.
        parts = functional.pad(tensor.flatten(), (0, -tensor.numel() % self.world_size)).view(self.world_size, -1)
        mine = self.all_to_all(parts).sum(dim=0, dtype=tensor.dtype)
        return tensor.copy_(self.all_gather(mine).view(-1)[: tensor.numel()].view_as(tensor))

    def _goes_direct(self, tensor: Tensor) -> bool:
        return self._goes_around and 0 < tensor.nbytes <= DIRECT_BYTES

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        """Start an in-place sum of a tensor over ranks, and return a function that waits for the result."""
        if self._goes_direct(tensor):
            self.all_reduce(tensor)
            return lambda: None
        work = dist.all_reduce(tensor, group=self.group, async_op=True)

        def wait() -> None:
            with self.translate_errors(f"{tensor.numel()} elements of gradients", "all_reduce"):
                work.wait()

        return wait

    def gather_numbers(self, numbers: Sequence[float]) -> Tensor:
        """Gather equally many numbers from every rank, as float64 ``[world_size, numbers]`` on the device."""
        handed_in = torch.tensor(numbers, dtype=torch.float64).to(self.device, non_blocking=True)
        with self.translate_errors(f"{len(numbers)} numbers on which ranks agree"):
            return self.all_gather(handed_in)

    def mean_of_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Return the means of numbers over ranks, gathered in chunks to bound the memory.

        The CPU adds in rank order: GPUs of several kinds may round differently, so that ranks decide differently.
        """
        count = max(1, _NUMBERS_AT_ONCE // self.world_size)
        parts = (numbers[start : start + count] for start in range(0, len(numbers), count))
        sums = (reduce(torch.add, self.gather_numbers(part).cpu()) for part in parts)
        return [total / self.world_size for of_part in sums for total in of_part.tolist()]

    def check(self, names: Iterable[str]) -> None:
        """Run each collective once on a few bytes. Raise an error if the backend lacks a collective on this device."""
        # NCCL's first all-to-all connects all pairs of ranks, which takes gigabytes of GPU memory.
        knows_all = self.backend in ("gloo", "nccl")
        for name in names:
            if knows_all and name != "all_gather":
                continue
            try:
                self.issue(name, torch.zeros(self.world_size, 4, device=self.device).view(_PROBE_SHAPES[name]))
            except (RuntimeError, NotImplementedError, ValueError) as error:
                raise RuntimeError(
                    f"process_group_backend={self.backend!r} cannot run {name} on {self.device}, which"
                    " this compressor needs. Use process_group_backend='gloo' on CPU or 'nccl' on CUDA, or another"
                    " compressor."
                ) from error

    def close(self, has_failed: bool = False) -> None:
        """Destroy the process group, unless this rank ``has_failed`` and other ranks wait. Safe to call twice."""
        # With gloo, destroying the group ends the wait of other ranks. NCCL would first wait for other ranks here and
        # hide this rank's error, so an NCCL group stays until the process ends.
        is_there = self.group is not None and not self._is_shared and dist.is_initialized()
        if is_there and not (has_failed and self.backend != "gloo"):
            dist.destroy_process_group(self.group)
        self.group = None


_ONE_HOP = 2  # ranks in a ring that takes a single hop
_NUMBERS_AT_ONCE = 1 << 20  # numbers of all ranks together, 8 MiB
_PROBE_SHAPES: dict[str, tuple[int, ...]] = {"all_gather": (-1,), "all_to_all": (-1, 4), "all_reduce": (-1,)}
