"""How long until the model is as good as DDP's? Whole trainings between four hosts, over networks of several rates.

Each way makes as many steps as it needs to end at DDP's loss or below, with the whole of its learning rate's schedule;
the table has the loss beside the time. Trainings are those of ``quality.py``, in processes, with Lightning:

* ``--task large``: a GPT of 10.7 million parameters, the characters of the Bible, 300 steps. Gradients, optimizers and
  messages are real; forward and backward wait until they have taken as long as on an A100 (``paced.py``), and
  everything, the network included, is 64 times as slow, so that processors can follow. Networks go by r: the seconds of
  DDP's exchange over those of a step without it.
* ``--task gpt``: one of 0.36 million, 800 steps that take as long as they take, over slow and far networks.

A training that is in ``--output`` is not made again. One that takes too long can be stopped after some of its steps:
those that are left then count as long as one of its last tenth, or as the mean where there was none. Root::

    sudo python examples/benchmarks/time_to_quality.py --networks "r = 3"
    sudo python examples/benchmarks/time_to_quality.py --networks "r = 10" --ways ddp --stop-after 40
    sudo python examples/benchmarks/time_to_quality.py --task gpt
"""

import argparse
import json
import math
import time
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Optional

from launch import run_on_all_hosts
from network import ShapedNetwork
from paced import PACED
from quality import TASKS, Run
from rows import BUCKETS_MB
from shape import slower_delay, slower_rate

from lightning_sparse.schedule.costs import dense_bytes

_FOLDER = Path(__file__).parent
_PATIENCE_SECONDS = 3 * 3600.0  # that a training may take
_RANKS = 4
_NOTHING: Mapping[str, Any] = MappingProxyType({})


def _rate_for(r: float, workload: str = "gpt_characters") -> str:
    model = PACED[workload]
    exchanged = dense_bytes(sum(map(math.prod, model.shapes())), _RANKS)
    return f"{round(8 * exchanged / (r * (model.forward_seconds + model.backward_seconds)) / 1e6)}mbit"


class Study(NamedTuple):
    """A task, and where it is trained.

    Attributes:
        steps: of DDP's training.
        networks: rate and one-way delay, by name.
        paced: whose times of forward and backward it takes; ``""`` for its own.
        slower: factor of all times.
    """

    steps: int
    networks: Mapping[str, tuple[str, str]]
    paced: str = ""
    slower: int = 1


STUDIES = {
    "large": Study(300, {f"r = {r:g}": (_rate_for(r), "100us") for r in (1, 3, 10, 30)}, "gpt_characters", 64),
    "gpt": Study(800, {"100 Mbit/s, 10 ms": ("100mbit", "10ms"), "20 Mbit/s, 50 ms": ("20mbit", "50ms")}),
}


class Way(NamedTuple):
    """A way to train.

    Attributes:
        run: fields of its training in ``quality.py``.
        steps: times DDP's that it makes, where that is not 1, by task; fewer do not reach DDP's loss or were not tried.
        arguments: of the strategy, beside those that follow from the run.
        is_ours: whether it is this package's.
        reaches: whether its training ends at DDP's loss, by ``quality.py``.
    """

    run: Mapping[str, Any]
    steps: Mapping[str, float] = _NOTHING
    arguments: Mapping[str, Any] = _NOTHING
    is_ours: bool = True
    reaches: bool = True


_LAGS = {"system": "lags", "density": 0.01, "wire": "bfloat16"}
_LOCAL = {"system": "topk", "density": 0.05, "wire": "bfloat16", "local": "5:1:0:1:0"}
WAYS = {
    "ddp": Way({"system": "ddp"}, is_ours=False),
    **{
        row: Way({"system": row}, is_ours=False)
        for size in BUCKETS_MB
        for row in (f"ddp, {size} MB", f"ddp + bf16 hook, {size} MB")
    },
    "ddp + bf16 hook": Way({"system": "ddp + bf16 hook"}, is_ours=False),
    "ddp + PowerSGD rank 4": Way({"system": "ddp + PowerSGD rank 4"}, is_ours=False, reaches=False),
    "sparse_lags": Way({**_LAGS, "wire": "float32"}),
    "sparse_lags in 4 bits": Way({**_LAGS, "wire": "4bit"}, {"gpt": 1.1}),
    "sparse_auto": Way(_LAGS, {"gpt": 1.1}, {"schedule": "auto"}),
    "5 local steps, a 20th sent": Way(_LOCAL, {"large": 1.5, "gpt": 1.5}),
}


def steps_of(name: str, options: argparse.Namespace) -> float:
    """Return the steps that a way makes, relative to DDP's."""
    return WAYS[name].steps.get(options.task, 1.0)


def train(network_name: str, name: str, options: argparse.Namespace) -> None:
    """Make one training over one network; write down time, loss, and the loss by step."""
    study, fields = STUDIES[options.task], {"density": None, "wire": "float32", **WAYS[name].run}
    rate, steps = TASKS[options.task].rates["adamw95"], round(steps_of(name, options) * options.steps)
    run = Run(options.task, "adamw95", seed=options.seed, rate=rate, steps=steps, ranks=_RANKS, **fields)
    path = _path(network_name, name, options)
    logs = path.parent / "logs" / path.stem
    logs.mkdir(parents=True, exist_ok=True)
    command = [str(_FOLDER / "whole_training.py"), "--run", json.dumps(run._asdict()), "--output", str(path)]
    command += ["--arguments", json.dumps(dict(WAYS[name].arguments)), "--paced", study.paced]
    command += ["--slower", str(study.slower), "--stop-after", str(min(steps, options.stop_after or steps))]
    bandwidth, delay = study.networks[network_name]
    shape = slower_rate(bandwidth, study.slower), slower_delay(delay, study.slower)
    with ShapedNetwork(_RANKS, *shape) as network:
        print(f"{network_name}, {name}, {steps} steps: {network.description}", flush=True)
        run_on_all_hosts(network, command, logs, time.monotonic() + _PATIENCE_SECONDS, show="whole training")


def _path(network: str, name: str, options: argparse.Namespace) -> Path:
    where = network.replace("/", "").replace(" ", "")
    folder: Path = options.output / f"{where}, {options.steps} steps, seed {options.seed}"
    return folder / f"{name}.json"


class Seen(NamedTuple):
    """What a training has shown.

    Attributes:
        steps: of the whole training.
        ran: how many of them were made.
        seconds: of the whole training, as if it had not been slower.
        curve: validation loss by step.
    """

    steps: int
    ran: int
    seconds: float
    curve: list[tuple[int, float]]

    @property
    def loss(self) -> Optional[float]:
        """At the end, where that was reached."""
        return self.curve[-1][1] if self.ran == self.steps else None


def seen_of(network: str, name: str, options: argparse.Namespace) -> Optional[Seen]:
    """Return what is known of a training; ``None`` where it was not made."""
    path = _path(network, name, options)
    return Seen(**json.loads(path.read_text())) if path.exists() else None


def table(options: argparse.Namespace) -> Iterator[str]:
    """Yield a Markdown table of steps, milliseconds, loss, and times relative to DDP's."""
    heads = " | ".join(f"{name}: ms a step, loss, time / ddp, time / best without us" for name in options.networks)
    yield f"| way | steps / ddp | {heads} |"
    yield f"| --- | ---: | {' | '.join('---:' for _ in options.networks)} |"
    for name in options.ways:
        cells = [_cell(network, name, options) for network in options.networks]
        yield f"| {name} | {steps_of(name, options):g} | {' | '.join(cells)} |"


def _cell(network: str, name: str, options: argparse.Namespace) -> str:
    seen, ddp = seen_of(network, name, options), seen_of(network, "ddp", options)
    if seen is None:
        return ""
    end = f"{seen.ran} of {seen.steps} steps" if seen.loss is None else f"{seen.loss:.4f}"
    relative = "" if ddp is None else f", {seen.seconds / ddp.seconds:.2f}"
    best = best_without_us(network, options)
    return f"{1e3 * seen.seconds / seen.steps:.1f}, {end}{relative}, {seen.seconds / best if best else math.nan:.2f}"


def best_without_us(network: str, options: argparse.Namespace) -> Optional[float]:
    """Return the seconds of the fastest training without this package that reaches DDP's loss, over a network."""
    others = (seen_of(network, name, options) for name, way in WAYS.items() if not way.is_ours and way.reaches)
    return min((seen.seconds for seen in others if seen is not None), default=None)


def main() -> None:
    """Make the trainings that are missing, and print the table of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    networks = [name for study in STUDIES.values() for name in study.networks]
    parser.add_argument("--task", choices=STUDIES, default="large")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=f"{list(WAYS)}")
    parser.add_argument("--networks", nargs="+", choices=networks, metavar="NETWORK", help="else all of the task")
    parser.add_argument("--steps", type=int, help="of DDP's training; without it, the task's")
    parser.add_argument("--stop-after", type=int, metavar="STEPS", help="make so many of a training's steps")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="make no training, print the table")
    parser.add_argument("--output", type=Path, default=Path(".benchmarks/time_to_quality"))
    options = parser.parse_args()
    study = STUDIES[options.task]
    options.networks = options.networks or list(study.networks)
    options.steps = options.steps or study.steps
    if not study.networks.keys() >= set(options.networks):
        parser.error(f"--networks of --task {options.task}: {', '.join(study.networks)}")
    for network, name in [] if options.table else product(options.networks, options.ways):
        if not _path(network, name, options).exists():
            train(network, name, options)
    print("\n".join(table(options)))


if __name__ == "__main__":
    main()
