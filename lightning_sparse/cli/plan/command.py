"""The command ``lightning-sparse plan``: its options and its output."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from lightning_sparse.callbacks.overlap_timeline import figure_class
from lightning_sparse.cli.plan.advice import Ratio, parse_compute, parse_parameters
from lightning_sparse.cli.plan.forecast import DENSITIES, measure_candidates, predict_systems
from lightning_sparse.cli.plan.profiler import profile_model
from lightning_sparse.cli.plan.rehearsal import SettingsOf
from lightning_sparse.cli.plan.report import as_json, as_table, draw
from lightning_sparse.engine.settings import refuse
from lightning_sparse.schedule.network import Network, parse_bandwidth, parse_latency

_DESCRIPTION = """\
Say r, the seconds of DDP's exchange over those of a step without it, and what to take at that r; then predict the step
time of every strategy, and mark the simplest of the fastest.

The model's backward is profiled here, in one process, in a few training steps on the first batches of its train
dataloader. With --parameters and --compute nothing is run, and r alone is said."""
_EPILOG = """\
--model, --data, --trainer, --config and all else of "lightning-sparse fit" say what to train; of the trainer's
arguments, accelerator, precision, gradient clipping, benchmark and deterministic count. Examples:

  lightning-sparse plan --parameters 124M --compute 100ms --bandwidth 10gbit --latency 100us --workers 4
  lightning-sparse plan --config fit.yaml --bandwidth 1gbit --latency 100us --workers 16 --picture plan.png"""

_FP32_BYTES = 4


def plan(args: Sequence[str]) -> None:
    """Run the command on what follows the word ``plan``; status 2 and a message where it makes no sense."""
    parser = _parser()
    options, model_args = parser.parse_known_args(args)
    try:
        _plan(options, model_args)
    except ValueError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-sparse plan",
        usage="%(prog)s --bandwidth B --workers N [OPTION ...] (--config F | --parameters P --compute S)",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--bandwidth", required=True, help="of each worker's or node's link, such as 100mbit, 2.5gbit, 25Gb/s")
    add("--latency", default="100us", help="of a message one way, such as 100us (Ethernet; if left out), 10ms (sites)")
    add("--workers", type=int, required=True, help="processes that exchange gradients, at least 2")
    add("--ranks-per-node", type=int, default=1, help="that share the link of their node, 1 if left out")
    add("--shards", type=int, default=1, help="of a model, one on each worker of a node (FSDP2); 1 if left out")
    add("--node-bandwidth", default="100gbit", help="of each worker inside its node, 100gbit if left out")
    add("--node-latency", default="10us", help="of a message inside a node, 10us if left out")
    add("--densities", type=float, nargs="+", default=DENSITIES, help="fractions to try, 0.1 0.01 0.001 if left out")
    add("--parameters", help="of a model with fp32 gradients that is not here, such as 124M, 1.5B; with --compute")
    add("--compute", help="of a step without communication, such as 120ms; measured here if left out")
    add("--json", metavar="FILE", help="write the predictions there; - for standard output, instead of the table")
    add("--picture", metavar="FILE", help="draw speed-up against workers and bandwidth there, such as plan.png")
    return parser


def _plan(options: argparse.Namespace, model_args: list[str]) -> None:
    if options.picture:
        figure_class("--picture")
    for density in options.densities:
        SettingsOf("topk", density).build()
    network = Network(
        parse_bandwidth(options.bandwidth),
        parse_latency(options.latency),
        options.workers,
        options.ranks_per_node,
        parse_bandwidth(options.node_bandwidth, "node-bandwidth"),
        parse_latency(options.node_latency, "node-latency"),
    ).checked()
    is_sharded = options.shards != 1
    if is_sharded:
        network = _between_replicas(network, options)
    compute = None if options.compute is None else parse_compute(options.compute)
    if options.parameters is not None:
        if compute is None or model_args or options.picture:
            raise ValueError(
                f"--parameters {options.parameters} needs --compute beside it, and goes with no --picture and no model:"
                f" {' '.join(model_args) or 'none'}"
            )
        ratio = Ratio(_FP32_BYTES * parse_parameters(options.parameters), network, compute)
        _give(options.json, str(ratio), {"ratio": ratio.as_json()})
        return
    profile = profile_model(model_args)
    origin = f"measured here, on {profile.device}" if compute is None else "given"
    if compute is not None:
        profile = profile.lasting(compute)
    ratio = Ratio(profile.element_bytes * profile.elements, network, profile.alone_seconds, origin)
    profile = profile.sharded(options.shards)
    candidates = measure_candidates(profile, options.densities, is_sharded)
    rows = predict_systems(profile, network, candidates)
    table, numbers = as_table(profile, rows), as_json(profile, network, rows)
    if is_sharded:  # r is DDP's, and so is what it advises
        _give(options.json, table, numbers)
    else:
        _give(options.json, f"{ratio}\n\n{table}", {"ratio": ratio.as_json(), **numbers})
    if options.picture:
        draw(profile, network, candidates, options.picture)


def _between_replicas(network: Network, options: argparse.Namespace) -> Network:
    """Return the network of equal shards, of replicas that take a node each."""
    refuse(
        (options.shards < 1, f"--shards {options.shards} must be a number of workers, at least 1 (whole models)"),
        (
            network.node_ranks not in (1, options.shards),
            f"--shards {options.shards} beside --ranks-per-node {network.node_ranks}: a replica on each node is what is"
            " predicted: give the same number, or leave --ranks-per-node out",
        ),
        (
            options.parameters is not None or options.picture,
            f"--shards {options.shards} goes with neither --parameters nor --picture, which are about DDP: leave them"
            " out",
        ),
    )
    return network._replace(node_ranks=options.shards).checked().between.checked()


def _give(file: Optional[str], text: str, numbers: dict[str, Any]) -> None:
    written = json.dumps(numbers, indent=1)
    print(written if file == "-" else text)
    if file and file != "-":
        Path(file).write_text(written + "\n")
