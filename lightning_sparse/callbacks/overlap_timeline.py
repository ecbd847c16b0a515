"""A timeline of backward and exchange on rank 0: torch's trace of a step, and a picture."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Optional, Union

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler
from torch.profiler import profile
from typing_extensions import override

from lightning_sparse.callbacks.base import StepObserver
from lightning_sparse.engine import Engine
from lightning_sparse.strategy.lightning import LightningModule, PyTorchProfiler, Trainer

_STEPS = (100, 200, 300, 400, 500, 600, 700, 800)  # default steps, after the trials of ``schedule="merged"``
_WORKER = {"select": "#f0b429", "encode": "#8d6e63", "exchange": "#2186eb", "commit": "#3f9142"}
_ROWS = ({"backward": "#9aa5b1", "exposed": "#d64545"}, _WORKER)  # rows of the picture, with colours


class OverlapTimeline(StepObserver):
    """Profile some steps of rank 0 with torch, and write a trace and a picture of the last profiled step.

    View the trace at https://ui.perfetto.dev. The span ``sparse.exposed``, at the end of ``sparse.backward``, is the
    wait for the exchange. On a GPU, spans show when the CPU queues kernels, not when the GPU runs the kernels.

    Args:
        steps: steps to profile, counted from 0 as in loggers. The first steps of ``schedule="merged"`` are trials.
        path: file of the trace; ``None`` for ``overlap.json`` in the log directory. The picture's suffix is ``.png``.
        pictures: whether to draw the picture, which needs matplotlib.

    Example::

        >>> timeline = OverlapTimeline(steps=[100, 101], pictures=False)
    """

    def __init__(
        self, steps: Sequence[int] = _STEPS, path: Optional[Union[str, Path]] = None, pictures: bool = True
    ) -> None:
        if not steps or not isinstance(steps, Sequence) or any(not isinstance(s, int) or s < 0 for s in steps):
            raise ValueError(f"steps={steps!r} must be a list of integers, at least 0, such as [100, 200]")
        if pictures and find_spec("matplotlib") is None:
            raise ValueError("pictures=True needs matplotlib: pip install 'lightning-sparse[plot]', or pictures=False")
        self.steps, self.path, self.pictures = steps, path, pictures
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
        if trainer.is_global_zero and not isinstance(vars(trainer)["profiler"], PyTorchProfiler):  # one profiler only
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
            if self.pictures:
                _draw(profiled, step, self._target.with_suffix(".png"))

    @override
    def teardown(self, *given: Any, **named: Any) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    on_exception = teardown

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and not self._has_recorded:
            reasons = "no step ran on several processes, or PyTorchProfiler was active"
            rank_zero_warn(f"OverlapTimeline has recorded nothing of steps={self.steps}: {reasons}")


def _draw(profiled: profile, step: int, path: Path) -> None:
    from matplotlib.figure import Figure

    spans: dict[str, list[tuple[float, float]]] = {stage: [(0.0, 0.0)] for stages in _ROWS for stage in stages}
    for event in profiled.events() or ():
        if event.device_type.name != "CPU":
            continue  # a GPU's events repeat the CPU's spans
        start, end = event.time_range.start / 1e3, event.time_range.end / 1e3
        spans.get(event.name.partition("sparse.")[2], []).append((start, end - start))
    exposed = sum(duration for _, duration in spans["exposed"])
    figure = Figure(figsize=(9, 3), dpi=160, layout="constrained")
    axes = figure.subplots()
    for place, stage, colour in ((place, *each) for place, row in enumerate(_ROWS) for each in row.items()):
        axes.broken_barh(spans[stage], (place - 0.35, 0.7), color=colour, label=stage)
    axes.set(title=f"step {step}: {exposed:.0f} ms exposed", xlabel="ms", ylim=(1.5, -0.5))
    axes.set_yticks([0, 1], ["backward", "exchange"])
    figure.legend(loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path)
