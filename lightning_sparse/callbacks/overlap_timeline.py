"""A timeline of backward and exchange on rank 0: torch's trace of a step."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional, Union

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler
from torch.profiler import profile
from typing_extensions import override

from lightning_sparse.callbacks.base import StepObserver
from lightning_sparse.engine import Engine
from lightning_sparse.removed import refusing
from lightning_sparse.strategy.lightning import LightningModule, PyTorchProfiler, Trainer

_STEPS = (100, 200, 300, 400, 500, 600, 700, 800)  # default steps, after the trials of ``schedule="merged"``


@refusing
class OverlapTimeline(StepObserver):
    """Profile some steps of rank 0 with torch, and write a trace of the last profiled step.

    View the trace at https://ui.perfetto.dev. The span ``sparse.exposed``, at the end of ``sparse.backward``, is the
    wait for the exchange. On a GPU, spans show when the CPU queues kernels, not when the GPU runs the kernels.

    Args:
        steps: steps to profile, counted from 0 as in loggers. The first steps of ``schedule="merged"`` try buckets.
        path: file of the trace; ``None`` for ``overlap.json`` in the log directory.

    Example::

        >>> timeline = OverlapTimeline(steps=[100, 101])
    """

    def __init__(self, steps: Sequence[int] = _STEPS, path: Optional[Union[str, Path]] = None) -> None:
        if not steps or not isinstance(steps, Sequence) or any(not isinstance(s, int) or s < 0 for s in steps):
            raise ValueError(f"steps={steps!r} must be a list of integers, at least 0, such as [100, 200]")
        self.steps, self.path = steps, path
        self._profile: Optional[profile] = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        directory = Path(trainer.log_dir or ".")  # log_dir is broadcast from rank 0, so all ranks must read log_dir
        self._target = directory / "overlap.json" if self.path is None else Path(self.path)
        self._has_recorded = False

    @override
    def observes(self, trainer: Trainer, step: int) -> bool:
        return step in self.steps

    @override
    def before_step(self, trainer: Trainer, engine: Engine) -> None:
        if trainer.is_global_zero and not isinstance(vars(trainer)["profiler"], PyTorchProfiler):  # torch allows one
            self._profile = profile(experimental_config=_ExperimentalConfig(profile_all_threads=True))
            self._profile.start()

    @override
    def on_before_backward(self, *given: Any) -> None:
        self._backward = profiler.record_function("sparse.backward").__enter__()

    @override
    def on_after_backward(self, *given: Any) -> None:
        self._backward.__exit__(None, None, None)

    @override
    def after_step(self, trainer: Trainer, engine: Engine, step: int) -> None:
        profiled = self._profile
        self.teardown()
        if profiled is not None:
            self._has_recorded = True
            self._target.parent.mkdir(parents=True, exist_ok=True)
            profiled.export_chrome_trace(str(self._target))

    @override
    def teardown(self, *given: Any, **named: Any) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    on_exception = teardown

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and not self._has_recorded:
            reasons = "none of these steps ran on several processes, or PyTorchProfiler was active"
            rank_zero_warn(f"OverlapTimeline has recorded nothing of steps={self.steps}: {reasons}")
