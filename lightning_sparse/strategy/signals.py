"""Signals: noted where they come, told to all ranks while batches run, and answered on all of them at one batch.

Beside them travels how many exchanges a rank has made: one that leaves out a backward would hold up others for good.
"""

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Optional

import torch
import torch.distributed as dist

from lightning_sparse.engine.collectives import SharedOnCopy, backend_of
from lightning_sparse.strategy.lightning import SIGTERMException, Trainer

_COUNTED = 128  # what is told beside a signal fits in a byte with it
_BEHIND = (
    "before the last batch {behind}: it has left out a backward, for which others would wait in vain. Have all ranks go"
    " backward equally often: where a batch is left out, from 0 * next(self.parameters()).sum()"
)


class Signals(SharedOnCopy):
    """Tell every rank whether any of them has been signalled, without a wait in every batch.

    What is told at one batch is heard at the next; with local steps it travels with what is told before an exchange.
    gloo has a group of its own for it. Others have it among what the main thread exchanges: a group of gloo beside NCCL
    would need names of hosts that do not lead to loopback, and another one of NCCL takes memory of each GPU.
    """

    def __init__(self, number: signal.Signals) -> None:
        self.is_noted = False  # this rank has been signalled
        self.exchanges: Callable[[], int] = lambda: 0  # of gradients, that this rank has made
        self.replaced: Any = None  # handler that the signal had
        self.behind: Optional[str] = None  # which rank had made fewer exchanges than another, as they have told
        self._number: Optional[signal.Signals] = None
        self._group: Any = None
        self._is_connected = False
        self._rounds: Any = None
        self._work: Any = None
        if threading.current_thread() is threading.main_thread():
            self._number, self.replaced = number, signal.signal(number, self._note)

    def _note(self, number: int, frame: Optional[FrameType]) -> None:
        self.is_noted = True

    def connect(self, trainer: Trainer, answer: Callable[[], None]) -> None:
        """Have ranks hear of each other from now on; all must call. Those that wait ``answer`` what they hear."""
        strategy: Any = trainer.strategy
        device = strategy.root_device
        is_gloo = backend_of(device) == "gloo"
        self._is_connected, self.answer = True, answer
        self._rounds = getattr(strategy, "rounds", None)
        if self._rounds is not None:
            self._rounds.meeting.flags.append(self)
        self._group = dist.new_group(timeout=getattr(strategy, "_timeout", None)) if is_gloo else None
        self._noted = torch.zeros(dist.get_world_size(), dtype=torch.uint8, device="cpu" if is_gloo else device)
        self._streams = None if self._noted.device.type == "cpu" else torch.get_device_module(device)
        self._stream = None if self._streams is None else self._streams.Stream(device)
        is_pinned = self._streams is not None
        self._host = torch.zeros(dist.get_world_size(), dtype=torch.uint8, device="cpu", pin_memory=is_pinned)

    def tell(self) -> None:
        """Tell whether this rank has been signalled; all ranks must call. Rounds of local steps tell by themselves."""
        if self._is_connected and (self._rounds is None or self._rounds.is_synchronous):
            self.send()

    def send(self) -> None:
        """Send to all ranks whether this one has been signalled."""
        told = self.is_noted + 2 * (self.exchanges() % _COUNTED)
        if self._group is not None:  # to all at once: an all-reduce goes around a ring, twice
            self._noted.fill_(told)
            self._work = dist.all_to_all_single(self._host, self._noted, group=self._group, async_op=True)
            return
        self._noted.zero_().narrow(0, dist.get_rank(), 1).fill_(told)  # each in a place of its own
        self._work = dist.all_reduce(self._noted, op=dist.ReduceOp.MAX, async_op=True)
        if self._streams is not None:
            with self._streams.stream(self._stream):  # or whoever asks would wait for the whole step
                self._work.wait()
                self._host.copy_(self._noted, non_blocking=True)

    def heard(self) -> bool:
        """Return whether any rank had been signalled when it last told; ``False`` once it has been asked.

        It also learns which rank was ``behind`` then.
        """
        if not self._is_connected:  # one process hears of itself
            return self.is_noted
        if self._work is None:
            return self._rounds is not None and self._rounds.meeting.polls(self)
        if self._stream is not None:
            self._stream.synchronize()
        else:
            self._work.wait()
            if self._group is None:
                self._host.copy_(self._noted)
        self._work = None
        told = self._host.tolist()
        # From rank 0's, as what is counted begins anew.
        ahead = [(each // 2 - told[0] // 2 + _COUNTED // 2) % _COUNTED for each in told]
        if (fewer := max(ahead) - min(ahead)) > 0:
            last, first = ahead.index(min(ahead)), ahead.index(max(ahead))
            self.behind = f"rank {last} had made {fewer} fewer exchanges than rank {first}"
        return any(each % 2 for each in told)

    def close(self) -> None:
        """Give the handler and the process group back."""
        if self._number is not None:
            signal.signal(self._number, self.replaced)
            self._number = None
        if self._rounds is not None and self in self._rounds.meeting.flags:
            self._rounds.meeting.flags.remove(self)
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


class Termination:
    """End training on all ranks at the start of one batch, by Lightning's handler, when any has been sent SIGTERM.

    From 2.6 on, Lightning has rank 0 tell the others in every batch, and all of them wait for that, on a GPU also for
    what is queued (its issue 21487). Its handler exchanges something too, wherever the other ranks are.
    """

    def __init__(self, trainer: Trainer, exchanges: Callable[[], int]) -> None:
        self._trainer = trainer
        self._signals = Signals(signal.SIGTERM)
        self._signals.exchanges = exchanges
        self._signals.connect(trainer, self._end)
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = self._agree  # type: ignore[method-assign]

    def _agree(self) -> None:
        """End training if any rank had been signalled at the last batch; at the start of a batch, on all ranks.

        Raises:
            RuntimeError: if by then ranks had not made equally many exchanges.
        """
        if self._heard():
            self._end()
        if self._signals.behind is not None:
            raise RuntimeError(_BEHIND.format(behind=self._signals.behind))
        self._signals.tell()

    def _end(self) -> None:
        self._answer()
        raise SIGTERMException

    def _answer(self) -> None:
        """Have Lightning's handler do its work, on all ranks at once, so that what it exchanges meets."""
        self._trainer.strategy.barrier()
        lightnings = self._trainer._signal_connector._sigterm_notifier_fn  # where it could not be registered
        handler: Any = self._signals.replaced if callable(self._signals.replaced) else lightnings
        handler(signal.SIGTERM, None)

    def _heard(self) -> bool:
        with suppress(RuntimeError):  # a rank has died: the exchange that comes next says so, and in which group
            return self._signals.heard()
        return False

    def close(self, has_ended: bool) -> None:
        """Give back what was replaced; answer what has come since the last batch, if all ranks have ended."""
        if has_ended:
            is_known = self._heard()
            self._signals.send()
            if self._heard() or is_known:
                self._answer()
        del self._trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor
        self._signals.close()
