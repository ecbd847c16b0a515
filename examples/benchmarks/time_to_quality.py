"""How long until the model is as good as DDP's? Whole trainings between four hosts, over networks of several rates.

A GPT of 10.7 million parameters learns the characters of the Bible for 300 steps (``quality.py``, task ``large``). Each
way makes as many steps as it needs to end at DDP's loss or below, with the whole of its learning rate's schedule: the
table has the loss beside the time. Gradients, optimizers and messages are real; forward and backward wait until they
have taken as long as on an A100 (``paced.py``), and everything, the network included, is slower by a factor, so that a
processor can follow. Networks go by r: the seconds of DDP's exchange over those of a step without it.

A training that is in ``--output`` is not made again. One that takes too long can be stopped after some of its steps:
its time is then that of those steps, as a mean, times all. Root::

    sudo python examples/benchmarks/time_to_quality.py --networks "r = 3"
    sudo python examples/benchmarks/time_to_quality.py --networks "r = 10" --ways ddp --stop-after 40
    python examples/benchmarks/time_to_quality.py --picture time_to_quality.png     # of what is there
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
from shape import slower_delay, slower_rate

from lightning_sparse.schedule.network import dense_bytes

_FOLDER = Path(__file__).parent
_PATIENCE_SECONDS = 3 * 3600.0  # that a training may take
_TASK, _RANKS, _DELAY = "large", 4, "100us"
_NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})


def _rate_for(r: float) -> str:
    model = PACED["gpt_characters"]
    exchanged = dense_bytes(sum(map(math.prod, model.shapes())), _RANKS)
    return f"{round(8 * exchanged / (r * (model.forward_seconds + model.backward_seconds)) / 1e6)}mbit"


NETWORKS = {f"r = {r:g}": _rate_for(r) for r in (1, 3, 10)}


class Way(NamedTuple):
    """A way to train.

    Attributes:
        run: fields of its training in ``quality.py``.
        steps: times DDP's that it makes; fewer were not tried.
        arguments: of the strategy, beside those that follow from the run.
        is_ours: whether it is this package's.
    """

    run: Mapping[str, Any]
    steps: float = 1.0
    arguments: Mapping[str, Any] = _NO_ARGUMENTS
    is_ours: bool = True


_LAGS = {"system": "lags", "density": 0.01, "wire": "bfloat16"}
WAYS = {
    "ddp": Way({"system": "ddp"}, is_ours=False),
    "ddp + bf16 hook": Way({"system": "ddp + bf16 hook"}, is_ours=False),
    "ddp + PowerSGD rank 4": Way({"system": "ddp + PowerSGD rank 4"}, is_ours=False),
    "sparse_lags 0.01": Way(_LAGS),
    "sparse_lags 0.01 in 4 bits": Way({**_LAGS, "wire": "4bit"}),
    "sparse_auto 0.01": Way(_LAGS, arguments={"schedule": "auto"}),
    "5 local steps, a 20th sent": Way(
        {"system": "topk", "density": 0.05, "wire": "bfloat16", "local": "5:1:0:1:0"}, steps=1.5
    ),
}


def run_of(way: Way, options: argparse.Namespace) -> Run:
    """Return the training of a way."""
    fields = {"density": None, "wire": "float32", **way.run}
    rate, steps = TASKS[_TASK].rates["adamw95"], round(way.steps * options.steps)
    return Run(_TASK, "adamw95", seed=options.seed, rate=rate, steps=steps, ranks=_RANKS, **fields)


def train(network_name: str, name: str, options: argparse.Namespace) -> None:
    """Make one training over one network; write down time, loss, and the loss by step."""
    run, path = run_of(WAYS[name], options), _path(network_name, name, options)
    logs = path.parent / "logs" / path.stem
    logs.mkdir(parents=True, exist_ok=True)
    command = [str(_FOLDER / "whole_training.py"), "--run", json.dumps(run._asdict()), "--output", str(path)]
    command += ["--arguments", json.dumps(dict(WAYS[name].arguments)), "--slower", str(options.slower)]
    command += ["--stop-after", str(min(run.steps, options.stop_after or run.steps))]
    rate, delay = slower_rate(NETWORKS[network_name], options.slower), slower_delay(_DELAY, options.slower)
    with ShapedNetwork(run.ranks, rate, delay) as network:
        print(f"{network_name}, {name}, {run.steps} steps: {network.description}", flush=True)
        run_on_all_hosts(network, command, logs, time.monotonic() + _PATIENCE_SECONDS, show="whole training")


def _path(network: str, name: str, options: argparse.Namespace) -> Path:
    folder: Path = options.output / f"{network.replace(' ', '')}, {options.steps} steps, seed {options.seed}"
    return folder / f"{name}.json"


class Seen(NamedTuple):
    """What a training has shown.

    Attributes:
        steps: of the whole training.
        ran: how many of them were made.
        seconds: for the whole training, on an A100.
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
    yield f"| way | steps / ddp | {' | '.join(f'{name}: ms a step, loss, time / ddp' for name in options.networks)} |"
    yield f"| --- | ---: | {' | '.join('---:' for _ in options.networks)} |"
    for name in options.ways:
        cells = [_cell(network, name, options) for network in options.networks]
        yield f"| {name} | {WAYS[name].steps:g} | {' | '.join(cells)} |"


def _cell(network: str, name: str, options: argparse.Namespace) -> str:
    seen, ddp = seen_of(network, name, options), seen_of(network, "ddp", options)
    if seen is None:
        return ""
    end = f"{seen.ran} of {seen.steps} steps" if seen.loss is None else f"{seen.loss:.4f}"
    relative = "" if ddp is None else f", {seen.seconds / ddp.seconds:.2f}"
    return f"{1e3 * seen.seconds / seen.steps:.1f}, {end}{relative}"


def draw(options: argparse.Namespace) -> None:
    """Draw the loss against time, a panel for each network."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(options.networks), figsize=(4 * len(options.networks), 4), sharey=True)
    for panel, network in zip(axes, options.networks):
        for number, name in enumerate(options.ways):
            seen = seen_of(network, name, options)
            if seen is not None:
                steps, losses = zip(*_curve(name, seen, options))
                minutes = [seen.seconds * step / seen.steps / 60 for step in steps]
                panel.plot(minutes, losses, f"C{number}-" if WAYS[name].is_ours else f"C{number}--", label=name)
        panel.set(title=network, xlabel="minutes", xlim=(0, None))
    axes[0].set(ylabel="validation loss")
    axes[-1].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(options.picture, dpi=120)


def _curve(name: str, seen: Seen, options: argparse.Namespace) -> list[tuple[int, float]]:
    """Return loss by step, which no network changes: where a training was stopped, that over another one."""
    others = (seen_of(network, name, options) for network in NETWORKS)
    return max((each.curve for each in (seen, *others) if each is not None), key=len)


def main() -> None:
    """Make the trainings that are missing, and print the table of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=f"{list(WAYS)}")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), metavar="NETWORK")
    parser.add_argument("--steps", type=int, default=300, help="of DDP's training")
    parser.add_argument("--stop-after", type=int, metavar="STEPS", help="make so many of a training's steps")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--slower", type=int, default=32, help="factor of all times")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="make no training, draw loss against time")
    parser.add_argument("--output", type=Path, default=Path(".benchmarks/time_to_quality"))
    options = parser.parse_args()
    if options.picture is not None:
        draw(options)
        return
    for network, name in product(options.networks, options.ways):
        if not _path(network, name, options).exists():
            train(network, name, options)
    print("\n".join(table(options)))


if __name__ == "__main__":
    main()
