"""Run the rows of ``check`` one by one on all ranks. A thread per rank ends the command if a rank hangs or dies."""

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from textwrap import shorten
from typing import Any, Optional

from lightning_sparse.engine.store import default_store

_BEAT_SECONDS = 0.5
_SILENCE_SECONDS = 6.0  # time without a heartbeat after which a rank counts as dead
_GRACE_SECONDS = 10.0  # time limit for all other ranks to finish a check, after one rank has failed
_WAITS = ("/torch/", "/threading.py", "/lightning_sparse/engine/", "/cli/rows.py")  # code that waits for other ranks


class NotApplicableError(Exception):
    """The reason why a check cannot run on these machines."""


class Rows:
    """Run checks (rows of a report) on all ranks, for at most ``limit`` seconds. Rank 0 prints and stores the report.

    Attributes:
        names: name of each rank, with the host.
        environment: further entries of the report in the file ``output``.
        deadline: end of the time limit, by ``time.monotonic()``.
    """

    def __init__(self, rank: int, names: list[str], limit: float, output: Optional[Path]) -> None:
        self.names, self.environment = names, dict[str, Any]()
        self._ended, self._output, self._rank = list[dict[str, Any]](), output, rank
        self._name, self._failure, self._is_over = "", "", threading.Event()
        self.deadline, self._patience = time.monotonic() + limit, math.inf
        self._store, self._watched = default_store().clone(), default_store().clone()  # threads cannot share a store
        self._store.set_timeout(timedelta(days=1))  # the watching thread enforces `limit` instead

    def run(self, table: Mapping[str, Callable[[], str]]) -> int:
        """Run the function of each row. Return the exit status of the command: 1 if a row has failed, else 0."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler would not run inside a collective
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends SIGTERM before other ranks report a dead rank
        self._beat()
        self._gather("start")
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()
        for name, function in table.items():
            self._run(name, function)
        if self._rank == 0:
            self._conclude()
        self._gather("end")  # a rank that ends early would count as dead
        self._is_over.set()
        thread.join()  # the interpreter would abort at exit if the thread still waited for the store
        self._store.set(f"check/over/{self._rank}", "")
        if self._rank == 0:  # rank 0 may host the store, so rank 0 waits for all ranks
            self._store.wait([f"check/over/{rank}" for rank in range(len(self.names))], timedelta(seconds=10))
        return int(any(row["state"] == "failed" for row in self._ended))

    def _run(self, name: str, function: Callable[[], str]) -> None:
        self._name, self._failure, began = name, "", time.monotonic()
        try:
            state, detail = "passed", function()
        except NotApplicableError as reason:
            state, detail = "not applicable", str(reason)
        except Exception as error:
            state, detail = "failed", shorten(f"{type(error).__name__}: {error}", 400)
            self._failure = detail
        found = [json.loads(each) for each in self._gather(name, json.dumps([state, detail]))]
        failed = {self.names[rank]: text for rank, (each, text) in enumerate(found) if each == "failed"}
        # An ExchangeError means that this rank waited for a rank that failed.
        causes = {rank: text for rank, text in failed.items() if not text.startswith("ExchangeError")} or failed
        if len(causes) == len(found) > 1 and len(set(causes.values())) == 1:
            causes = {"all ranks": detail}
        state, detail = found[0]
        if causes:
            state, detail = "failed", "; ".join(f"{rank}: {text}" for rank, text in causes.items())
        self._end_row(state, detail, time.monotonic() - began, self._rank == 0)

    def _end_row(self, state: str, detail: str, seconds: float, reports: bool) -> None:
        self._ended.append({"name": self._name, "state": state, "detail": detail, "seconds": round(seconds, 2)})
        if reports:
            print(f"{state:14} {self._name:30} {detail} [{seconds:.1f} s]", flush=True)
        if reports and self._output:
            passed = all(row["state"] != "failed" for row in self._ended)
            report = {"passed": passed, **self.environment, "rows": self._ended}
            self._output.write_text(json.dumps(report, indent=1))

    def _conclude(self) -> None:
        failed = [row["name"] for row in self._ended if row["state"] == "failed"]
        print(f"FAILED: {', '.join(failed)}" if failed else "All rows passed.", flush=True)

    def _gather(self, key: str, text: str = "") -> list[str]:
        self._store.set(f"check/{key}/{self._rank}", text)
        return self._texts(self._store, key)

    def _texts(self, store: Any, key: str) -> list[str]:
        return [each.decode() for each in store.multi_get([f"check/{key}/{rank}" for rank in range(len(self.names))])]

    def _beat(self) -> None:
        frame: Any = sys._current_frames()[threading.main_thread().ident or 0]
        path = frame.f_code.co_filename.replace(os.sep, "/")
        state = "failed" if self._failure else "waits" if any(part in path for part in _WAITS) else "works"
        place = self._failure or f"at {Path(path).name}:{frame.f_lineno}"
        self._watched.set(f"check/beat/{self._rank}", json.dumps([time.monotonic(), state, place]))

    def _watch(self) -> None:
        beats, since = [""] * len(self.names), [0.0] * len(self.names)
        while not self._is_over.wait(_BEAT_SECONDS):
            try:
                self._beat()
                old, beats, now = beats, self._texts(self._watched, "beat"), time.monotonic()
                since = [then if beat == before else now for then, beat, before in zip(since, beats, old)]
                silent = [rank for rank, then in enumerate(since) if now - then > _SILENCE_SECONDS]
                reason = self._reason([json.loads(beat) for beat in beats], silent)
            except Exception as error:
                reason, silent = f"{self.names[0]} or the host died, so the store is lost: {error}", [0]
            if reason and not self._is_over.is_set():
                self._end(reason, self._rank == min(set(range(len(self.names))) - set(silent)))

    def _reason(self, beats: list[Any], silent: list[int]) -> str:
        now, has_failed = time.monotonic(), any(state == "failed" for _, state, _ in beats)
        self._patience = min(self._patience, now + _GRACE_SECONDS) if has_failed else math.inf
        if now < min(self.deadline, self._patience) and not silent:
            return ""
        causes = silent or [rank for rank, (_, state, _) in enumerate(beats) if state != "waits"] or range(len(beats))
        end = ", died" if silent else ", had not ended the check when the time was over"
        texts = [place if state == "failed" and not silent else place + end for _, state, place in beats]
        return "; ".join(f"{self.names[rank]}: {texts[rank]}" for rank in causes)

    def _end(self, reason: str, reports: bool) -> None:
        try:
            self._end_row("failed", reason, 0.0, reports)
            if reports:
                self._conclude()
                time.sleep(3 * _BEAT_SECONDS)  # other ranks still read the last heartbeats from rank 0's store
        finally:
            os._exit(1)
