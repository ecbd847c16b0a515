"""One thread, first in, first out, that issues all collectives while backward goes on."""

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Optional, TypeVar

import torch

_CAPTURED = (
    "gradients are exchanged while a graph of the device is captured, which would repeat what the host has decided for"
    " that one step, such as densities and the number of Adam's step: capture forward and backward of parts of a model"
    " (torch.cuda.make_graphed_callables, torch.compile(mode='reduce-overhead')), and not the exchange and the step"
)

Result = TypeVar("Result")
_Task = tuple[Callable[[], None], Optional[threading.Event], bool, Sequence[Any]]  # as submitted; events of inputs


class ExchangeWorker:
    """Run tasks one after the other on a thread, and on a device on a stream, of their own; after an error none.

    A collective issued from the continuation of another would race on gloo.
    """

    def __init__(self, device: torch.device) -> None:
        self.error: Optional[BaseException] = None
        self._device = device
        self._device_module = None if device.type == "cpu" else torch.get_device_module(device)
        # Its many small kernels would wait behind those of backward, which fill a device.
        self._stream = self._device_module.Stream(device, priority=-1) if self._device_module else None
        # Of devices that have graphs of what is launched.
        self._is_captured = getattr(self._device_module, "is_current_stream_capturing", lambda: False)
        self._updated: set[Any] = set()
        self._tasks: queue.SimpleQueue[Optional[_Task]] = queue.SimpleQueue()
        # A daemon, because a collective that waits for a dead peer cannot be stopped before its timeout, and must not
        # keep an interpreter alive that its user has told to go.
        self._thread = threading.Thread(target=self._loop, name="lightning_sparse.exchange", daemon=True)
        self._thread.start()

    def wait_for_caller(self) -> None:
        """On a device, have the next task start also after what the calling thread's current stream holds now."""
        if self._device_module:
            self._updated.add(self._device_module.current_stream(self._device))

    def submit(self, run: Callable[[], None], done: Optional[threading.Event] = None, always: bool = False) -> None:
        """Queue a task, after what the caller's stream holds now; ``done`` is set after it.

        After an error a task is skipped, unless it is to run ``always``.
        """
        if self._is_captured():
            raise RuntimeError(_CAPTURED)
        self.wait_for_caller()
        ready = [stream.record_event() for stream in self._updated]
        self._updated.clear()
        self._tasks.put((run, done, always, ready))

    def run(self, task: Callable[[], Result]) -> Result:
        """Return the result of a task, run after those that are queued; raise what it or one before it has raised."""
        done, results = threading.Event(), list[Result]()
        self.submit(lambda: results.append(task()), done=done)
        self.wait(done)
        return results[0]

    def drain(self) -> None:
        """Wait for the tasks that are queued, or raise what failed."""
        self.run(lambda: None)

    def wait(self, done: threading.Event) -> None:
        """Wait for a task that sets ``done`` when it is done; on a device the calling thread's stream waits, too."""
        done.wait()
        self.raise_error()
        self._sync_caller_stream()

    def raise_error(self) -> None:
        """Raise what a task has raised, if one has."""
        if self.error is not None:
            raise self.error

    def close(self, patience: float = 5.0) -> bool:
        """End the thread after the tasks that are queued; return whether it has ended within ``patience`` seconds."""
        self._tasks.put(None)
        self._thread.join(patience)
        has_ended = not self._thread.is_alive()
        if has_ended:
            # The thread has queued its work on the device, which may still do it. Nobody else waits for that where
            # backward was interrupted; what is kept is about to be read, and the memory of gradients to be given out.
            self._sync_caller_stream()
        return has_ended

    def _sync_caller_stream(self) -> None:
        if self._device_module:
            self._device_module.current_stream(self._device).wait_stream(self._stream)

    def _loop(self) -> None:
        if self._device_module:
            self._device_module.set_device(self._device)  # a new thread starts on the first device
        with torch.no_grad(), self._device_module.stream(self._stream) if self._device_module else nullcontext():
            while (task := self._tasks.get()) is not None:
                self._perform(*task)
                del task  # a task holds gradients; do not keep them while waiting for the next one

    def _perform(
        self, run: Callable[[], None], done: Optional[threading.Event], always: bool, ready: Sequence[Any]
    ) -> None:
        try:
            if self.error is None or always:
                if self._stream is not None:
                    for event in ready:
                        self._stream.wait_event(event)
                run()
        except BaseException as error:  # whatever it is, it belongs to the user's thread
            self.error = self.error or error
        finally:
            if done is not None:
                done.set()
