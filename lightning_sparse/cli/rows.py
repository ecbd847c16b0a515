"""Run the rows of ``check`` one by one on all ranks, and end the command if a rank hangs or dies."""

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from textwrap import shorten
from threading import get_ident
from time import monotonic
from typing import Any, NoReturn, Optional, Union
from unittest import SkipTest

from torch.distributed.elastic.utils.store import barrier

from lightning_sparse.engine.store import ExchangeError, default_store

_STATES = ("passed", "not applicable", "waits", "failed", "hangs", "died")  # a row has its ranks' rightmost state
_BROKEN = {"waits", "hangs", "died"}  # after these states of a rank, no further row can run
_ANSWER_SECONDS = 10.0  # after a rank's answer, time for the other answers; a rank without an answer has died
_WAITS = {"torch", "threading.py", "engine"}  # in the path of code that waits for other ranks

Row = Union[str, Callable[[], str]]  # the reason why a check is not applicable, or a function that returns a detail


class Rows:
    """Run checks (rows of a report) on all ranks, for at most ``limit`` seconds. ``names`` has each rank's name."""

    def __init__(self, rank: int, names: list[str], limit: float) -> None:
        self.names, self._rank, self._end = names, rank, monotonic() + limit
        self._store = default_store().clone()  # threads cannot share a store

    def run(self, table: Mapping[str, Row], output: Optional[Path]) -> NoReturn:
        """Run the checks. Print and store the results. End the process with exit status 1 if a row has failed."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process at once
        signal.signal(signal.SIGTERM, self._end_now)  # torchrun sends SIGTERM after a rank has died
        worker = ThreadPoolExecutor(1)  # checks run in a thread, because signals do not interrupt a collective
        thread = worker.submit(get_ident).result()
        rows, failed = list[dict[str, Any]](), list[str]()
        for name, check in table.items():
            running = worker.submit(_answer, check)
            while not running.done() and monotonic() < self._end:
                wait([running], timeout=0.1)
            own = running.result() if running.done() else _place(sys._current_frames()[thread])
            states, texts = zip(*self._answers(name, own))
            state = max(states, key=_STATES.index)
            detail, ranks = texts[states.index(state)], dict(zip(self.names, texts))
            if state not in ("passed", "not applicable"):
                named = ", ".join(rank for rank, each in zip(self.names, states) if each == state)
                state, detail = "failed", f"{named}: {detail}"
                failed.append(name)
            rows.append({"name": name, "state": state, "detail": detail, "ranks": ranks})
            if all(each == "died" for each in states[: self._rank]):  # rank 0, or the first that lives
                print(f"{state:14} {name:30} {detail}", flush=True)
                if output:
                    output.write_text(json.dumps({"passed": not failed, "rows": rows}, indent=1))
            if not _BROKEN.isdisjoint(states):
                break
        with suppress(RuntimeError):  # another rank has died
            barrier(self._store, len(self.names), "check/end", _ANSWER_SECONDS)  # rank 0 may have the store
        os._exit(bool(failed))

    def _end_now(self, *signal_and_frame: Any) -> None:
        self._end = 0.0

    def _answers(self, name: str, own: tuple[str, str]) -> list[tuple[str, str]]:
        keys, died = [f"check/{name}/{rank}" for rank in range(len(self.names))], ("died", "died")
        answers = [died, *[("waits", "") for _ in keys[1:]]]  # if the store is gone, rank 0 has died
        with suppress(RuntimeError):
            self._store.set(keys[self._rank], json.dumps(own))
            with suppress(RuntimeError):
                self._store.wait(keys, timedelta(seconds=_ANSWER_SECONDS))
            answers = [json.loads(self._store.get(key)) if self._store.check([key]) else died for key in keys]
        return answers


def _answer(check: Row) -> tuple[str, str]:
    try:
        return ("not applicable", check) if isinstance(check, str) else ("passed", check())
    except SkipTest as reason:
        return "not applicable", str(reason)
    except Exception as error:
        state = "waits" if isinstance(error, ExchangeError) else "failed"  # an ExchangeError: another rank failed
        return state, shorten(f"{type(error).__name__}: {error}", 400)


def _place(frame: Any) -> tuple[str, str]:
    path = Path(frame.f_code.co_filename)
    state = "waits" if _WAITS.intersection(path.parts) else "hangs"
    return state, f"at {path.name}:{frame.f_lineno}, had not ended the check when the time was over"
