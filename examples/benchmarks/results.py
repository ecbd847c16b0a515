"""From step times to a table: pure functions, and how a table is written."""

import csv
import io
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Optional


class Measurement(NamedTuple):
    """What one rank saw of one row in one round.

    Attributes:
        seconds: for each batch.
        sent_bytes: that left the rank, as counted, for each batch.
        inter_node_bytes: that the host's device transmitted, for each batch.
        longest: batch of those that share a step, or a round of local steps, relative to the median batch; median over
            steps or rounds.
    """

    seconds: list[float]
    sent_bytes: float
    inter_node_bytes: float
    longest: float = 1.0


class Line(NamedTuple):
    """One line of the table.

    Attributes:
        workload: name of the model.
        row: name of the way to train.
        median_ms: median over the batches of all ranks and rounds, in milliseconds.
        spread_ms: interquartile range of the same.
        to_ddp: median relative to that of ``ddp`` in the same run; ``None`` where it did not run.
        to_no_communication: median relative to that of ``no communication`` in the same run, or ``None``.
        sent_mb: megabytes (10**6) that left a rank, as counted, for each batch; the largest of all ranks.
        link_mb: megabytes that a host transmitted for each batch; mean over ranks and rounds.
        longest: batch of a step or a round, relative to the median batch; median over ranks and rounds.
    """

    workload: str
    row: str
    median_ms: float
    spread_ms: float
    to_ddp: Optional[float]
    to_no_communication: Optional[float]
    sent_mb: float
    link_mb: float
    longest: float = 1.0


def milliseconds(seconds: Sequence[float]) -> str:
    """Write the median of some times."""
    return f"{1e3 * statistics.median(seconds):9.1f} ms"


def spread(values: Sequence[float]) -> float:
    """Return the interquartile range, by linear interpolation; 0 for a single value."""
    if len(values) == 1:
        return 0.0
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return upper - lower


def summarise(
    workload: str, measurements: Mapping[str, Sequence[Measurement]], ddp: str, no_communication: str
) -> list[Line]:
    """Make the lines of one workload.

    Args:
        workload: its name.
        measurements: by row, those of all ranks and rounds.
        ddp: row to compare with.
        no_communication: the other row to compare with.

    Returns:
        a line for each row.
    """
    pooled = {row: [second for seen in some for second in seen.seconds] for row, some in measurements.items()}
    medians = {row: statistics.median(seconds) for row, seconds in pooled.items()}
    return [
        Line(
            workload,
            row,
            1e3 * medians[row],
            1e3 * spread(pooled[row]),
            _ratio(medians[row], medians.get(ddp)),
            _ratio(medians[row], medians.get(no_communication)),
            max(seen.sent_bytes for seen in some) / 1e6,
            statistics.fmean(seen.inter_node_bytes for seen in some) / 1e6,
            statistics.median(seen.longest for seen in some),
        )
        for row, some in measurements.items()
    ]


def as_text(lines: Sequence[Line]) -> str:
    """Write a table for people."""
    cells = [("", "median", "spread", "x ddp", "x no comm", "sent MB", "link MB", "longest")]
    for line in lines:
        times = (f"{line.median_ms:.1f} ms", f"{line.spread_ms:.1f} ms")
        ratios = (_written(line.to_ddp), _written(line.to_no_communication))
        cells.append((line.row, *times, *ratios, f"{line.sent_mb:.3f}", f"{line.link_mb:.3f}", f"{line.longest:.2f}"))
    layout = [f"{side}{max(map(len, column))}" for side, column in zip("<>>>>>>>", zip(*cells))]
    return "\n".join("  ".join(map(format, row, layout)) for row in cells)


def as_csv(lines: Iterable[Line], comments: Iterable[str]) -> str:
    """Write a table for programs, with comments above it."""
    text = io.StringIO()
    text.writelines(f"# {comment}\n" for comment in comments)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Line._fields)
    for line in lines:
        writer.writerow([f"{field:.4f}" if isinstance(field, float) else field for field in line])
    return text.getvalue()


def _ratio(value: float, reference: Optional[float]) -> Optional[float]:
    return value / reference if reference else None


def _written(ratio: Optional[float]) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"
