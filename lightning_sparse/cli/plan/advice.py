"""What to take by r: seconds of DDP's exchange over seconds of a step without it."""

import math
from typing import NamedTuple

from lightning_sparse.loop.summary import in_bytes
from lightning_sparse.schedule.network import Network

# docs/which-strategy.md says from which measured rows these come; its table is held to them.
LOCAL_STEPS = "local steps"
BANDS = (  # r below which a strategy is advised, and why
    (0.3, "ddp", "there is little to win, and DDP delays no gradient"),
    (1.0, "sparse_auto", "it times both, and keeps the faster"),
    (20.0, "sparse_lags", "the network is the bottleneck"),
    (math.inf, LOCAL_STEPS, "compressed gradients would be exposed, too; see sparse_diloco and sparse_loco"),
)
FAR = 0.2  # round trip / step from which on local steps are advised in place of sparse_lags


class Advice(NamedTuple):
    """What to take, of a round trip of a message in steps without exchange."""

    r: float
    round_trip: float = 0.0

    @property
    def strategy(self) -> str:
        """The strategy, or ``"local steps"``.

        >>> [Advice(r).strategy for r in (0.1, 0.5, 3, 30)]
        ['ddp', 'sparse_auto', 'sparse_lags', 'local steps']
        """
        strategy = next(strategy for below, strategy, _ in BANDS if self.r < below)
        return LOCAL_STEPS if strategy == "sparse_lags" and self.round_trip >= FAR else strategy

    def __str__(self) -> str:
        reason = next(reason for _, strategy, reason in BANDS if strategy == self.strategy)
        low = max((below for below, *_ in BANDS if below <= self.r), default=0.0)
        high = min(below for below, *_ in BANDS if below > self.r)
        where = f"r of {low:g} and more" if math.isinf(high) else f"r from {low:g} to {high:g}"
        far = f", a round trip of {self.round_trip:.2g} steps" if self.round_trip >= FAR else ""
        return f"Take {self.strategy} ({where}{far}): {reason}."


class Ratio(NamedTuple):
    """How long DDP's exchange of a gradient takes, nothing of it hidden, beside a step without it."""

    gradient_bytes: float
    network: Network
    compute_seconds: float

    @property
    def exchange_seconds(self) -> float:
        """Seconds of the all-reduce."""
        return self.network.seconds("all_reduce", self.gradient_bytes)

    @property
    def advice(self) -> Advice:
        """What to take."""
        return Advice(self.exchange_seconds / self.compute_seconds, 2 * self._link.latency / self.compute_seconds)

    @property
    def _link(self) -> Network:
        network = self.network
        return network.intra if network.workers <= network.node_ranks else network

    def __str__(self) -> str:
        workers, link = self.network.workers, self._link
        return (
            f"r = {self.advice.r:.3g}: seconds of DDP's exchange / seconds of a step without it\n"
            f"  exchange  {self.exchange_seconds:.3g} s  2 ({workers} - 1) / {workers} x"
            f" {in_bytes(self.gradient_bytes)} of gradients / {link.bandwidth / 1e9:.4g} Gbit/s"
            f" + 2 ({workers} - 1) x {link.latency * 1e3:.4g} ms\n"
            f"  compute   {self.compute_seconds:.3g} s\n"
            f"{self.advice}"
        )
