"""Calls of torch.distributed that all ranks make at the same time, and what is said where one of them fails."""

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from textwrap import shorten
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _broadcast_coalesced
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed import GroupMember
from torch.distributed.constants import default_pg_timeout
from torch.nn import Module, Parameter
from typing_extensions import Self

_BROADCAST_BYTES = 250 << 20  # at a time, as DDP does


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


def gather_together(thing: Any, group: Optional[dist.ProcessGroup] = None) -> list[Any]:
    """Gather what every rank of the job, or of a group, hands in, where all of them come at the same time."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, thing, group)
    return gathered


def copy_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite tensors by those of the group's first rank, all of whose ranks come at the same time."""
    held = [each for each in tensors if each.numel()]
    if held:  # in whatever order they lie in memory: NCCL itself takes those without gaps alone
        with torch.no_grad():
            _broadcast_coalesced(group, held, _BROADCAST_BYTES, 0)


def ignored_by(module: Module) -> frozenset[str]:
    """Return the names of what users have told DDP to leave alone."""
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def attended(module: Module) -> dict[str, Parameter]:
    """Return the parameters that DDP was not told to leave alone, by name."""
    ignored = ignored_by(module)
    return {name: each for name, each in module.named_parameters() if name not in ignored}


def align(module: Module, known: Iterable[str] = ()) -> None:
    """Copy parameters and buffers from rank 0, in place, but those known; raise where ranks have other shapes."""
    group, left_out = _default_group(), ignored_by(module) | set(known)
    parameters: list[Tensor] = [each for name, each in module.named_parameters() if name not in left_out]
    if len(set(map(str, gather_together([list(each.shape) for each in parameters])))) > 1:
        raise RuntimeError("ranks have models whose parameters differ in number or shape: build one model on all ranks")
    buffers = (each for name, each in module.named_buffers() if name not in left_out)
    copy_from_first([*parameters, *buffers], group)


def broadcast_buffers(module: Module, group: Optional[dist.ProcessGroup] = None) -> None:
    """Copy buffers from the first rank of all, or of a group, in place; a graph of an earlier forward does not mind."""
    group, left_out = group or _default_group(), ignored_by(module)
    buffers: list[Tensor] = [each for name, each in module.named_buffers() if name not in left_out]
    if buffers:
        with _unsafe_preserve_version_counter(tuple(buffers)):
            copy_from_first(buffers, group)


def sum_together(tensor: Tensor, group: Optional[dist.ProcessGroup] = None) -> Tensor:
    """Add up a tensor over all ranks of the job, or of a group, in place, where all come at the same time."""
    dist.all_reduce(tensor, group=group)
    return tensor


def gather_apart(line: str, timeout: Optional[timedelta] = None) -> list[str]:
    """Gather a line of every rank in the store by which the ranks have found each other, within the timeout.

    Ranks that have noticed nothing go on with their step: on a process group in use they would take it for one of that.
    """
    store, rank, ranks = _store(), dist.get_rank(), dist.get_world_size()
    limit = default_pg_timeout if timeout is None else timeout
    # One for each time that this rank has called; as on the others.
    place = f"lightning_sparse/gathered/{store.add(f'lightning_sparse/gatherings/{rank}', 1)}"
    store.set(f"{place}/{rank}", line)
    if rank == 0:
        handed_in = [f"{place}/{each}" for each in range(ranks)]
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
            line = "" if error is None else shorten(f"{type(error).__name__}: {error}", _MOST_CHARACTERS)
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
_MOST_CHARACTERS = 300  # of an error
_PATIENCE_WITH_STORE = 3.0  # seconds
_NCCL_OF_THIS_RANK = "ncclUnhandledCudaError|ncclInvalid"
_ERRORS_OF_THIS_RANK = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))
