"""What to take by r: seconds of DDP's exchange over seconds of a step without it."""

import math
import re
from typing import Any, NamedTuple

from lightning_sparse.loop.summary import in_bytes
from lightning_sparse.schedule.network import Network, parse_latency

# docs/which-strategy.md says from which measured rows these come; its table is held to them.
LOCAL_STEPS = "local steps"
BANDS = (  # r below which a strategy is advised, and why
    (0.3, "ddp", "there is little to win, and DDP delays no gradient"),
    (1.0, "sparse_auto", "it times both, and keeps the faster"),
    (20.0, "sparse_lags", "the network is the bottleneck"),
    (math.inf, LOCAL_STEPS, "compressed gradients would be exposed, too; see sparse_diloco and sparse_loco"),
)
FAR = 0.2  # round trip / step from which on local steps are advised in place of sparse_lags
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9}


class Ratio(NamedTuple):
    """How long DDP's exchange takes beside a step without it, and what follows."""

    gradient_bytes: float
    network: Network
    compute_seconds: float
    origin: str = "given"  # of the seconds of compute

    @property
    def link(self) -> Network:
        """The network that the exchange takes: that of a node, where all workers are on one."""
        return self.network.inside if self.network.workers <= self.network.node_ranks else self.network

    @property
    def exchange_seconds(self) -> float:
        """Seconds of DDP's all-reduce of the whole gradient, nothing of it hidden."""
        return self.link.seconds("all_reduce", self.gradient_bytes)

    @property
    def r(self) -> float:
        """Seconds of the exchange over those of a step without it."""
        return self.exchange_seconds / self.compute_seconds

    @property
    def round_trip(self) -> float:
        """Round trip of a message over a step without exchange."""
        return 2 * self.link.latency / self.compute_seconds

    @property
    def advice(self) -> str:
        """Return the strategy to take, or ``"local steps"``.

        >>> [Ratio(1e6, Network(bandwidth, 0.0, 2), 0.1).advice for bandwidth in (1e9, 2e8, 4e7, 2e6)]
        ['ddp', 'sparse_auto', 'sparse_lags', 'local steps']
        """
        strategy = next(strategy for below, strategy, _ in BANDS if self.r < below)
        return LOCAL_STEPS if strategy == "sparse_lags" and self.round_trip >= FAR else strategy

    def __str__(self) -> str:
        workers, link = self.network.workers, self.link
        reason = next(reason for _, strategy, reason in BANDS if strategy == self.advice)
        low = max((below for below, *_ in BANDS if below <= self.r), default=0.0)
        high = min(below for below, *_ in BANDS if below > self.r)
        where = f"r of {low:g} and more" if math.isinf(high) else f"r from {low:g} to {high:g}"
        far = f", a round trip of {self.round_trip:.2g} steps" if self.round_trip >= FAR else ""
        return (
            f"r = {self.r:.3g}: seconds of DDP's exchange / seconds of a step without it\n"
            f"  exchange  {self.exchange_seconds:.3g} s  2 ({workers} - 1) / {workers} x"
            f" {in_bytes(self.gradient_bytes)} of gradients / {link.bandwidth / 1e9:.4g} Gbit/s"
            f" + 2 ({workers} - 1) x {link.latency * 1e3:.4g} ms\n"
            f"  compute   {self.compute_seconds:.3g} s  {self.origin}\n"
            f"Take {self.advice} ({where}{far}): {reason}."
        )

    def as_json(self) -> dict[str, Any]:
        """Return the same as plain numbers and words."""
        numbers = ("r", "exchange_seconds", "compute_seconds", "gradient_bytes", "advice")
        return {name: getattr(self, name) for name in numbers}


def parse_compute(text: str) -> float:
    """Return the seconds of a step without communication that a text such as ``"120ms"`` gives."""
    seconds = parse_latency(text, "compute", "120ms")
    if not seconds:
        raise ValueError(f"compute={text!r} must be above zero, such as '120ms'")
    return seconds


def parse_parameters(text: str) -> float:
    """Return a number of parameters.

    >>> parse_parameters("124M"), parse_parameters("1.5B"), parse_parameters("360000")
    (124000000.0, 1500000000.0, 360000.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmb]?)", text.lower())
    if match is None or not float(match[1]):
        raise ValueError(f"parameters={text!r} must be a number above zero, or one of k, M, B, such as '124M'")
    return float(match[1]) * _UNITS[match[2]]
