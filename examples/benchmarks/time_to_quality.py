"""How long until the model is as good? The time to DDP's final loss, by way to train and by network.

Two measurements, and their product:

1. How many steps each way needs to end at the loss at which DDP ends, with ``quality.py``: trainings of 1, 1.1, 1.25,
   1.5, 2 and 3 times DDP's steps, each with the whole of its learning rate's schedule, until one gets there.
2. How long a step takes, with ``step.py``, over each network. First steps that are synchronous take as long as DDP's.

A product can be held against one real training over that network, to its end (``--whole``).

The ways that exist without this package are taken to need as many steps as DDP where they were not tried, which is in
their favour. Steps that send more than those that are timed, the first and those that learn second moments, are counted
by their bytes at the network's rate.

``--task large`` is a GPT of 10.7 million parameters, whose steps wait as long as an A100 computes; networks go by r,
the seconds of DDP's exchange over those of a step without it.

Everything is written to ``--output``, and what is there already is not measured again::

    python examples/benchmarks/time_to_quality.py --quality          # hours of two cores
    sudo python examples/benchmarks/time_to_quality.py --steps       # root: network namespaces; half an hour
    sudo python examples/benchmarks/time_to_quality.py --whole --seeds 1 --networks "100 Mbit/s, 10 ms"
    python examples/benchmarks/time_to_quality.py --picture time_to_quality.png
"""

import argparse
import csv
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Optional

from launch import run_on_all_hosts
from network import ShapedNetwork
from paced import PACED
from quality import TASKS, Run, known_runs, train_all
from rows import AVERAGED_EVERY, NO_COMMUNICATION
from shape import parse_rate

from lightning_sparse.schedule.network import dense_bytes

_FOLDER = Path(__file__).parent
_WHOLE_SECONDS = 3600.0  # that a whole training may take
_BUDGETS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0)  # times DDP's steps
NETWORKS = {
    "10 Gbit/s": ("10gbit", "0"),
    "1 Gbit/s, 100 us": ("1gbit", "100us"),
    "100 Mbit/s, 10 ms": ("100mbit", "10ms"),
    "20 Mbit/s, 50 ms": ("20mbit", "50ms"),
}


class Study(NamedTuple):
    """A task, and where its steps are timed.

    Attributes:
        workload: of the step benchmark.
        slower: factor of its times, and of the networks'.
        ddp_steps: steps of DDP's training.
        networks: rate and one-way delay, by name.
    """

    workload: str
    slower: int
    ddp_steps: int
    networks: dict[str, tuple[str, str]]


def _rate_for(r: float, workload: str = "gpt_characters", ranks: int = 4) -> str:
    model = PACED[workload]
    exchanged = dense_bytes(sum(map(math.prod, model.shapes())), ranks)
    return f"{round(8 * exchanged / (r * (model.forward_seconds + model.backward_seconds)) / 1e6)}mbit"


STUDIES = {
    "gpt": Study("gpt", 1, 800, NETWORKS),
    "large": Study("gpt_characters", 32, 300, {f"r = {r:g}": (_rate_for(r), "100us") for r in (0.3, 1, 3, 10, 30)}),
}


class Way(NamedTuple):
    """A way to train.

    Attributes:
        row: in the step benchmark; without it, the time follows from those of DDP and of no communication.
        quality: fields of its runs in the quality benchmark; ``None`` where it is taken to need as many steps as DDP.
        is_ours: whether it is this package's.
    """

    row: Optional[str]
    quality: Optional[dict[str, Any]]
    is_ours: bool = False


WAYS = {
    "ddp": Way("ddp, AdamW", {"system": "ddp"}),
    "ddp + bf16 hook": Way("ddp + bf16 hook, AdamW", None),
    "ddp + PowerSGD rank 4": Way("ddp + PowerSGD rank 4, AdamW", {"system": "powersgd4"}),
    "ddp + PowerSGD rank 1": Way("ddp + PowerSGD rank 1, AdamW", {"system": "powersgd1"}),
    "post-local SGD": Way(None, {"system": "ddp", "local": str(AVERAGED_EVERY)}),
    "sparse_lags 0.01": Way("sparse_lags 0.01, AdamW", {"system": "lags", "density": 0.01}, True),
    "sparse_lags 0.01 in 4 bits": Way(
        "sparse_lags 0.01 4bit, AdamW",
        {"system": "lags", "density": 0.01, "wire": "4bit", "exchange": "auto"},
        True,
    ),
    "sparse_lags 0.001": Way("sparse_lags 0.001, AdamW", {"system": "lags", "density": 0.001}, True),
    "5 local steps, a 20th sent": Way(
        "5 local steps, topk 0.05, AdamW", {"system": "topk", "density": 0.05, "local": "5:1:0:1:0"}, True
    ),
    "20 local steps after 100 synchronous": Way(
        "sparse_diloco, AdamW", {"system": "dense", "local": "20:1:0.2:1:100"}, True
    ),
    "sparse_loco": Way(
        "sparse_loco, AdamW", {"system": "topk", "density": 1 / 64, "wire": "2bit", "local": "30:1:0:0.95:100"}, True
    ),
}


def run_of(task: str, way: Way, steps: int, seed: int) -> Run:
    """Return the training of a way, for so many steps."""
    assert way.quality is not None
    fields = {"density": None, "wire": "bfloat16" if "density" in way.quality else "float32"}
    rate = TASKS[task].rates["adamw95"]
    return Run(task, "adamw95", seed=seed, rate=rate, steps=steps, ranks=4, **{**fields, **way.quality})


def search(options: argparse.Namespace) -> None:
    """Train each way with ever more steps, until it ends where DDP does."""
    for name in options.ways:
        for budget in options.budgets:
            way, steps = WAYS[name], round(budget * options.ddp_steps)
            if way.quality is None or (name == "ddp" and budget > 1):
                break
            known = known_runs(options.output / "quality.jsonl")
            asked = [run_of(options.task, way, steps, seed) for seed in options.seeds]
            train_all([run for run in asked if run not in known], options.jobs, options.output / "quality.jsonl")
            if budgets_of(name, options) is not None:
                break


def budgets_of(name: str, options: argparse.Namespace) -> Optional[tuple[float, list[list[float]]]]:
    """Return how many times DDP's steps a way needs to end where DDP does, and bytes and loss by step."""
    known = known_runs(options.output / "quality.jsonl")
    target = _scores(known, WAYS["ddp"], options.ddp_steps, options)
    if target is None:
        return None
    way = WAYS[name] if WAYS[name].quality is not None else WAYS["ddp"]
    for budget in options.budgets:
        steps = round(budget * options.ddp_steps)
        scores = _scores(known, way, steps, options)
        if scores is not None and fmean(scores) <= fmean(target):
            curves = [known[run_of(options.task, way, steps, seed)]["curve"] for seed in options.seeds]
            return budget, [[fmean(numbers) for numbers in zip(*points)] for points in zip(*curves)]
    return None


def _scores(
    known: dict[Run, dict[str, Any]], way: Way, steps: int, options: argparse.Namespace
) -> Optional[list[float]]:
    runs = [run_of(options.task, way, steps, seed) for seed in options.seeds]
    return [known[run]["score"] for run in runs] if all(run in known for run in runs) else None


def measure_steps(options: argparse.Namespace) -> None:
    """Time the steps of each way over each network."""
    rows = [way.row for name, way in WAYS.items() if way.row is not None and name in options.ways]
    for name in options.networks:
        folder = _folder(name, options)
        if (folder / "step.csv").exists():
            continue
        study = STUDIES[options.task]
        rate, delay = study.networks[name]
        command = [sys.executable, str(_FOLDER / "step.py"), "--workloads", study.workload, "--rate", rate]
        command += ["--delay", delay, "--slower", str(study.slower)]
        command += ["--output", str(folder), "--rounds", str(options.rounds), "--steps", "4", "--warm-up", "2"]
        subprocess.run([*command, "--rows", f"{NO_COMMUNICATION}, AdamW", *rows], check=True)


def train_whole(options: argparse.Namespace) -> None:
    """Make one real training of each way over each network, of as many steps as it needs; write down time and loss."""
    for network_name, name in product(options.networks, options.ways):
        found, path = budgets_of(name, options), _whole_path(network_name, name, options)
        if found is None or WAYS[name].quality is None or path.exists():
            continue
        run = run_of(options.task, WAYS[name], round(found[0] * options.ddp_steps), options.seeds[0])
        logs = path.parent / "logs" / path.stem
        logs.mkdir(parents=True, exist_ok=True)
        command = [str(_FOLDER / "whole_training.py"), "--run", json.dumps(run._asdict()), "--output", str(path)]
        rate, delay = STUDIES[options.task].networks[network_name]
        with ShapedNetwork(run.ranks, rate, delay) as network:
            print(f"{name}, {run.steps} steps: {network.description}", flush=True)
            run_on_all_hosts(network, command, logs, time.monotonic() + _WHOLE_SECONDS, show="whole training")


def _whole_path(network: str, name: str, options: argparse.Namespace) -> Path:
    return _folder(network, options) / f"whole {name}.json"


def _folder(network: str, options: argparse.Namespace) -> Path:
    folder: Path = options.output / network.replace("/", "").replace(" ", "_")
    return folder


def _lines(network: str, options: argparse.Namespace) -> dict[str, dict[str, str]]:
    """Return what ``step.py`` has written of its rows."""
    path = _folder(network, options) / "step.csv"
    if not path.exists():
        return {}
    lines = csv.DictReader(line for line in path.read_text().splitlines() if not line.startswith("#"))
    return {line["row"]: line for line in lines}


def step_seconds(network: str, options: argparse.Namespace) -> dict[str, float]:
    """Return the median seconds of a step, or of a step as a mean over a round, by way."""
    by_row = {row: float(line["median_ms"]) / 1e3 for row, line in _lines(network, options).items()}
    if not by_row:
        return {}
    alone, ddp = by_row[f"{NO_COMMUNICATION}, AdamW"], by_row["ddp, AdamW"]
    averaged = alone + (ddp - alone) / AVERAGED_EVERY  # parameters are as many bytes as gradients
    seconds = {name: averaged if way.row is None else by_row.get(way.row) for name, way in WAYS.items()}
    return {name: each for name, each in seconds.items() if each is not None}


def mean_seconds(network: str, options: argparse.Namespace) -> dict[str, float]:
    """Return the mean seconds of a step where a training was made whole, with all that it does now and then."""
    seconds = step_seconds(network, options)
    for name in seconds:
        path, found = _whole_path(network, name, options), budgets_of(name, options)
        if path.exists() and found is not None:
            steps = found[0] * options.ddp_steps
            synchronous = _synchronous_steps(options.task, name, steps)
            whole = json.loads(path.read_text())["seconds"]
            seconds[name] = (whole - synchronous * seconds["ddp"]) / (steps - synchronous)
    return seconds


def _synchronous_steps(task: str, name: str, steps: float) -> float:
    way = WAYS[name]
    return 0.0 if way.quality is None else min(steps, run_of(task, way, round(steps), 1).local_numbers()[-1])


def elapsed(task: str, name: str, steps: float, seconds: Mapping[str, float]) -> float:
    """Return the seconds of so many steps of a way, the first of which may be DDP's."""
    synchronous = _synchronous_steps(task, name, steps)
    return synchronous * seconds["ddp"] + (steps - synchronous) * seconds[name]


def more_seconds(name: str, steps: float, sent: float, network: str, options: argparse.Namespace) -> float:
    """Return how long the network takes for what was sent in so many steps beyond as many of the median one."""
    way = WAYS[name]
    if way.quality is None or way.row is None or _synchronous_steps(options.task, name, steps):
        return 0.0
    timed = 1e6 * float(_lines(network, options)[way.row]["sent_mb"])
    return 8 * max(0.0, sent - steps * timed) / parse_rate(STUDIES[options.task].networks[network][0])


def table(options: argparse.Namespace) -> Iterator[str]:
    """Yield a Markdown table of steps, seconds and their products relative to DDP's."""
    networks = [name for name in STUDIES[options.task].networks if step_seconds(name, options)]
    yield f"| way | steps / ddp | {' | '.join(f'{name}: step, time / ddp' for name in networks)} |"
    yield f"| --- | ---: | {' | '.join('---:' for _ in networks)} |"
    for name in options.ways:
        found = budgets_of(name, options)
        cells = []
        for network in networks:
            seconds = step_seconds(network, options)
            steps = options.ddp_steps
            relative = "not reached"
            if name not in seconds:
                cells.append("")
                continue
            if found is not None:
                last, sent, _ = found[1][-1]
                ours = elapsed(options.task, name, found[0] * steps, seconds)
                ours += more_seconds(name, last, sent, network, options)
                relative = f"{ours / elapsed(options.task, 'ddp', steps, seconds):.2f}"
            cells.append(f"{1e3 * seconds[name]:.0f} ms, {relative}{_confirmation(network, name, options)}")
        assumed = " (assumed)" if WAYS[name].quality is None else ""
        budget = "not reached" if found is None else f"{found[0]:g}{assumed}"
        yield f"| {name} | {budget} | {' | '.join(cells)} |"


def _confirmation(network: str, name: str, options: argparse.Namespace) -> str:
    paths = [_whole_path(network, each, options) for each in (name, "ddp")]
    if name == "ddp" or not all(path.exists() for path in paths):
        return ""
    ours, ddp = (json.loads(path.read_text()) for path in paths)
    return f" (trained whole: {ours['seconds'] / ddp['seconds']:.2f}, loss {ours['score']:.4f} / {ddp['score']:.4f})"


def draw(options: argparse.Namespace) -> None:
    """Draw the loss against seconds, a panel for each network."""
    import matplotlib.pyplot as plt

    networks = [name for name in STUDIES[options.task].networks if step_seconds(name, options)]
    figure, axes = plt.subplots(1, len(networks), figsize=(4 * len(networks), 4), sharey=True, squeeze=False)
    for panel, network in zip(axes[0], networks):
        seconds = mean_seconds(network, options)
        for number, name in enumerate(options.ways):
            way, found = WAYS[name], budgets_of(name, options)
            if found is not None and name in seconds and (way.quality is not None or name == "ddp + bf16 hook"):
                steps, sent, losses = zip(*found[1])
                ends = [elapsed(options.task, name, step, seconds) for step in steps]
                if not _whole_path(network, name, options).exists():  # whose mean has all of its steps
                    ends = [
                        end + more_seconds(name, step, nbytes, network, options)
                        for end, step, nbytes in zip(ends, steps, sent)
                    ]
                panel.plot(
                    [end / 60 for end in ends],
                    losses,
                    f"C{number}-" if way.is_ours else f"C{number}--",
                    label=name,
                )
        target = budgets_of("ddp", options)
        if target is not None:
            panel.axhline(target[1][-1][2], color="gray", linewidth=0.8, label="ddp at its end")
        panel.set(title=network, xlabel="minutes", xlim=(0, None))
    axes[0][0].set(ylabel="validation loss")
    axes[0][-1].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(options.picture, dpi=120)


def main() -> None:
    """Measure what is asked for; print the table of what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quality", action="store_true", help="train until DDP's loss is reached")
    parser.add_argument("--steps", action="store_true", help="time steps over the networks; root")
    parser.add_argument("--whole", action="store_true", help="train to the end over the networks; root")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw loss against seconds")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=f"{list(WAYS)}")
    networks = [name for study in STUDIES.values() for name in study.networks]
    parser.add_argument("--task", choices=STUDIES, default="gpt")
    parser.add_argument(
        "--networks", nargs="+", choices=networks, metavar="NETWORK", help="without it, all of the task"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--ddp-steps", type=int, help="steps of DDP's trainings; without it, the task's")
    parser.add_argument("--budgets", nargs="+", type=float, default=_BUDGETS, help="times DDP's steps, in this order")
    parser.add_argument("--rounds", type=int, default=2, help="times that each way is timed")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at once")
    parser.add_argument("--output", type=Path, default=Path(".benchmarks/time_to_quality"))
    options = parser.parse_args()
    study = STUDIES[options.task]
    options.networks = options.networks or list(study.networks)
    options.ddp_steps = options.ddp_steps or study.ddp_steps
    if not study.networks.keys() >= set(options.networks):
        parser.error(f"--networks of --task {options.task}: {', '.join(study.networks)}")
    if options.whole and study.slower != 1:
        parser.error("--whole trains for real, and --task large only waits: leave --whole out")
    options.output.mkdir(parents=True, exist_ok=True)
    if options.quality:
        search(options)
    if options.steps:
        measure_steps(options)
    if options.whole:
        train_whole(options)
    if options.picture is not None:
        draw(options)
    print("\n".join(table(options)))


if __name__ == "__main__":
    main()
