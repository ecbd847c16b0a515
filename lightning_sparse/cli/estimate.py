"""The command ``lightning-sparse estimate``: compute r = exchange / computation, and recommend a strategy."""

import argparse
import re
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from lightning_sparse.loop.summary import in_bytes
from lightning_sparse.schedule.costs import Line, dense_bytes

REASONS = {
    "ddp": "the exchange is short beside the computation",
    "bf16 hook": "half the bytes are enough; pass torch's bf16_compress_hook to Lightning's DDPStrategy",
    "sparse_auto": "whether DDP or LAGS-SGD is faster depends on the overlap with backward; sparse_auto times both",
    "sparse_lags": "the network is the bottleneck",
    "local steps": "even compressed gradients delay each step too much; see sparse_diloco and sparse_loco",
}
PASSES = {"adamw": 29.0, "sgd": 14.0}  # passes over parameters that compression adds, see docs/choose-a-strategy.md
BACKWARD = 2 / 3  # backward's share of a step's computation; only backward hides an exchange
# Sent bytes per parameter, with indices: 1 % as float32 in a step, and 5 % as bfloat16 in a round of local steps.
_SELECTED, _CHANGED = 0.01 * 5.8, 0.05 * 3.1
_OWNED, _OWNERS_FROM = 7, 15  # from 15 ranks on, "auto" uses owners: a rank then receives the bytes of 7 selections
LOCAL_STEPS, _MORE_STEPS = 5, 1.5  # local steps per round; local steps per step of DDP, for an equal loss
_NEAR = 1.15  # ways with estimates that differ by less than this factor are worth a trial
_BITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9}


class UnitError(ValueError, argparse.ArgumentTypeError):
    """A text is no number with a unit. ``argparse`` prints the message, as of every ``ArgumentTypeError``."""


class Estimate(NamedTuple):
    """Estimate seconds per step of a model with ``parameters`` on ``world_size`` ranks.

    Attributes:
        compute: seconds of a step without communication.
        network: seconds of an exchange as a function of the bytes that a rank sends or receives.
        gpu: seconds per step that compression adds on the GPU.
        round_gpu: seconds that compression adds to a round of local steps.
    """

    parameters: float
    world_size: int
    compute: float
    network: Line
    gpu: float = 0.0
    round_gpu: float = 0.0

    @property
    def exchange(self) -> float:
        """Seconds of DDP's exchange without overlap."""
        return self.network(dense_bytes(self.parameters, self.world_size))

    @property
    def r(self) -> float:
        """Seconds of DDP's exchange / seconds of a step's computation."""
        return self.exchange / self.compute

    def steps(self, hidden: float = BACKWARD) -> dict[str, float]:
        """Return seconds per step for each way to train. The keys are those of ``REASONS`` without ``sparse_auto``.

        Args:
            hidden: share of the computation during which an exchange can run.
        """
        dense = dense_bytes(self.parameters, self.world_size)
        selections = self.world_size - 1 if self.world_size < _OWNERS_FROM else _OWNED
        received = selections * self.parameters
        sent = {"ddp": dense, "bf16 hook": dense / 2, "sparse_lags": _SELECTED * received}
        last, free = self.network(0), hidden * self.compute  # backward cannot hide the latency of the last message
        steps = {way: self.compute + max(last, self.network(nbytes) - free) for way, nbytes in sent.items()}
        steps["sparse_lags"] += self.gpu
        rounds = (self.round_gpu + self.network(_CHANGED * received)) / LOCAL_STEPS
        return {**steps, "local steps": _MORE_STEPS * (self.compute + rounds)}

    @property
    def strategy(self) -> str:
        """The fastest way to train. ``sparse_auto`` if ``sparse_lags`` wins only where dense exchanges overlap little.

        >>> [Estimate(1.0, 4, 1.0, Line(0.0, r / dense_bytes(1.0, 4)), 0.1, 0.1).strategy for r in (0.1, 0.9, 3, 300)]
        ['ddp', 'sparse_auto', 'sparse_lags', 'local steps']
        """
        overlapped, exposed = (min(steps, key=steps.__getitem__) for steps in (self.steps(), self.steps(hidden=0.0)))
        return "sparse_auto" if overlapped in ("ddp", "bf16 hook") and exposed == "sparse_lags" else overlapped

    def __str__(self) -> str:
        steps, strategy = self.steps(), self.strategy
        words = ", ".join(f"{way} {1e3 * seconds:.3g} ms" for way, seconds in steps.items())
        near = [way for way, each in steps.items() if way != strategy and each < _NEAR * min(steps.values())]
        also = f" Also try {' and '.join(near)}: the estimates differ by less than 15 %." if near else ""
        return f"{words}\nTake {strategy}: {REASONS[strategy]}.{also}"


def add_model_options(parser: argparse.ArgumentParser, required: bool = False) -> None:
    """Add the options for the number of parameters, and for the seconds of a step's computation."""
    parameters = partial(read, "parameters", units=_COUNTS, example="124M")
    compute = partial(read, "compute", units=_SECONDS, example="120ms")
    add = partial(parser.add_argument, required=required)
    add("--parameters", type=parameters, help="trained parameters, with fp32 gradients, such as 124M, 1.5B")
    add("--compute", type=compute, help="time of a step without communication, on one device, such as 120ms")


def estimate(args: Sequence[str]) -> None:
    """Run the subcommand. Invalid arguments exit with status 2 and a message."""
    parser = argparse.ArgumentParser("lightning-sparse estimate", description=__doc__, allow_abbrev=False)
    add_model_options(parser, required=True)
    add = parser.add_argument
    rate = "link of each machine, such as 100Mbps, 25Gb/s; no unit: bits per second"
    add("--bandwidth", required=True, type=read_rate, help=rate)
    add("--workers", required=True, type=int, help="processes that exchange gradients, at least 2")
    latency = "one-way time of a message, such as 100us (Ethernet, default), 10ms (WAN)"
    add("--latency", default="100us", type=read_seconds, help=latency)
    add("--memory-bandwidth", type=float, default=1000.0, help="memory bandwidth of a GPU in GB/s, default %(default)s")
    add("--optimizer", choices=PASSES, default="adamw", help="default %(default)s")
    options = parser.parse_args(args)
    workers, memory = options.workers, options.memory_bandwidth
    if workers < 2 or not memory > 0:
        parser.error(f"--workers {workers} must be at least 2, --memory-bandwidth {memory} above zero")
    print(_estimated(options))


def _estimated(options: argparse.Namespace) -> str:
    workers, memory = options.workers, options.memory_bandwidth
    elements, compute, rate, latency = options.parameters, options.compute, options.bandwidth, options.latency
    passes, size = PASSES[options.optimizer], in_bytes(4 * elements)
    network = Line(2 * (workers - 1) * latency, 8 / rate)
    gpu = passes * 4e-9 * elements / memory
    found = Estimate(elements, workers, compute, network, gpu, gpu)
    return (
        f"r = {found.r:.3g}: seconds of DDP's exchange / seconds of a step without it\n"
        f"  exchange  {found.exchange:.3g} s  2 ({workers} - 1) / {workers} x {size} of gradients / {rate / 1e9:.4g}"
        f" Gbit/s + 2 ({workers} - 1) x {latency * 1e3:.4g} ms\n  compute   {compute:.3g} s\n"
        f"  GPU       {found.gpu:.3g} s  that compression adds to a step:"
        f" {passes:g} passes ({options.optimizer}) x {size} / {memory:g} GB/s of memory\n  step      {found}"
    )


def read_rate(text: str, noun: str = "bandwidth") -> float:
    """Return bits per second from text such as ``"1gbit"``, ``"1Gb/s"`` or ``"1e9"``. ``"1GB/s"`` is an error."""
    bits = read(noun, re.sub(r"([kmgKMG])(?:[bB]it|b)(?:/s|ps)?$", r"\1", text), _BITS, "1gbit")
    if bits < 1e3:
        raise UnitError(f"{noun}={text!r} must be 1000 bits per second or more, such as '1gbit', '25Gb/s' or '1e9'")
    return bits


def read_seconds(text: str, noun: str = "latency") -> float:
    """Return seconds from text such as ``"100us"``. ``"0"`` needs no unit."""
    return 0.0 if text == "0" else read(noun, text, _SECONDS, "100us")


def read(noun: str, text: str, units: dict[str, float], example: str) -> float:
    """Return a number above zero from text with a unit of ``units``, or raise :class:`UnitError`."""
    match = re.fullmatch(rf"(\d+(?:\.\d+)?(?:e\d+)?)({'|'.join(units)})", text.lower())
    number = 0.0 if match is None else float(match[1]) * units[match[2]]
    if not number:
        raise UnitError(f"{noun}={text!r} must be above zero, with a unit of {', '.join(units)}, such as {example!r}")
    return number
