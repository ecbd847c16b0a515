"""Strings and errors that ranks exchange through the job's key-value store, without a collective."""

import json
import re
import threading
from contextlib import suppress
from datetime import timedelta
from textwrap import shorten
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch.distributed import GroupMember
from torch.distributed.constants import default_pg_timeout

_UNKNOWN_CAUSE = (
    "another rank has died, is slower than the timeout, or has finished with fewer batches. Look for the first error in"
    " the output of the other ranks. Give SparseDDPStrategy a longer timeout=... if ranks are only slow."
)
_ERROR_KEY = "lightning_sparse/error/{}"
_MAX_CHARACTERS = 300  # maximum number of characters of a stored error
_PATIENCE_WITH_STORE = 3.0  # maximum seconds for reading other ranks' errors from the store
_NCCL_OF_THIS_RANK = "ncclUnhandledCudaError|ncclInvalid"
_ERRORS_OF_THIS_RANK = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))


class ExchangeError(RuntimeError):
    """A collective failed, because another rank has died, is too slow, is unreachable, or has finished."""


def default_store() -> Any:
    """Return the key-value store of the default process group, which all ranks of the job share."""
    assert GroupMember.WORLD is not None
    return GroupMember.WORLD.get_group_store()


def all_gather_via_store(line: str, timeout: Optional[timedelta] = None) -> list[str]:
    """Gather a string from every rank through the job's store, without a collective.

    Other ranks may still be in a training step. A collective here would pair with a collective of that step.
    """
    store, rank, world_size = default_store(), dist.get_rank(), dist.get_world_size()
    limit = default_pg_timeout if timeout is None else timeout
    # The store counts each rank's calls of this function, so that the n-th calls of all ranks use the same key.
    place = f"lightning_sparse/gathered/{store.add(f'lightning_sparse/gatherings/{rank}', 1)}"
    store.set(f"{place}/{rank}", line)
    if rank == 0:
        handed_in = [f"{place}/{each}" for each in range(world_size)]
        store.wait(handed_in, limit)
        store.set(place, json.dumps([store.get(each).decode() for each in handed_in]))
    store.wait([place], limit)
    gathered: list[str] = json.loads(store.get(place))
    return gathered


def raise_exchange_error(error: RuntimeError, subject: str, name: str, timeout: Optional[timedelta]) -> None:
    """Raise :class:`ExchangeError` for a failed collective ``name``. Re-raise an error of this rank's device."""
    if isinstance(error, _ERRORS_OF_THIS_RANK) or re.search(_NCCL_OF_THIS_RANK, str(error)):
        raise error
    raise ExchangeError(
        f"rank {dist.get_rank()} of {dist.get_world_size()} waited in vain in {name} of {subject}, with a"
        f" timeout of {timeout}: {_errors_of_others() or _UNKNOWN_CAUSE} To continue, start the job again"
        f" from the last checkpoint (ckpt_path=...). The backend's error: {error}"
    ) from error


def post_error(error: Optional[BaseException]) -> None:
    """Write this rank's error to the store, where waiting ranks find the error. ``None`` deletes an earlier error."""
    if dist.is_initialized() and not isinstance(error, ExchangeError):  # Another rank causes an ExchangeError.
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

    # If the rank that hosts the store has stopped, a call of the store blocks without a timeout. So a thread reads.
    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    reading.join(_PATIENCE_WITH_STORE)
    return " ".join(f"rank {rank} has failed with {line.rstrip('.')}." for rank, line in sorted(found.items()) if line)
