"""Rows of a check, one by one on all ranks; a thread per rank ends the command if a rank hangs or has died."""

import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

_BEAT_SECONDS = 0.5
_SILENCE_SECONDS = 6.0  # without a heartbeat, after which a rank counts as dead
_GRACE_SECONDS = 10.0  # for the others to end a row that one rank has failed
_WAITS = ("/torch/", "/threading.py", "/lightning_sparse/engine/")  # files in which a rank waits for others


class NotApplicableError(Exception):
    """The reason for which a row cannot run here."""


class Row(NamedTuple):
    """A row that has ended, the same on all ranks."""

    name: str
    state: str  # passed, failed, not applicable, not run
    detail: str
    seconds: float = 0.0
    values: Any = None


class Rows:
    """Run rows on all ranks until ``limit`` seconds are over; ``report(reason)`` is called before an early end.

    Attributes:
        ended: rows that have ended.
    """

    def __init__(self, store: Any, rank: int, names: list[str], limit: float, report: Callable[[str], None]) -> None:
        self.rank, self.names = rank, names
        self.ended: list[Row] = []
        self._store, self._watched = store.clone(), store.clone()  # a client serves one thread at a time
        self._deadline, self._row, self._report = time.monotonic() + limit, "start", report
        self._main, self._is_over = threading.get_ident(), False
        self._signals, written = os.pipe()
        os.set_blocking(written, False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *received: None)
        signal.set_wakeup_fd(written)  # wakes the thread even where the main one waits in a collective
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @property
    def seconds_left(self) -> float:
        """Seconds until the time limit."""
        return self._deadline - time.monotonic()

    def run(self, name: str, function: Callable[[], tuple[str, dict[str, Any]]]) -> None:
        """Run a row; it ends when all ranks have stored a result, and has failed if one of them has."""
        self._row, began, values = name, time.monotonic(), dict[str, Any]()
        try:
            state, (detail, values) = "passed", function()
        except NotApplicableError as reason:
            state, detail = "not applicable", str(reason)
        except Exception as error:
            state, detail = "failed", shorten(f"{type(error).__name__}: {error}", 400)
        place = f"check/row/{len(self.ended)}"
        self._store.set(f"{place}/{self.rank}", json.dumps([state, detail, values]))
        keys = [f"{place}/{rank}" for rank in range(len(self.names))]
        self._store.wait(keys, timedelta(days=1))  # the thread ends a wait in vain
        found = [json.loads(self._store.get(key)) for key in keys]
        failed = {rank: each[1] for rank, each in enumerate(found) if each[0] == "failed"}
        # What waited in vain for another rank is not the cause.
        causes = {rank: each for rank, each in failed.items() if not each.startswith("ExchangeError")} or failed
        words = [f"{self.names[rank]}: {each}" for rank, each in causes.items()]
        if len(causes) == len(found) > 1 and len(set(causes.values())) == 1:
            words = [f"all ranks: {found[0][1]}"]
        state, detail, values = ("failed", "; ".join(words), {}) if failed else found[0]
        self.ended.append(Row(name, state, detail, round(time.monotonic() - began, 2), values))

    def close(self) -> None:
        """End the thread when all ranks have come here; then no rank takes another's end for its death."""
        self._store.set(f"check/over/{self.rank}", "")
        if self.rank == 0:  # may hold the store
            self._store.wait([f"check/over/{rank}" for rank in range(len(self.names))], timedelta(seconds=10))
        self._is_over = True
        self._thread.join()  # a thread in a store's call would abort the interpreter's end

    def _watch(self) -> None:
        beats: dict[int, tuple[str, float]] = {}
        signalled = ""
        while not self._is_over:
            if select.select([self._signals], [], [], _BEAT_SECONDS)[0] and not signalled:
                signalled = signal.Signals(os.read(self._signals, 1)[0]).name
                interrupted = signalled == "SIGINT"  # torchrun sends SIGTERM also when another rank has died
                self._deadline = time.monotonic() + (0 if interrupted else _SILENCE_SECONDS + 1)
            try:
                reason = self._store_beats(beats) or self._failure() or self._lateness(beats, signalled)
            except Exception as error:
                reason = f"the store of {self.names[0]} is gone, which has died or cannot be reached ({error})"
            if reason and not self._is_over:
                self._end(reason, reports=self.rank == min(self._living(beats)))

    def _store_beats(self, beats: dict[int, tuple[str, float]]) -> str:
        now, (position, waits) = time.monotonic(), self._position()
        self._watched.set(f"check/beat/{self.rank}", json.dumps([now, self._row, position, waits]))
        for rank in range(len(self.names)):
            is_there = self._watched.check([f"check/beat/{rank}"])
            text = self._watched.get(f"check/beat/{rank}").decode() if is_there else ""
            if rank not in beats or beats[rank][0] != text:
                beats[rank] = (text, now)
        if self._watched.check(["check/end"]):
            return str(self._watched.get("check/end").decode())
        silent = [rank for rank in beats if rank not in self._living(beats)]
        return f"{self._named(silent, beats)} died" if silent and not self._is_over else ""

    def _living(self, beats: dict[int, tuple[str, float]]) -> list[int]:
        now = time.monotonic()
        return [rank for rank in beats if now - beats[rank][1] < _SILENCE_SECONDS] or [self.rank]

    def _failure(self) -> str:
        for rank, name in enumerate(self.names):
            if self._watched.check([key := f"check/row/{len(self.ended)}/{rank}"]):
                state, detail, _ = json.loads(self._watched.get(key))
                if state == "failed":
                    self._deadline = min(self._deadline, time.monotonic() + _GRACE_SECONDS)
                    return f"{name}: {detail}; others wait for it" if self.seconds_left < _BEAT_SECONDS else ""
        return ""

    def _lateness(self, beats: dict[int, tuple[str, float]], signalled: str) -> str:
        if self.seconds_left > 0:
            return ""
        if signalled:
            return f"ended by {signalled}"
        ranks = {rank: json.loads(text) for rank, (text, _) in beats.items() if text}
        late = [rank for rank, (_, row, _, waits) in ranks.items() if row == self._row and not waits] or list(ranks)
        return f"{self._named(late, beats)} had not ended it when the time limit was over"

    def _named(self, ranks: list[int], beats: dict[int, tuple[str, float]]) -> str:
        last = {rank: json.loads(beats[rank][0])[2] if beats[rank][0] else "its start" for rank in ranks}
        return ", ".join(f"{self.names[rank]}, at {place}," for rank, place in last.items())

    def _position(self) -> tuple[str, bool]:
        frame: Any = sys._current_frames().get(self._main)
        files = [frame.f_code.co_filename] if frame else []
        waits = not files or any(part in files[0].replace(os.sep, "/") for part in (*_WAITS, "/cli/rows.py"))
        return (f"{Path(files[0]).name}:{frame.f_lineno}" if files else "its end"), waits

    def _end(self, reason: str, reports: bool) -> None:
        if reports:
            self.ended.append(Row(self._row, "failed", reason))
            self._report(reason)
        try:
            self._watched.set("check/end", reason)
            time.sleep(3 * _BEAT_SECONDS if reports else 0)  # the others read it before the store goes
        finally:
            os._exit(1)
