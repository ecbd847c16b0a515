"""Calls of torch.distributed that all ranks make at the same time, and errors where one of them fails."""

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

_BROADCAST_BYTES = 250 << 20  # of a message, as of DDP


class ExchangeError(RuntimeError):
    """A rank waited in vain for another one, which has died, is too slow, cannot be reached, or has finished."""


class SharedOnCopy:
    """What a process has once, such as a thread or a process group: a copy of what refers to it refers to it, too."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class Watch(SharedOnCopy):
    """Call ``act`` before a module does what this is a hook of; nothing before a copy of it does."""

    def __init__(self, module: Optional[Module], act: Callable[..., None]) -> None:
        self._module = module
        self._act = act

    def __call__(self, module: Module, *arguments: Any) -> None:
        """Act."""
        if module is self._module:
            self._act(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return Watch, (None, None)


def backend_of(device: torch.device, group: Optional[dist.ProcessGroup] = None) -> str:
    """Return the name of the backend that a group has for a device, of several that it may have; ``""`` for none."""
    by_kind: dict[str, str] = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    return by_kind.get(device.type, "")


def _default_group() -> dist.ProcessGroup:
    assert GroupMember.WORLD is not None
    return GroupMember.WORLD


def timeout_of_job(device: torch.device) -> Optional[timedelta]:
    """Return how long the collectives of the job's own group may wait; ``None`` where its backend does not tell."""
    with suppress(RuntimeError, AttributeError):
        timeout: timedelta = _default_group()._get_backend(device).options._timeout
        return timeout
    return None


def all_gather_object(thing: Any, group: Optional[dist.ProcessGroup] = None) -> list[Any]:
    """Gather what every rank of the job, or of a group, hands in, where all of them come at the same time."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, thing, group)
    return gathered


def broadcast_tensors(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite tensors by those of the group's first rank, all of whose ranks come at the same time."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for each in tensors:
        by_dtype.setdefault(each.dtype, []).append(each)
    for alike in by_dtype.values():
        ends = accumulate(each.nbytes for each in alike)
        for _, message in groupby(zip(alike, ends), key=lambda pair: pair[1] // _BROADCAST_BYTES):
            _broadcast_message([each for each, _ in message], group)


@torch.no_grad()
def _broadcast_message(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    flat = torch.cat([each.reshape(-1) for each in tensors])
    dist.broadcast(flat, dist.get_global_rank(group, 0), group)
    for each, received in zip(tensors, flat.split([each.numel() for each in tensors])):
        each.copy_(received.view(each.shape))


def ddp_ignored_names(module: Module) -> frozenset[str]:
    """Return the names of what users have told DDP to leave alone."""
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def ddp_parameters(module: Module) -> dict[str, Parameter]:
    """Return the parameters that DDP was not told to leave alone, by name."""
    ignored = ddp_ignored_names(module)
    return {name: each for name, each in module.named_parameters() if name not in ignored}


def sync_module_states(module: Module, known: Iterable[str] = ()) -> None:
    """Copy parameters and buffers from rank 0, in place, but those known; raise where ranks have other shapes."""
    group, left_out = _default_group(), ddp_ignored_names(module) | set(known)
    parameters: list[Tensor] = [each for name, each in module.named_parameters() if name not in left_out]
    if len(set(map(str, all_gather_object([list(each.shape) for each in parameters])))) > 1:
        raise RuntimeError("ranks have models whose parameters differ in number or shape: build one model on all ranks")
    buffers = (each for name, each in module.named_buffers() if name not in left_out)
    broadcast_tensors([*parameters, *buffers], group)


def broadcast_buffers(module: Module, group: Optional[dist.ProcessGroup] = None) -> None:
    """Copy buffers from the first rank of all, or of a group, in place; a graph of an earlier forward does not mind."""
    group, left_out = group or _default_group(), ddp_ignored_names(module)
    buffers = (each.data for name, each in module.named_buffers() if name not in left_out)  # .data: no version changes
    broadcast_tensors(buffers, group)


def all_reduce_sum(tensor: Tensor, group: Optional[dist.ProcessGroup] = None) -> Tensor:
    """Add up a tensor over all ranks of the job, or of a group, in place, where all come at the same time."""
    dist.all_reduce(tensor, group=group)
    return tensor


def all_gather_via_store(line: str, timeout: Optional[timedelta] = None) -> list[str]:
    """Gather a line of every rank in the store by which the ranks have found each other, within the timeout.

    Ranks that have noticed nothing go on with their step: on a process group in use they would take it for one of that.
    """
    store, rank, world_size = _store(), dist.get_rank(), dist.get_world_size()
    limit = default_pg_timeout if timeout is None else timeout
    # One for each time that this rank has called; as on the others.
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
    """Raise :class:`ExchangeError` about a subject for a backend's error inside, not for this device's."""
    try:
        yield
    except RuntimeError as error:
        if _is_of_this_rank(error):
            raise
        raise ExchangeError(
            f"rank {dist.get_rank()} of {dist.get_world_size()} waited in vain in {name} of {subject}, with a"
            f" timeout of {timeout}: {_errors_of_others() or _UNKNOWN_CAUSE} To go on, start the job again"
            f" from its last checkpoint (ckpt_path=...). The backend said: {error}"
        ) from error


def post_error(error: Optional[BaseException]) -> None:
    """Store this rank's error, or that it has none, for the ranks that wait for it in vain."""
    if dist.is_initialized() and not isinstance(error, ExchangeError):  # which names the rank that failed first
        with suppress(Exception):  # the error itself is what counts
            line = "" if error is None else shorten(f"{type(error).__name__}: {error}", _MAX_CHARACTERS)
            _store().set(_ERROR_KEY.format(dist.get_rank()), line)


def _errors_of_others() -> str:
    found: dict[int, str] = {}

    def read() -> None:
        with suppress(Exception):
            for rank in set(range(dist.get_world_size())) - {dist.get_rank()}:
                if _store().check([key := _ERROR_KEY.format(rank)]):
                    found[rank] = _store().get(key).decode()

    # The store's own calls wait for ever where it is held by a rank that has stopped.
    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    reading.join(_PATIENCE_WITH_STORE)
    return " ".join(f"rank {rank} has failed with {line.rstrip('.')}." for rank, line in sorted(found.items()) if line)


def _is_of_this_rank(error: RuntimeError) -> bool:
    return isinstance(error, _ERRORS_OF_THIS_RANK) or re.search(_NCCL_OF_THIS_RANK, str(error)) is not None


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


_UNKNOWN_CAUSE = (
    "another rank has died, did not get there before the process group's timeout, or has finished, where ranks have"
    " different numbers of batches. Look at the other ranks' output for the first error; give SparseDDPStrategy a"
    " longer timeout=... if they are only slow."
)
_ERROR_KEY = "lightning_sparse/error/{}"
_MAX_CHARACTERS = 300  # of an error
_PATIENCE_WITH_STORE = 3.0  # seconds
_NCCL_OF_THIS_RANK = "ncclUnhandledCudaError|ncclInvalid"
_ERRORS_OF_THIS_RANK = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))


# Renamed in torch 2.13, where the old name warns.
_all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Result = TypeVar("Result")
Phases = Generator[Payload, Tensor, Result]


class Communicator(SharedOnCopy):
    """The collectives that payloads name, over a process group of ``ranks`` (global numbers) of its own, and recorded.

    On a shared one, the order of exchanges and of users' collectives, on several threads, would differ between ranks.
    ``parts`` divide all ranks into those that exchange among themselves; ``None`` where all exchange with all.
    ``shared`` is a group that others use, too: NCCL takes memory of a GPU for each, and wants one order of all anyway.
    A group waits as long as the job's own, unless a ``timeout`` is given. An engine's communicators share a recorder;
    ``is_inside_node`` says that all bytes stay in a node.
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
            with suppress(AttributeError):  # of a backend that TORCH_DISTRIBUTED_DEBUG has wrapped
                shared._get_backend(device)._set_default_timeout(timeout)  # meshes give their groups torch's own
        elif shared is None:
            # A group is set up by all ranks of the job. Set up by its own alone (use_local_synchronization), it would
            # get the name of one that was given back before, and find the addresses of that one's ranks in the store.
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
        """Name of the backend that the group has for the device."""
        return backend_of(self.device, self.group)

    def run(self, phases: Phases[Result]) -> Result:
        """Run the collective that each phase names, and hand its result to the next phase."""
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
        """Call one collective, and record its bytes and seconds."""
        self.recorder.add_bytes(self.sent_bytes(payload.collective, payload.tensor), self._is_inside_node)
        with self.recorder.span("exchange"), self.translate_errors(self.recorder.subject, payload.collective):
            return self.issue(*payload)

    def issue(self, name: str, tensor: Tensor, out: Optional[Tensor] = None) -> Tensor:
        """Call the collective of a name; ``out`` may hold the result."""
        received: Tensor = getattr(self, name)(tensor, out)
        return received

    def translate_errors(self, subject: str, name: str = "all_gather") -> AbstractContextManager[None]:
        """Raise :class:`ExchangeError` about a subject for a backend's error inside, not for this device's."""
        return translate_backend_errors(subject, name, self._timeout)

    @cached_property
    def _shares(self) -> dict[str, float]:
        """How often a rank sends what it hands in, by collective."""
        return {name: sent_bytes(name, 1, self.world_size) for name in _PROBE_SHAPES}

    def sent_bytes(self, name: str, tensor: Tensor) -> float:
        """Return the bytes that leave this rank when every rank hands in a tensor like this one."""
        return self._shares[name] * (tensor.numel() * tensor.element_size())

    def all_gather(self, tensor: Tensor, out: Optional[Tensor] = None) -> Tensor:
        """Gather a flat tensor of equal size from every rank into ``[world_size, numel]``."""
        gathered = tensor.new_empty(self.world_size, tensor.numel()) if out is None else out
        # gloo's own goes around a ring; a short tensor goes to every rank at once: the same bytes in one round trip.
        if self._goes_around and 0 < gathered.nbytes <= DIRECT_BYTES:
            return self.all_to_all(tensor.expand(self.world_size, -1).contiguous(), gathered)
        _all_gather_into(gathered.view(-1), tensor, group=self.group)
        return gathered

    def all_to_all(self, tensor: Tensor, out: Optional[Tensor] = None) -> Tensor:
        """Send row ``r`` of ``[world_size, numel]`` to rank ``r``; row ``r`` of the result came from rank ``r``."""
        received = torch.empty_like(tensor) if out is None else out
        # gloo moves bytes of every width, but has no name for some 16-bit types.
        dist.all_to_all_single(received.view(torch.uint8), tensor.view(torch.uint8), group=self.group)
        return received

    def all_reduce(self, tensor: Tensor, out: Optional[Tensor] = None) -> Tensor:
        """Add up a tensor over ranks, in place."""
        if not self._goes_direct(tensor):
            dist.all_reduce(tensor, group=self.group)
            return tensor
        # Parts go to their owners and back as sums.
        parts = functional.pad(tensor.flatten(), (0, -tensor.numel() % self.world_size)).view(self.world_size, -1)
        mine = self.all_to_all(parts).sum(dim=0, dtype=tensor.dtype)
        return tensor.copy_(self.all_gather(mine).view(-1)[: tensor.numel()].view_as(tensor))

    def _goes_direct(self, tensor: Tensor) -> bool:
        """Tell whether two round trips take less time for a tensor than gloo's way, twice around a ring."""
        return self._goes_around and 0 < tensor.nbytes <= DIRECT_BYTES

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        """Begin to add up a tensor over ranks, in place, and return what waits for it."""
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
        """Return the means over ranks of many numbers, some at a time: from each of many ranks they are gigabytes.

        The host adds up, rank by rank: GPUs of several kinds may round otherwise, and ranks would decide otherwise.
        """
        count = max(1, _NUMBERS_AT_ONCE // self.world_size)
        parts = (numbers[start : start + count] for start in range(0, len(numbers), count))
        sums = (reduce(torch.add, self.gather_numbers(part).cpu()) for part in parts)
        return [total / self.world_size for of_part in sums for total in of_part.tolist()]

    def check(self, names: Iterable[str]) -> None:
        """Try collectives once, on a few bytes, and refuse a backend that cannot run one of them on this device."""
        # NCCL's first all-to-all connects all pairs of ranks, which takes gigabytes that most trainings never need.
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
        """Give the process group back, unless others wait for this rank, which ``has_failed``; safe to call twice."""
        # gloo tells those that wait by the end of the group. NCCL would have this rank wait for them first, with an
        # error that nobody has seen: there the group stays until the process ends.
        is_there = self.group is not None and not self._is_shared and dist.is_initialized()
        if is_there and not (has_failed and self.backend != "gloo"):
            dist.destroy_process_group(self.group)
        self.group = None


_ONE_HOP = 2  # ranks, whose ring is one
_NUMBERS_AT_ONCE = 1 << 20  # of all ranks together, 8 MiB
_PROBE_SHAPES: dict[str, tuple[int, ...]] = {"all_gather": (-1,), "all_to_all": (-1, 4), "all_reduce": (-1,)}
