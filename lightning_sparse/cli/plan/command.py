"""The command ``lightning-sparse plan``: its options and its output."""

import argparse
import json
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_sparse.cli.plan.advice import Advice, Ratio
from lightning_sparse.cli.plan.forecast import FP32_BYTES, Forecast, candidates, forecast
from lightning_sparse.loop.summary import in_bytes
from lightning_sparse.schedule.network import Network, parse_bandwidth, parse_latency

_DESCRIPTION = """\
Say r, the seconds of DDP's exchange over those of a step without it, and what to take at that r; then the bytes and
seconds of a step with every strategy, by formula. Nothing is run. With --r, what to take at that r, and no more."""
_EPILOG = "example: lightning-sparse plan --parameters 124M --compute 100ms --bandwidth 25Gb/s --workers 4"
_NEEDED = ("parameters", "compute", "bandwidth", "workers")
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9}
_HEADER = ("strategy", "density", "step ms", "x {}", "exposed ms", "sent")
_NOTE = (
    "An estimate by formula. Left out: the time to select and encode, which counts where r is small; loading data,"
    " uneven ranks, warm-up; and that a lower density delays more of each gradient. sparse_auto times real steps."
)


def plan(args: Sequence[str]) -> None:
    """Run the command on what follows the word ``plan``; status 2 and a message where it makes no sense."""
    parser = _parser()
    options = parser.parse_args(args)
    try:
        _plan(options)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-sparse plan",
        usage="%(prog)s (--r R | --parameters P --compute S --bandwidth B --workers N) [OPTION ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--r", type=float, help="where it is known: what to take, and nothing else")
    add("--parameters", help="that are trained, with fp32 gradients, such as 124M, 1.5B")
    add("--compute", help="of a step without communication, such as 120ms: one on one device")
    add("--bandwidth", help="of each worker's or node's link, such as 100Mbps, 1Gbit/s, 25Gb/s; plain: bits per second")
    add("--latency", default="100us", help="of a message one way, such as 100us (Ethernet; if left out), 10ms (sites)")
    add("--workers", type=int, help="processes that exchange gradients, at least 2")
    add("--ranks-per-node", type=int, default=1, help="that share the link of their node, 1 if left out")
    add("--shards", type=int, default=1, help="of a model, one on each worker of a node (FSDP2); 1 if left out")
    add("--node-bandwidth", default="100gbit", help="of each worker inside its node, 100gbit if left out")
    add("--node-latency", default="10us", help="of a message inside a node, 10us if left out")
    add("--densities", type=float, nargs="+", default=[0.01], help="fractions to work out, 0.01 if left out")
    add("--json", metavar="FILE", help="write the numbers there; - for standard output, instead of the table")
    return parser


def _plan(options: argparse.Namespace) -> None:
    missing = [name for name in _NEEDED if getattr(options, name) is None]
    if options.r is not None:
        if not options.r > 0:
            raise ValueError(f"--r {options.r} must be above zero")
        if len(missing) < len(_NEEDED):
            raise ValueError(f"--r {options.r} stands for --{', --'.join(_NEEDED)}: leave them out")
        print(Advice(options.r))
        return
    if missing:
        raise ValueError(f"--{', --'.join(missing)} must be given; or --r, where that is known")
    parameters, compute = parse_parameters(options.parameters), parse_latency(options.compute, "compute", "120ms")
    if not compute:
        raise ValueError(f"compute={options.compute!r} must be above zero, such as '120ms'")
    network, is_sharded = _network(options), options.shards != 1
    ways = candidates(options.densities, is_sharded)
    rows = forecast(-(-parameters // options.shards), compute, network, ways)
    numbers: dict[str, Any] = {"network": network._asdict(), "rows": [row._asdict() for row in rows]}
    text = _as_table(rows)
    if not is_sharded:  # r is DDP's, and so is what it advises
        ratio = Ratio(FP32_BYTES * parameters, network, compute)
        text, numbers["r"], numbers["advice"] = f"{ratio}\n\n{text}", ratio.advice.r, ratio.advice.strategy
    written = json.dumps(numbers, indent=1)
    print(written if options.json == "-" else text)
    if options.json and options.json != "-":
        Path(options.json).write_text(written + "\n")


def parse_parameters(text: str) -> int:
    """Return a number of parameters.

    >>> parse_parameters("124M"), parse_parameters("1.5B"), parse_parameters("360000")
    (124000000, 1500000000, 360000)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmb]?)", text.lower())
    number = 0 if match is None else round(float(match[1]) * _UNITS[match[2]])
    if not number:
        raise ValueError(f"parameters={text!r} must be a number above zero, or one of k, M, B, such as '124M'")
    return number


def _network(options: argparse.Namespace) -> Network:
    """Return the network of the exchange; of shards, that between equal ones of replicas that take a node each."""
    links = parse_bandwidth(options.bandwidth), parse_latency(options.latency), options.workers
    bandwidth = parse_bandwidth(options.node_bandwidth, "node-bandwidth")
    intra = bandwidth, parse_latency(options.node_latency, "node-latency", "10us")
    network, shards = Network(*links, options.ranks_per_node, *intra).checked(), options.shards
    if shards < 1:
        raise ValueError(f"--shards {shards} must be a number of workers, at least 1 (whole models)")
    if shards == 1:
        return network
    if network.node_ranks not in (1, shards):
        raise ValueError(
            f"--shards {shards} beside --ranks-per-node {network.node_ranks}: a replica on each node is what is worked"
            " out: give the same number, or leave --ranks-per-node out"
        )
    if network.workers % shards or network.workers == shards:
        raise ValueError(
            f"--shards {shards} with --workers {network.workers}: give twice as many workers as shards, or another"
            " multiple, as replicas of that many workers exchange, and one replica has nobody to exchange with"
        )
    return network._replace(node_ranks=shards).between.checked()


def _as_table(rows: Sequence[Forecast]) -> str:
    """Return a table, and what it leaves out."""
    cells = [tuple(title.format(rows[0].name.upper()) for title in _HEADER)]
    for row in rows:
        density = "" if row.density is None else f"{row.density:.3g}"
        step, exposed = (f"{1e3 * seconds:.1f}" for seconds in (row.step_seconds, row.exposed_seconds))
        cells.append((row.name, density, step, f"{row.speedup:.2f}", exposed, in_bytes(row.sent_bytes)))
    layout = [f"{side}{max(map(len, column))}" for side, column in zip("<>>>>>", zip(*cells))]
    lines = ["  ".join(map(format, line, layout)).rstrip() for line in cells]
    rounds = ", ".join(f"{row.name} {row.local_steps}" for row in rows if row.local_steps > 1)
    more = f" Local steps between two exchanges, with which a loss takes more steps: {rounds}." if rounds else ""
    return "\n".join([*lines, "", textwrap.fill(_NOTE + more, 100)])
