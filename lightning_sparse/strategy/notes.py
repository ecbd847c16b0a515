"""Notes: what one rank has noticed, such as a signal, told to all ranks while the next batch runs."""

from typing import Any, Optional

import torch
import torch.distributed as dist

from lightning_sparse._lightning import Strategy
from lightning_sparse.engine.collectives import Uncopied


class Notes(Uncopied):
    """Tell every rank what any of them has noted, without a wait in every batch.

    What is handed in at one batch is asked for at the next: one round trip over the network, which hides behind the
    batch. gloo has a process group of its own for it, so that nothing else that ranks exchange comes between. Other
    backends have it among what the main thread exchanges anyway, in one order on all ranks: a group of gloo beside NCCL
    would need names of hosts that do not lead to loopback, and another one of NCCL takes memory of each GPU.

    Args:
        strategy: whose ranks. Where they do not meet in every step (see
            :attr:`~lightning_sparse.SparseDDPStrategy.meetings`), nothing is sent until they have met again. Its
            timeout is how long gloo waits for a rank that has stopped, also before the group can be given back.
    """

    def __init__(self, strategy: Strategy) -> None:
        is_gloo = dist.get_backend() == "gloo"
        device = strategy.root_device
        self._group = dist.new_group(timeout=getattr(strategy, "_timeout", None)) if is_gloo else None
        self._strategy = strategy
        self._met: Optional[int] = None
        self._noted = torch.zeros(dist.get_world_size(), dtype=torch.uint8, device="cpu" if is_gloo else device)
        self._work: Any = None
        self._streams = None if self._noted.device.type == "cpu" else torch.get_device_module(device)
        self._stream = None if self._streams is None else self._streams.Stream(device)
        self._host = torch.zeros(dist.get_world_size(), dtype=torch.uint8, pin_memory=self._streams is not None)

    def hand_in(self, is_noted: bool) -> None:
        """Hand in what this rank has noted, unless ranks have not met since the last time; all ranks must call."""
        met = getattr(self._strategy, "meetings", None)
        if met is not None and met == self._met:
            return
        self._met = met
        self._noted.fill_(is_noted)
        if self._group is not None:  # to all at once: an all-reduce goes around a ring, twice
            self._work = dist.all_to_all_single(self._host, self._noted, group=self._group, async_op=True)
            return
        self._work = dist.all_reduce(self._noted, op=dist.ReduceOp.MAX, async_op=True)
        if self._streams is not None:
            with self._streams.stream(self._stream):  # or whoever asks would wait for the whole step
                self._work.wait()
                self._host.copy_(self._noted, non_blocking=True)

    def last(self) -> bool:
        """Return whether any rank had noted something when it last handed in; ``False`` once it has been asked."""
        if self._work is None:
            return False
        if self._stream is not None:
            self._stream.synchronize()
        else:
            self._work.wait()
            if self._group is None:
                self._host.copy_(self._noted)
        self._work = None
        return bool(self._host.any())

    def close(self) -> None:
        """Give the process group back."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
