"""Rows of a check, run in order on all ranks. A thread per rank ends the command if a rank hangs or has died."""

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

from lightning_sparse.engine.store import default_store

_BEAT_SECONDS = 0.5
_SILENCE_SECONDS = 6.0  # a rank without a heartbeat for this time counts as dead
_GRACE_SECONDS = 10.0  # time for all ranks to end a row after a failure on any rank
_WAITS = ("/torch/", "/threading.py", "/lightning_sparse/engine/", "/cli/rows.py")  # files in which a rank waits


class NotApplicableError(Exception):
    """The reason why a row cannot run here."""


class Row(NamedTuple):
    """A row that has ended, the same on all ranks."""

    name: str
    state: str  # passed, failed, not applicable
    detail: str
    seconds: float = 0.0


class Rows:
    """Run rows on all ranks until ``limit`` seconds are over. A single rank calls ``report(is_last)`` after each row.

    Attributes:
        ended: rows that have ended.
    """

    def __init__(self, rank: int, names: list[str], limit: float, report: Callable[[bool], None]) -> None:
        self.names, self.ended = names, list[Row]()
        self._rank, self._report, self._row, self._failure = rank, report, "start", ""
        self._store, self._watched = default_store().clone(), default_store().clone()  # a store serves a single thread
        self._deadline, self._main, self._is_over = time.monotonic() + limit, threading.get_ident(), threading.Event()
        self._patience = math.inf
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the default action ends a rank that waits in a collective
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends SIGTERM before live ranks can name a dead rank
        self._beat()
        self._gather("start")
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @property
    def seconds_left(self) -> float:
        """Seconds until the time limit."""
        return self._deadline - time.monotonic()

    def run(self, name: str, function: Callable[[], str]) -> None:
        """Run a row, and wait for the results of all ranks. The row has failed if any rank has."""
        self._row, self._failure, began = name, "", time.monotonic()
        try:
            state, detail = "passed", function()
        except NotApplicableError as reason:
            state, detail = "not applicable", str(reason)
        except Exception as error:
            state, detail = "failed", shorten(f"{type(error).__name__}: {error}", 400)
            self._failure = detail
        found = [json.loads(each) for each in self._gather(name, json.dumps([state, detail]))]
        failed = {self.names[rank]: text for rank, (each, text) in enumerate(found) if each == "failed"}
        # A rank that waited in vain for another is not the cause.
        causes = {rank: text for rank, text in failed.items() if not text.startswith("ExchangeError")} or failed
        if len(causes) == len(found) > 1 and len(set(causes.values())) == 1:
            causes = {"all ranks": detail}
        if causes:
            found[0] = "failed", "; ".join(f"{rank}: {text}" for rank, text in causes.items())
        state, detail = found[0]
        self.ended.append(Row(name, state, detail, round(time.monotonic() - began, 2)))
        if self._rank == 0:
            self._report(False)

    def close(self) -> None:
        """End the thread when all ranks have called this, so that no rank takes another's end for a crash."""
        self._gather("end")
        self._is_over.set()
        self._thread.join()  # a thread in a store's call would abort the interpreter's end
        self._store.set(f"check/over/{self._rank}", "")
        if self._rank == 0:  # rank 0 may host the store
            self._store.wait([f"check/over/{rank}" for rank in range(len(self.names))], timedelta(seconds=10))

    def _gather(self, key: str, text: str = "") -> list[str]:
        self._store.set(f"check/{key}/{self._rank}", text)
        keys = [f"check/{key}/{rank}" for rank in range(len(self.names))]
        self._store.wait(keys, timedelta(days=1))  # the thread ends the process if a rank never comes
        return [self._store.get(each).decode() for each in keys]

    def _beat(self) -> None:
        frame: Any = sys._current_frames()[self._main]
        path = frame.f_code.co_filename.replace(os.sep, "/")
        place, waits = f"at {Path(path).name}:{frame.f_lineno}", any(part in path for part in _WAITS)
        beat = [time.monotonic(), self._failure or place, waits and not self._failure, bool(self._failure)]
        self._watched.set(f"check/beat/{self._rank}", json.dumps(beat))

    def _watch(self) -> None:
        beats, since = [""] * len(self.names), [time.monotonic()] * len(self.names)
        while not self._is_over.wait(_BEAT_SECONDS):
            try:
                self._beat()
                for rank, old in enumerate(beats):
                    if (beat := self._watched.get(f"check/beat/{rank}").decode()) != old:
                        beats[rank], since[rank] = beat, time.monotonic()
                silent = [rank for rank, when in enumerate(since) if time.monotonic() - when > _SILENCE_SECONDS]
                reason = self._reason([json.loads(beat) for beat in beats], silent)
            except Exception as error:
                reason, silent = f"{self.names[0]} or the host died, and the store with it: {error}", [0]
            if reason and not self._is_over.is_set():
                self._end(reason, self._rank == min(set(range(len(self.names))) - set(silent)))

    def _reason(self, beats: list[Any], silent: list[int]) -> str:
        fails = any(has_failed for *_, has_failed in beats)
        self._patience = min(self._patience, time.monotonic() + _GRACE_SECONDS) if fails else math.inf
        if time.monotonic() < min(self._deadline, self._patience) and not silent:
            return ""
        causes = silent or [rank for rank, (_, _, waits, _) in enumerate(beats) if not waits] or range(len(beats))
        end = ", died" if silent else ", had not ended it when the time was over"
        texts = {
            rank: place + (end if silent or not failed else "") for rank, (_, place, _, failed) in enumerate(beats)
        }
        return "; ".join(f"{self.names[rank]}: {texts[rank]}" for rank in causes)

    def _end(self, reason: str, reports: bool) -> None:
        try:
            self.ended.append(Row(self._row, "failed", reason))
            if reports:
                self._report(True)
                time.sleep(3 * _BEAT_SECONDS)  # live ranks still read beats from the store
        finally:
            os._exit(1)
