"""The command ``lightning-sparse estimate``: compute r, and recommend a strategy, without any measurement."""

import argparse
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from lightning_sparse.loop.summary import in_bytes
from lightning_sparse.schedule.network import dense_bytes

# docs/choose-a-strategy.md explains the thresholds. A test compares its table with these.
LOCAL_STEPS = "local steps"
BANDS = (  # upper limit of r, strategy and reason
    (0.3, "ddp", "there is little to win, and DDP delays no gradient"),
    (1.0, "sparse_auto", "sparse_auto times DDP and compression, and uses the faster"),
    (20.0, "sparse_lags", "the network is the bottleneck"),
    (math.inf, LOCAL_STEPS, "compressed gradients would be exposed, too; see sparse_diloco and sparse_loco"),
)
FAR = 0.2  # round trip / step, above which local steps are recommended instead of sparse_lags
PASSES = {"adamw": 29.0, "sgd": 14.0}  # passes over the fp32 model per compressed step, see docs/choose-a-strategy.md
BACKWARD = 2 / 3  # share of a step's computation, behind which DDP with small buckets hides the exchange
_BITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9}


class Estimate(NamedTuple):
    """Estimated seconds of a DDP step: exchange without overlap, computation, and one-way latency of a message.

    ``gpu_seconds`` is the time that compression adds on the GPU.
    """

    exchange_seconds: float
    compute_seconds: float
    latency: float = 0.0
    gpu_seconds: float = 0.0

    @property
    def r(self) -> float:
        """Ratio of exchange to computation, which decides the strategy."""
        return self.exchange_seconds / self.compute_seconds

    @property
    def saved_seconds(self) -> float:
        """Exchange time per step that DDP cannot hide behind backward, minus the GPU's time for compression."""
        exposed = max(0.0, self.exchange_seconds - BACKWARD * self.compute_seconds)
        return exposed - self.gpu_seconds

    @property
    def strategy(self) -> str:
        """The strategy, or ``"local steps"``.

        >>> [Estimate(r, 1.0).strategy for r in (0.1, 0.9, 3, 30)]
        ['ddp', 'sparse_auto', 'sparse_lags', 'local steps']
        >>> Estimate(0.9, 1.0, gpu_seconds=0.3).strategy
        'ddp'
        """
        if self.saved_seconds < 0:
            return "ddp"
        strategy = next(strategy for below, strategy, _ in BANDS if self.r < below)
        is_far = 2 * self.latency >= FAR * self.compute_seconds
        return LOCAL_STEPS if strategy == "sparse_lags" and is_far else strategy

    @property
    def local_steps(self) -> int:
        """Local steps that limit dense exchanges to 5 % of the time, 500 at most."""
        return min(500, max(1, math.ceil(self.r / 0.05)))

    def __str__(self) -> str:
        reason = next(reason for _, strategy, reason in BANDS if strategy == self.strategy)
        rounds = f", for dense changes with local_steps={self.local_steps}" if self.strategy == LOCAL_STEPS else ""
        return f"Take {self.strategy}{rounds}: {reason}."


def estimate(args: Sequence[str]) -> None:
    """Run the subcommand. Invalid arguments exit with status 2 and a message."""
    parser = argparse.ArgumentParser("lightning-sparse estimate", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--parameters", required=True, help="trained parameters, with fp32 gradients, such as 124M, 1.5B")
    add("--compute", required=True, help="time of a step without communication, on one device, such as 120ms")
    add("--bandwidth", required=True, help="link of each machine, such as 100Mbps, 25Gb/s; no unit: bits per second")
    add("--workers", required=True, type=int, help="processes that exchange gradients, at least 2")
    add("--latency", default="100us", help="time of a message one way, such as 100us (Ethernet, default), 10ms (sites)")
    add("--memory-bandwidth", type=float, default=1000.0, help="memory bandwidth of a GPU in GB/s, default %(default)s")
    add("--optimizer", choices=PASSES, default="adamw", help="default %(default)s")
    try:
        print(_estimated(parser.parse_args(args)))
    except ValueError as error:
        parser.error(str(error))


def _estimated(options: argparse.Namespace) -> str:
    workers, memory = options.workers, options.memory_bandwidth
    if workers < 2 or not memory > 0:
        raise ValueError(f"--workers {workers} must be at least 2, --memory-bandwidth {memory} above zero")
    elements = read("parameters", options.parameters, COUNTS, "124M")
    compute = read("compute", options.compute, SECONDS, "120ms")
    rate, latency = read_rate(options.bandwidth), read_seconds(options.latency)
    exchange = dense_bytes(elements, workers) * 8 / rate + 2 * (workers - 1) * latency
    passes, size = PASSES[options.optimizer], in_bytes(4 * elements)
    found = Estimate(exchange, compute, latency, passes * 4e-9 * elements / memory)
    return (
        f"r = {found.r:.3g}: seconds of DDP's exchange / seconds of a step without it\n"
        f"  exchange  {exchange:.3g} s  2 ({workers} - 1) / {workers} x {size} of gradients / {rate / 1e9:.4g} Gbit/s"
        f" + 2 ({workers} - 1) x {latency * 1e3:.4g} ms\n  compute   {compute:.3g} s\n"
        f"  GPU       {found.gpu_seconds:.3g} s  that compression adds to a step:"
        f" {passes:g} passes ({options.optimizer}) x {size} / {memory:g} GB/s of memory\n"
        f"  saved     {found.saved_seconds:.3g} s  exchange that backward cannot hide, minus GPU\n{found}"
    )


def read_rate(text: str, noun: str = "bandwidth") -> float:
    """Return bits per second from text such as ``"1gbit"``, ``"1Gb/s"`` or ``"1e9"``. A capital B would mean bytes."""
    bits = read(noun, re.sub(r"([kmgKMG])(?:[bB]it|b)(?:/s|ps)?$", r"\1", text), _BITS, "1gbit")
    if bits < 1e3:
        raise ValueError(f"{noun}={text!r} must be 1000 bits per second or more, such as '1gbit', '25Gb/s' or '1e9'")
    return bits


def read_seconds(text: str, noun: str = "latency") -> float:
    """Return seconds from text such as ``"100us"``. ``"0"`` needs no unit."""
    return 0.0 if text == "0" else read(noun, text, SECONDS, "100us")


def read(noun: str, text: str, units: dict[str, float], example: str) -> float:
    """Return a number above zero from text with a unit of ``units``, or raise ``ValueError``."""
    match = re.fullmatch(rf"(\d+(?:\.\d+)?(?:e\d+)?)({'|'.join(units)})", text.lower())
    number = 0.0 if match is None else float(match[1]) * units[match[2]]
    if not number:
        raise ValueError(f"{noun}={text!r} must be above zero, with a unit of {', '.join(units)}, such as {example!r}")
    return number
