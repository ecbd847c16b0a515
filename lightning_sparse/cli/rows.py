"""Run the rows of ``check`` one by one on all ranks. The main thread ends the command if a rank hangs or dies."""

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from textwrap import shorten
from threading import Thread
from time import monotonic, sleep
from typing import Any, NoReturn, Optional, Union
from unittest import SkipTest

from torch.distributed.elastic.utils.store import synchronize

from lightning_sparse.engine.store import ExchangeError, default_store

_STATES = ("passed", "not applicable", "waits", "failed", "died")  # a row's state is the rightmost state of all ranks
_POLL_SECONDS = 0.5
_ANSWER_SECONDS = 3.0  # time for a rank's answer when the command ends; a rank without an answer has died
_GRACE_SECONDS = 10.0  # time limit for all other ranks to finish a check, after one rank has finished
_WAITS = ("/torch/", "/threading.py", "/lightning_sparse/engine/")  # code that waits for other ranks
_DEAD, _WAITING = b'["died", "died"]', b'["waits", ""]'

Row = Union[str, Callable[[], str]]  # the reason why a check is not applicable, or a function that returns a detail


class Rows:
    """Run checks (rows of a report) on all ranks, for at most ``limit`` seconds. Rank 0 prints and stores the report.

    Attributes:
        names: name of each rank, with the host.
        environment: entries of the file ``output`` beside the rows.
    """

    def __init__(self, rank: int, names: list[str], limit: float, output: Optional[Path]) -> None:
        self.names, self.environment = names, dict[str, Any]()
        self._rank, self._reports, self._output = rank, rank == 0, output
        self._rows, self._failed = list[dict[str, Any]](), list[str]()
        self._name, self._result, self._began = "", b"", monotonic()
        self._end = self._began + limit
        self._store, self._watched = default_store().clone(), default_store().clone()  # threads cannot share a store

    def run(self, table: Mapping[str, Row]) -> NoReturn:
        """Run the function of each row. End the process with exit status 1 if a row has failed, else 0."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process at once
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # torchrun sends SIGTERM after a rank has died
        worker = Thread(target=self._run, args=(table,), daemon=True)  # signals do not interrupt a collective
        worker.start()
        with suppress(KeyboardInterrupt, RuntimeError):  # RuntimeError: the process with the store has died
            while worker.is_alive() and monotonic() < self._end and not self._watched.check(["check/end"]):
                worker.join(_POLL_SECONDS)
        worker.join(_POLL_SECONDS)  # rank 0 may end, and close the store, before this worker ends
        if len(self._rows) < len(table):
            self._end_early(sys._current_frames().get(worker.ident or 0))
        if self._reports:
            print(f"FAILED: {', '.join(self._failed)}" if self._failed else "All rows passed.", flush=True)
        os._exit(bool(self._failed))

    def _run(self, table: Mapping[str, Row]) -> None:
        deadline = self._end
        for self._name, check in table.items():
            self._began, self._result, self._end = monotonic(), b"", deadline
            self._result = _result(check)
            self._end = min(deadline, monotonic() + _GRACE_SECONDS)
            results = synchronize(self._store, self._result, self._rank, len(self.names), f"check/{self._name}/", 1e6)
            self._end_row(results)

    def _end_early(self, frame: Any) -> None:
        keys = [f"check/end/{rank}" for rank in range(len(self.names))]
        results = [_DEAD, *[_WAITING for _ in keys[1:]]]  # if the store is gone, rank 0 has died
        with suppress(RuntimeError):
            self._watched.set("check/end", "")
            self._watched.set(keys[self._rank], self._result or _place(frame))
            sleep(_ANSWER_SECONDS)
            results = [self._watched.get(key) if self._watched.check([key]) else _DEAD for key in keys]
        self._reports = self._rank == next(rank for rank, result in enumerate(results) if result != _DEAD)
        self._end_row(results)
        sleep(_ANSWER_SECONDS)  # other ranks still read the store of rank 0

    def _end_row(self, results: list[bytes]) -> None:
        found = dict(zip(self.names, map(json.loads, results)))
        state = max((each for each, _ in found.values()), key=_STATES.index)
        texts = {name: text for name, (each, text) in found.items() if each == state}
        detail = next(iter(texts.values()))
        if state not in ("passed", "not applicable"):
            if len(texts) == len(found) and len(set(texts.values())) == 1:
                texts = {"all ranks": detail}
            state, detail = "failed", "; ".join(f"{name}: {text}" for name, text in texts.items())
            self._failed.append(self._name)
        seconds = round(monotonic() - self._began, 2)
        self._rows.append({"name": self._name, "state": state, "detail": detail, "seconds": seconds})
        if self._reports:
            print(f"{state:14} {self._name:30} {detail} [{seconds:.1f} s]", flush=True)
            if self._output:
                report = {"passed": not self._failed, **self.environment, "rows": self._rows}
                self._output.write_text(json.dumps(report, indent=1))


def _result(check: Row) -> bytes:
    try:
        state, detail = ("not applicable", check) if isinstance(check, str) else ("passed", check())
    except SkipTest as reason:
        state, detail = "not applicable", str(reason)
    except Exception as error:
        state = "waits" if isinstance(error, ExchangeError) else "failed"  # an ExchangeError: another rank failed
        detail = shorten(f"{type(error).__name__}: {error}", 400)
    return json.dumps([state, detail]).encode()


def _place(frame: Any) -> bytes:
    path = frame.f_code.co_filename.replace(os.sep, "/")
    state = "waits" if any(part in path for part in _WAITS) else "failed"
    place = f"at {Path(path).name}:{frame.f_lineno}, had not ended the check when the time was over"
    return json.dumps([state, place]).encode()
