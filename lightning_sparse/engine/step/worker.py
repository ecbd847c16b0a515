"""One FIFO thread that issues all collectives, while backward is running."""

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
# arguments of submit(); events of the inputs' streams
_Task = tuple[Callable[[], None], Optional[threading.Event], bool, Sequence[Any]]


class ExchangeWorker:
    """Run tasks in order on a separate thread and, on a device, a separate stream.

    After an error the remaining tasks are skipped. All collectives start on this thread, because a collective started
    in a continuation of another one races on gloo.
    """

    def __init__(self, device: torch.device) -> None:
        self.error: Optional[BaseException] = None
        self._device = device
        self._device_module = None if device.type == "cpu" else torch.get_device_module(device)
        # High priority, because the many small kernels would otherwise wait behind the kernels of backward.
        self._stream = self._device_module.Stream(device, priority=-1) if self._device_module else None
        # Only some devices can capture graphs of kernels.
        self._is_captured = getattr(self._device_module, "is_current_stream_capturing", lambda: False)
        self._updated: set[Any] = set()
        self._tasks: queue.SimpleQueue[Optional[_Task]] = queue.SimpleQueue()
        # A daemon, because a collective that waits for a dead peer blocks until a timeout, and must not block the
        # interpreter's exit.
        self._thread = threading.Thread(target=self._loop, name="lightning_sparse.exchange", daemon=True)
        self._thread.start()

    def wait_for_caller(self) -> None:
        """Let the next task also wait for the work queued so far on the calling thread's current stream."""
        if self._device_module:
            self._updated.add(self._device_module.current_stream(self._device))

    def submit(self, run: Callable[[], None], done: Optional[threading.Event] = None, always: bool = False) -> None:
        """Queue a task that starts after the work on the caller's current stream.

        Args:
            run: the task.
            done: event that is set after the task.
            always: run the task even after an error of an earlier task.
        """
        if self._is_captured():
            raise RuntimeError(_CAPTURED)
        self.wait_for_caller()
        ready = [stream.record_event() for stream in self._updated]
        self._updated.clear()
        self._tasks.put((run, done, always, ready))

    def run(self, task: Callable[[], Result]) -> Result:
        """Run a task after the queued tasks, and return the result, or raise the error of this or an earlier task."""
        done, results = threading.Event(), list[Result]()
        self.submit(lambda: results.append(task()), done=done)
        self.wait(done)
        return results[0]

    def drain(self) -> None:
        """Wait for the queued tasks, and raise their error, if any."""
        self.run(lambda: None)

    def wait(self, done: threading.Event) -> None:
        """Wait for the task that sets ``done``, also with the calling thread's current stream on a device."""
        done.wait()
        self.raise_error()
        self._sync_caller_stream()

    def raise_error(self) -> None:
        """Raise the first error of a task, if any."""
        if self.error is not None:
            raise self.error

    def close(self, patience: float = 5.0) -> bool:
        """End the thread after the queued tasks, and return whether this took at most ``patience`` seconds."""
        self._tasks.put(None)
        self._thread.join(patience)
        has_ended = not self._thread.is_alive()
        if has_ended:
            # After an interrupted backward no one else waits for the kernels that the thread has queued, although the
            # residuals are read next and the memory of gradients is reused.
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
                del task  # a task holds gradients, which must be freed while the thread waits

    def _perform(
        self, run: Callable[[], None], done: Optional[threading.Event], always: bool, ready: Sequence[Any]
    ) -> None:
        try:
            if self.error is None or always:
                if self._stream is not None:
                    for event in ready:
                        self._stream.wait_event(event)
                run()
        except BaseException as error:  # raise_error() raises any error on the user's thread
            self.error = self.error or error
        finally:
            if done is not None:
                done.set()
