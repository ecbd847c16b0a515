"""What to do when somebody wants this process to end."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, Optional, Union

_Handler = Union[int, signal.Handlers, Callable[[int, Optional[FrameType]], Any]]


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise :class:`SystemExit`, as Ctrl-C raises, so that ``finally`` is honoured."""
    with _handled((signal.SIGTERM, signal.SIGHUP), _exit):
        yield


@contextmanager
def signals_ignored() -> Iterator[None]:
    """Inside, nothing short of SIGKILL interrupts: for clearing up."""
    with _handled((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), signal.SIG_IGN):
        yield


@contextmanager
def _handled(numbers: tuple[signal.Signals, ...], handler: _Handler) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets the main thread alone have handlers
        return
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, previous in zip(numbers, before):
            signal.signal(number, previous)


def _exit(number: int, frame: Optional[FrameType]) -> NoReturn:
    raise SystemExit(128 + number)
