"""The statistics that :class:`~lightning_sparse.callbacks.CompressionMonitor` logs, made one for all ranks."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_sparse.callbacks.base import engine_of, mean_over_ranks, reduce_over_ranks
from lightning_sparse.engine import Engine
from lightning_sparse.engine.observe import ParameterSamples, StepFacts, compression_ratio, mean_stats
from lightning_sparse.strategy.trainer import SparseDDPStrategy


def memory_statistics(engine: Engine) -> dict[str, float]:
    """Return what the memory did in the last step, if it was watched; on a GPU this waits for it."""
    engine.memory.is_watched = False
    return {name: float(statistic) for name, statistic in engine.memory.statistics().items()}


def statistics_over_ranks(
    strategy: SparseDDPStrategy,
    steps: Sequence[StepFacts],
    samples: Optional[ParameterSamples],
    throughput: Mapping[str, float],
) -> dict[str, float]:
    """Return what the last steps did, as far as known; ``samples`` are of the last, ``None`` if plain DDP made it."""
    engine, stats = engine_of(strategy), strategy.compression_stats()
    if engine.rounds is None:  # the statistics of a round of local steps are means already
        stats |= mean_stats(steps, engine.recorder.has_levels)
    ours = [step.marks for step in steps if not step.is_plain]
    if ours:
        stats["backward_seconds"] = sum(marks.backward_seconds for marks in ours) / len(ours)
        stats["commit_seconds"] = sum(marks.seconds("commit") for marks in ours) / len(ours)
    if samples is not None:
        stats |= memory_statistics(engine) if engine.memory.corrects_adam else {}
        stats["gradient_square"], stats["residual_square"] = (norm**2 for norm in samples.norms())
    stats = reduce_over_ranks(strategy, {**stats, **throughput})
    for total in ("", "total_"):
        stats[f"{total}compression_ratio"] = compression_ratio(
            stats[f"{total}dense_bytes"], stats[f"{total}wire_bytes"]
        )
    if samples is not None:
        squares = stats.pop("residual_square"), stats.pop("gradient_square")
        if "update_error" not in stats:  # updates that wait are not to be compared with gradients
            stats["residual_to_gradient"] = _norm_ratio(*squares)
    stats["samples_per_second"] = stats.pop("step_samples") / stats["step_seconds"]
    unknown = {"samples_per_second", "select_seconds", "exchange_seconds", "exposed_seconds", "exposed_share"}
    return {name: value for name, value in stats.items() if name not in unknown or not math.isnan(value)}


def parameters_over_ranks(strategy: SparseDDPStrategy, samples: ParameterSamples) -> dict[str, dict[str, float]]:
    """Reduce what a step did to each parameter over ranks, by parameter name in the order of the model."""
    assert strategy.lightning_module is not None
    facts = samples.facts()
    names = [name for name, _ in strategy.lightning_module.named_parameters() if name in facts]
    mine = [
        number
        for fact in map(facts.__getitem__, names)
        for number in (fact.sent, fact.gradient_norm**2, fact.residual_norm**2, fact.added_norm**2)
    ]
    means = iter(mean_over_ranks(strategy, mine))
    return {
        name: {
            "density": sent / facts[name].numel,
            "gradient_norm": math.sqrt(gradient_square),
            "residual_norm": math.sqrt(residual_square),
            "update_error" if name in samples.update_norms else "residual_to_gradient": _norm_ratio(
                residual_square, added_square
            ),
        }
        for name, sent, gradient_square, residual_square, added_square in zip(names, *[means] * 4)
    }


def _norm_ratio(square: float, other_square: float) -> float:
    """Return the quotient of two norms; NaN, which loggers show as such, where it is not defined."""
    return math.sqrt(square / other_square) if other_square > 0 else math.nan


class Throughput:
    """Count steps, samples and the time that they took, without looking at a device."""

    def __init__(self, step: int = -1) -> None:
        self._paused: Optional[float] = None
        self.restart(step)

    def restart(self, step: int) -> None:
        """Count from here on, after a step."""
        self._last_step, self._samples, self._began = step, 0.0, time.perf_counter()

    def add_batch(self, batch: Any) -> None:
        """Count a batch."""
        self._samples += batch_size(batch)

    def pause(self) -> None:
        """Stop the time."""
        self._paused = time.perf_counter()

    def resume(self) -> None:
        """Let the time go on."""
        if self._paused is not None:
            self._began += time.perf_counter() - self._paused
            self._paused = None

    def statistics(self, step: int) -> dict[str, float]:
        """Return ``step_seconds`` and ``step_samples`` (NaN where unknown): means of the steps up to this one."""
        steps = max(1, step - self._last_step)
        return {"step_seconds": (time.perf_counter() - self._began) / steps, "step_samples": self._samples / steps}


def batch_size(batch: Any) -> float:
    """Return the length of the first dimension that all tensors of a batch share; NaN if they share none."""
    sizes = {leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0}
    return sizes.pop() if len(sizes) == 1 else math.nan
