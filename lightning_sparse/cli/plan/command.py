"""The command ``lightning-sparse plan``: its options and its output."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from lightning_sparse.cli.plan.forecast import DENSITIES, measure_candidates, predict_systems
from lightning_sparse.cli.plan.model import profile_model
from lightning_sparse.cli.plan.rehearsal import SettingsOf
from lightning_sparse.cli.plan.report import as_json, as_table, draw, figure_class
from lightning_sparse.schedule.cost.network import Network, parse_bandwidth, parse_latency

_DESCRIPTION = """\
Predict the step time of every strategy, for a model and a network, and mark the simplest of the fastest.

The model's backward is profiled here, in one process, in a few training steps on the first batches of its train
dataloader."""
_EPILOG = """\
--model, --data, --trainer, --config and all else of "lightning-sparse fit" say what to train; of the trainer's
arguments, accelerator, precision, gradient clipping, benchmark and deterministic count. Example:

  lightning-sparse plan --config fit.yaml --bandwidth 1gbit --latency 100us --workers 16 --picture plan.png"""


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
        usage="%(prog)s --bandwidth B --latency L --workers N [OPTION ...] --config FILE ...",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--bandwidth", required=True, help="of each worker's or node's link, such as 100mbit, 2.5gbit")
    add("--latency", required=True, help="of a message one way, such as 100us, 1ms")
    add("--workers", type=int, required=True, help="processes that exchange gradients, at least 2")
    add("--ranks-per-node", type=int, default=1, help="that share the link of their node, 1 if left out")
    add("--node-bandwidth", default="100gbit", help="of each worker inside its node, 100gbit if left out")
    add("--node-latency", default="10us", help="of a message inside a node, 10us if left out")
    add("--densities", type=float, nargs="+", default=DENSITIES, help="fractions to try, 0.1 0.01 0.001 if left out")
    add("--json", metavar="FILE", help="write the predictions there; - for standard output, instead of the table")
    add("--picture", metavar="FILE", help="draw speed-up against workers and bandwidth there, such as plan.png")
    return parser


def _plan(options: argparse.Namespace, model_args: list[str]) -> None:
    if options.picture:
        figure_class()
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
    profile = profile_model(model_args)
    candidates = measure_candidates(profile, options.densities)
    rows = predict_systems(profile, network, candidates)
    text = json.dumps(as_json(profile, network, rows), indent=1)
    print(text if options.json == "-" else as_table(profile, network, rows))
    if options.json and options.json != "-":
        Path(options.json).write_text(text + "\n")
    if options.picture:
        draw(profile, network, candidates, options.picture)
