"""The command ``lightning-sparse plan``: its options and its output."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from lightning_sparse._lightning import ClusterEnvironment
from lightning_sparse.cli.plan.backward_profile import BackwardProfile
from lightning_sparse.cli.plan.candidates import DENSITIES, measure_candidates
from lightning_sparse.cli.plan.forecast import predict_systems
from lightning_sparse.cli.plan.job import network_of, present_job
from lightning_sparse.cli.plan.model import profile_model
from lightning_sparse.cli.plan.picture import draw, figure_class
from lightning_sparse.cli.plan.rehearsal import SettingsOf
from lightning_sparse.cli.plan.report import as_json, as_table
from lightning_sparse.schedule.cost.network import Network, parse_bandwidth, parse_latency

_DESCRIPTION = """\
Predict the step time of every strategy, for a model and a network, and mark the simplest of the fastest.

The model's backward is profiled here, in one process, in a few training steps on the first batches of its train
dataloader. The network is as given, or as measured if this runs inside a job of several processes (torchrun, srun)."""
_EPILOG = """\
--model, --data, --trainer, --config, --ckpt_path and all else of "lightning-sparse fit" say what to train; of the
trainer's arguments, accelerator, precision, gradient clipping, benchmark and deterministic count. Example:

  lightning-sparse plan --config fit.yaml --bandwidth 1gbit --latency 100us --workers 16 --picture plan.png"""


def plan(args: Sequence[str]) -> None:
    """Run the command.

    Args:
        args: what follows the word ``plan``.

    Raises:
        SystemExit: with status 2 and a message, for arguments that make no sense.
    """
    parser = _parser()
    options, model_args = parser.parse_known_args(args)
    try:
        _plan(options, model_args)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-sparse plan",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--bandwidth",
        help="of each worker's or node's link, such as 100mbit, 2.5gbit; measured inside a job if left out",
    )
    add("--latency", help="of a message one way, such as 100us, 1ms; measured with the bandwidth")
    add("--workers", type=int, help="processes that exchange gradients, at least 2; inside a job, those of the job")
    add("--ranks-per-node", type=int, default=1, help="that share the link of their node, 1 if left out")
    add("--node-bandwidth", default="100gbit", help="of each worker inside its node, 100gbit if left out")
    add("--node-latency", default="10us", help="of a message inside a node, 10us if left out")
    add("--densities", type=float, nargs="+", default=DENSITIES, help="fractions to try, 0.1 0.01 0.001 if left out")
    add("--json", metavar="FILE", help="write the predictions there; - for standard output, instead of the table")
    add("--picture", metavar="FILE", help="draw speed-up against workers and bandwidth there, such as plan.png")
    add("--save-profile", metavar="FILE", help="keep what was profiled, to plan again without the model")
    add("--profile", metavar="FILE", help="take a kept profile instead of a model")
    return parser


def _plan(options: argparse.Namespace, model_args: list[str]) -> None:
    if options.profile and model_args:
        raise ValueError(f"--profile {options.profile} stands for a model, so leave out {' '.join(model_args)}")
    if options.picture:
        figure_class()
    for density in options.densities:
        SettingsOf("topk", density).build()
    job = present_job()
    known = BackwardProfile.load(options.profile) if options.profile else BackwardProfile((), (), ())
    workers = known.for_workers(_workers(options, job)).workers
    assert workers is not None
    node = (
        parse_bandwidth(options.node_bandwidth, "node-bandwidth"),
        parse_latency(options.node_latency, "node-latency"),
    )
    network = Network(*_network(options, job, workers)[:3], options.ranks_per_node, *node).checked()
    if job is not None and job.global_rank() > 0:
        return  # the first one speaks for all
    profile = (known if options.profile else profile_model(model_args)).for_workers(workers)
    if options.save_profile:
        profile.save(options.save_profile)
    _predict(options, profile, network)


def _predict(options: argparse.Namespace, profile: BackwardProfile, network: Network) -> None:
    candidates = measure_candidates(profile, options.densities)
    rows = predict_systems(profile, network, candidates)
    text = json.dumps(as_json(profile, network, rows), indent=1)
    print(text if options.json == "-" else as_table(profile, network, rows))
    if options.json and options.json != "-":
        Path(options.json).write_text(text + "\n")
    if options.picture:
        draw(profile, network, candidates, options.picture)


def _workers(options: argparse.Namespace, job: Optional[ClusterEnvironment]) -> Optional[int]:
    if options.workers is not None or job is None:
        return options.workers  # type: ignore[no-any-return]  # argparse made it an int
    return job.world_size()


def _network(options: argparse.Namespace, job: Optional[ClusterEnvironment], workers: int) -> Network:
    """Return the network as given, or as measured."""
    if (options.bandwidth is None) != (options.latency is None):
        given, missing = ("bandwidth", "latency") if options.latency is None else ("latency", "bandwidth")
        raise ValueError(f"--{given} is given without --{missing}: give both or, inside a job, neither to measure them")
    if options.bandwidth is not None:
        return Network(parse_bandwidth(options.bandwidth), parse_latency(options.latency), workers).checked()
    if job is None:
        raise ValueError(
            "no --bandwidth and --latency are given, and this process belongs to no job whose network could be"
            " measured: give them, such as --bandwidth 1gbit --latency 100us, or start this with torchrun or srun"
        )
    if workers != job.world_size():
        raise ValueError(
            f"workers={workers}, but the network would be measured by the {job.world_size()} processes of this job:"
            " leave --workers out, or give --bandwidth and --latency, too"
        )
    return network_of(job)
