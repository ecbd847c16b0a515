"""Output of loggers beyond scalars: TensorBoard shows everything, others pictures if they have a way for them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_sparse._lightning import Logger, TensorBoardLogger, Trainer
from lightning_sparse.callbacks.reporting.pictures import as_image

_LOG10_OF_2 = 0.3010299956639812
_SMALLEST_POWER = -127  # that of the first bin, see ParameterSamples

# Charts of the tab "Custom Scalars", in this order. Each has one statistic: a line for each run, whose colours the tab
# explains; lines of one run have one colour, and no legend.
_CHARTS = {
    "sparse: how much is sent": {
        "Density, log10 of the fraction of elements": "log10_density",
        "Density of all ranks together, log10 of the fraction": "log10_union_density",
        "Leaves a rank in a step, bytes": "wire_bytes",
        "Of it to other nodes, bytes": "link_bytes",
        "Compression ratio, times": "compression_ratio",
        "Has left a rank since the start, bytes": "total_wire_bytes",
        "Compression ratio since the start, times": "total_compression_ratio",
    },
    "sparse: where the time of a step goes": {
        "Step, seconds": "step_seconds",
        "Exposed exchange, seconds": "exposed_seconds",
        "Exposed since the start, part of the time": "exposed_share",
        "Backward, seconds": "backward_seconds",
        "Selection, seconds": "select_seconds",
        "Exchange, seconds": "exchange_seconds",
        "Commit, seconds": "commit_seconds",
        "Throughput, samples a second": "samples_per_second",
    },
    "sparse: what waits": {
        "What waits over the gradient, ratio of norms": "residual_to_gradient",
        "What waits over the update, ratio of norms": "update_error",
        "Age of the second moment, steps": "second_moment_age",
        "Drift of replicas over parameters, ratio of norms": "replica_divergence",
    },
}


def board_layout(shown: Sequence[str]) -> dict[str, dict[str, list[Any]]]:
    """Sort statistics into charts, in the form of ``SummaryWriter.add_custom_scalars``.

    Args:
        shown: names of the statistics that are logged; charts of others are left out.

    Example::

        >>> board_layout(["wire_bytes"])
        {'sparse: how much is sent': {'Leaves a rank in a step, bytes': ['Multiline', ['sparse/wire_bytes$']]}}
    """
    layout = {
        # Tags are regular expressions; without an end, those that begin alike would be drawn, too.
        category: {title: ["Multiline", [f"sparse/{name}$"]] for title, name in charts.items() if name in shown}
        for category, charts in _CHARTS.items()
    }
    return {category: charts for category, charts in layout.items() if charts}


def log_layout(trainer: Trainer, shown: Sequence[str]) -> None:
    """Have TensorBoard's tab "Custom Scalars" open sorted, with logarithms of densities, see :func:`log_logarithms`."""
    logarithms = [f"log10_{name}" for name in shown]
    for logger in _boards(trainer):
        logger.experiment.add_custom_scalars(board_layout([*shown, *logarithms]))


def log_logarithms(trainer: Trainer, stats: Mapping[str, float], step: int) -> None:
    """Give TensorBoard the logarithms of densities, which fall from 1 to a thousandth: its charts have even axes."""
    for name in ("density", "union_density"):
        if stats.get(name, 0.0) > 0:
            for logger in _boards(trainer):
                logger.experiment.add_scalar(f"sparse/log10_{name}", math.log10(stats[name]), step)


def log_text(trainer: Trainer, tag: str, markdown: str, step: int) -> None:
    """Show a page of text in TensorBoard."""
    for logger in _boards(trainer):
        logger.experiment.add_text(tag, markdown, step)


def log_magnitudes(trainer: Trainer, tag: str, counts: Sequence[int], step: int) -> None:
    """Show how many values lie in each power of two, over the decimal logarithm of their magnitude, in TensorBoard.

    Args:
        trainer: whose loggers are used.
        tag: under which it is shown.
        counts: by power of two, as in :class:`~lightning_sparse.engine.observe.ParameterSamples`.
        step: number of the step.
    """
    powers = {position + _SMALLEST_POWER: count for position, count in enumerate(counts)}
    held = [power for power, count in list(powers.items())[1:-1] if count]
    if not held:
        return  # nothing but zeros, which have no logarithm
    bins = range(min(held), max(held) + 1)
    centres = [(power + 0.5) * _LOG10_OF_2 for power in bins]
    inside = [powers[power] for power in bins]
    for logger in _boards(trainer):
        logger.experiment.add_histogram_raw(
            tag,
            min=bins[0] * _LOG10_OF_2,
            max=(bins[-1] + 1) * _LOG10_OF_2,
            num=sum(inside),
            sum=sum(count * centre for count, centre in zip(inside, centres)),
            sum_squares=sum(count * centre**2 for count, centre in zip(inside, centres)),
            bucket_limits=[(power + 1) * _LOG10_OF_2 for power in bins],
            bucket_counts=inside,
            global_step=step,
        )


def log_picture(trainer: Trainer, tag: str, figure: Any, step: int) -> None:
    """Show a figure in TensorBoard, and in loggers with a method ``log_image(key, images, step)`` (such as W&B's)."""
    loggers = [logger for logger in trainer.loggers if shows_pictures(logger)]
    if not loggers:
        return
    image = as_image(figure)
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image(tag, image, step, dataformats="HWC")
        else:
            logger.log_image(key=tag, images=[image], step=step)  # type: ignore[attr-defined]


def shows_pictures(logger: Logger) -> bool:
    """Say whether :func:`log_picture` reaches a logger."""
    return isinstance(logger, TensorBoardLogger) or callable(getattr(logger, "log_image", None))


def as_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Write a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def as_list(facts: Mapping[str, object]) -> str:
    """Write names and values as a list in Markdown."""
    return "\n".join(f"- {name}: {value}" for name, value in facts.items())


def _boards(trainer: Trainer) -> list[TensorBoardLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
