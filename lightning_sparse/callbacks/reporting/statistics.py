"""The statistics of steps, made one for all ranks by one small all-gather."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from lightning_sparse.callbacks.base import engine_of
from lightning_sparse.callbacks.reporting.gathering import gather_rows, reduce_rows
from lightning_sparse.engine import Engine
from lightning_sparse.engine.observe import ParameterSamples, StepVolume, compression_ratio, mean_stats
from lightning_sparse.strategy.trainer import SparseDDPStrategy


def memory_statistics(engine: Engine) -> dict[str, float]:
    """Return what the memory did in the last step, if it was watched; on a GPU this waits for it.

    Returns:
        ``local_clip_factor``, by which this rank's gradient was multiplied, where it is clipped;
        ``momentum_norm``, of the momentum that is accumulated before compression, and ``masked_fraction``, of its
        elements that were set to zero, where it is; ``update_error``, the norm of the updates that wait over that
        of this rank's updates of the step, and ``second_moment_age``, in steps, where Adam is corrected.
    """
    engine.memory.is_watched = False
    return {name: float(statistic) for name, statistic in engine.memory.statistics().items()}


def step_statistics(
    strategy: SparseDDPStrategy, steps: Sequence[StepVolume], samples: ParameterSamples
) -> dict[str, float]:
    """Return what the last steps did on this rank.

    Args:
        strategy: whose steps.
        steps: means are taken over them; of a round of local steps the statistics are such means already.
        samples: of the last step.
    """
    engine = engine_of(strategy)
    is_averaged = engine.rounds is None and not strategy.is_plain
    gradient_norm, residual_norm = samples.norms()
    return {
        **strategy.compression_stats(),
        **(mean_stats(steps, engine.topology[1] > 1) if is_averaged else {}),
        **(memory_statistics(engine) if engine.corrects_adam else {}),
        "backward_seconds": fmean(step.marks.backward_seconds for step in steps),
        "commit_seconds": fmean(step.marks.seconds("commit") for step in steps),
        "gradient_square": gradient_norm**2,
        "residual_square": residual_norm**2,
    }


def over_ranks(strategy: SparseDDPStrategy, mine: Mapping[str, float]) -> dict[str, float]:
    """Reduce statistics over ranks, see :func:`~lightning_sparse.callbacks.reporting.gathering.reduce_rows`.

    Quotients are made of what was reduced; one that cannot be known is left out.
    """
    stats = reduce_rows(list(mine), gather_rows(strategy, list(mine.values())))
    for total in ("", "total_"):
        sizes = stats[f"{total}dense_bytes"], stats[f"{total}wire_bytes"]
        stats[f"{total}compression_ratio"] = compression_ratio(*sizes)
    squares = stats.pop("residual_square"), stats.pop("gradient_square")
    if "update_error" not in stats:  # updates that wait are not to be compared with gradients
        stats["residual_to_gradient"] = _norm_ratio(*squares)
    samples = stats.pop("step_samples")
    if not math.isnan(samples):
        stats["samples_per_second"] = samples / stats["step_seconds"]
    return stats


def parameters_over_ranks(strategy: SparseDDPStrategy, samples: ParameterSamples) -> dict[str, dict[str, float]]:
    """Reduce what a step did to each parameter over ranks, by parameter name in the order of the model."""
    assert strategy.lightning_module is not None
    facts = samples.facts()
    names = [name for name, _ in strategy.lightning_module.named_parameters() if name in facts]
    mine = [
        number
        for fact in map(facts.__getitem__, names)
        for number in (fact.sent, fact.union, fact.gradient_norm**2, fact.residual_norm**2, fact.added_norm**2)
    ]
    means = iter([sum(column) / len(column) for column in zip(*gather_rows(strategy, mine))])
    rows = zip(names, *[means] * 5)
    return {
        name: {
            "density": sent / facts[name].numel,
            "union_density": union / facts[name].numel,
            "gradient_norm": math.sqrt(gradient_square),
            "residual_norm": math.sqrt(residual_square),
            "update_error" if name in samples.update_norms else "residual_to_gradient": _norm_ratio(
                residual_square, added_square
            ),
        }
        for name, sent, union, gradient_square, residual_square, added_square in rows
    }


def _norm_ratio(square: float, other_square: float) -> float:
    """Return the quotient of two norms; NaN, which loggers show as such, where it is not defined."""
    return math.sqrt(square / other_square) if other_square > 0 else math.nan
