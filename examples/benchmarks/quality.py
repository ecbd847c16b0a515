"""How good is the model at the end? Every system, with the optimizers that people have, beside DDP, over several seeds.

All ranks are threads of one process, which run the package's own pipeline (``virtual.py``): time does not count here.
The learning rate is the one that is best for DDP, and is not tuned again for anything else. Each run is a line of
``--results``; runs that are there already are not made again, so that a grid can be interrupted and resumed::

    python examples/benchmarks/quality.py --tasks gpt --optimizers adamw95 --systems ddp lags --densities 0.01
    python examples/benchmarks/quality.py --tune --tasks gpt --optimizers adamw95      # DDP at several rates
    python examples/benchmarks/quality.py --table                                      # of what is there
    python examples/benchmarks/quality.py --picture quality.png --tasks gpt

A run of the GPT takes five minutes of one core, of the large one seven; ``--jobs`` runs several at once, each on one.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from virtual import POST_LOCAL_START, VirtualRanks

from lightning_sparse.engine.settings import AUTO, LocalSteps, Settings
from lightning_sparse.schedule.costs import dense_bytes

sys.path.insert(0, str(Path(__file__).parent.parent))
from gpt import GPT, GPTSize, encoded, random_windows, warmed_up_cosine, window_loss
from image_data import digits
from muon import MuonAdamW, embeddings_and_head
from text_data import NOT_A_TARGET, Vocabulary, cut_columns, load_text, rank_share, tokenize
from train_image import ImageClassifier
from train_text import LstmState, WordLstm

_CURVE_POINTS = 10
_STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571}  # 97.5 % quantiles, by number of seeds
SYSTEMS = ("topk", "lags", "omgs", "exdyna", "micro", "sdagc", "dgc")
OWN_EXCHANGE = ("dense", "exdyna", "micro")  # systems that exchange in a way of their own, whatever --exchanges says
POWER_SGD = "powersgd"  # before its rank: torch's hook for DDP
UNCORRECTED = "uncorrected "  # before the name of a system: Adam is fed with what arrives


class Task(NamedTuple):
    """Something to learn.

    Attributes:
        score: what is measured at the end, in words.
        rates: the best learning rate for DDP, by optimizer.
        steps: optimizer steps of a run.
        epoch_steps: steps of an epoch.
        clip_norm: largest norm of the mean gradient; ``None`` not to clip.
        schedule: learning rate of a step over the largest, given the step and the number of steps.
        momentum: of SGD.
        build: given seed and ranks, returns a way to build the network, one to compute a rank's loss of a step, and one
            to score a network.
    """

    score: str
    rates: dict[str, float]
    steps: int
    epoch_steps: int
    clip_norm: Optional[float]
    schedule: Callable[[int, int], float]
    momentum: float
    build: Callable[[int, int], "Learnable"]


class Learnable(NamedTuple):
    """A task with its data, for one seed and number of ranks.

    Attributes:
        network: builds the network, always the same.
        loss: given rank, step and network, computes the loss of a batch.
        score: given the network, computes the score of the task.
    """

    network: Callable[[], nn.Module]
    loss: Callable[[int, int, nn.Module], Tensor]
    score: Callable[[nn.Module], float]


def gpt(seed: int, ranks: int) -> Learnable:
    """The characters of Python's help pages: 8 windows of 64 for each rank."""
    return _characters(load_text(None), GPTSize(), 8, 8, seed, ranks)


def large(seed: int, ranks: int) -> Learnable:
    """The 4.4 million characters of the Bible, a GPT of 10.7 million parameters: 2 windows of 64 for each rank."""
    bible = ["bible", "-f", "gen1:1-rev22:21"]  # Debian's bible-kjv
    whole = subprocess.run(bible, check=True, capture_output=True, text=True).stdout
    return _characters(whole, GPTSize(width=384, blocks=6, heads=6), 2, 2, seed, ranks)


def _characters(whole: str, size: GPTSize, windows: int, scored_batches: int, seed: int, ranks: int) -> Learnable:
    text = encoded(whole)
    generators = [torch.Generator().manual_seed(1000 * seed + rank) for rank in range(ranks)]

    def network() -> nn.Module:
        torch.manual_seed(seed)
        return GPT(text.different, size)

    def loss(rank: int, step: int, trained: nn.Module) -> Tensor:
        return window_loss(trained, random_windows(text.train, windows, size.length, generators[rank]))

    def score(trained: nn.Module) -> float:
        generator = torch.Generator().manual_seed(7)
        batches = (random_windows(text.validation, 64, size.length, generator) for _ in range(scored_batches))
        return fmean(window_loss(trained, batch).item() for batch in batches)

    return Learnable(network, loss, score)


def images(seed: int, ranks: int) -> Learnable:
    """Scikit-learn's digits, two convolutions: 16 of them for each of two ranks, 8 for each of four."""
    split = digits()
    pictures, labels = split.train.tensors
    test_pictures, test_labels = split.test.tensors
    share = 32 // ranks
    orders = torch.Generator().manual_seed(seed)
    order = torch.cat([torch.randperm(len(labels), generator=orders) for _ in range(400)])

    def network() -> nn.Module:
        torch.manual_seed(seed)
        return ImageClassifier(0.0).network

    def loss(rank: int, step: int, trained: nn.Module) -> Tensor:
        first = (step * ranks + rank) * share
        chosen = order[first : first + share]
        return functional.cross_entropy(trained(pictures[chosen]), labels[chosen])

    def score(trained: nn.Module) -> float:
        return 100 * float((trained(test_pictures).argmax(dim=1) == test_labels).float().mean())

    return Learnable(network, loss, score)


def text(seed: int, ranks: int) -> Learnable:
    """The words of Python's help pages, an LSTM: 20 columns, or a few more, shared out evenly between the ranks."""
    words = tokenize(load_text(None))
    border = int(0.9 * len(words))
    vocabulary = Vocabulary(words[:border], 10_000)
    columns = cut_columns(vocabulary.encode(words[:border]), 20 + -20 % ranks, is_complete=False)
    validation = cut_columns(vocabulary.encode(words[border:]), 10, is_complete=True)
    shares = [rank_share(columns, rank, ranks) for rank in range(ranks)]
    windows = [list(zip(share.inputs.split(35, dim=1), share.targets.split(35, dim=1))) for share in shares]
    states: dict[int, Optional[LstmState]] = {}

    def network() -> nn.Module:
        torch.manual_seed(seed)
        return WordLstm(len(vocabulary), 100, True, 0.0)

    def loss(rank: int, step: int, trained: nn.Module) -> Tensor:
        place = step % len(windows[rank])
        inputs, targets = windows[rank][place]
        logits, (hidden, cell) = trained(inputs, states.get(rank) if place else None)
        states[rank] = hidden.detach(), cell.detach()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def score(trained: nn.Module) -> float:
        state: Optional[LstmState] = None
        total, count = 0.0, 0
        for inputs, targets in zip(validation.inputs.split(35, dim=1), validation.targets.split(35, dim=1)):
            logits, state = trained(inputs, state)
            wanted = targets.flatten()
            total += functional.cross_entropy(
                logits.flatten(0, 1), wanted, ignore_index=NOT_A_TARGET, reduction="sum"
            ).item()
            count += int((wanted != NOT_A_TARGET).sum())
        return math.exp(total / count)

    return Learnable(network, loss, score)


def _constant_then_tenth(step: int, steps: int) -> float:
    return 1.0 if step < 0.75 * steps else 0.1


TASKS = {
    "gpt": Task(
        "validation loss",
        {"adamw95": 16e-3, "adamw999": 16e-3, "sgd": 0.5, "muon": 32e-3},
        2000,
        100,
        1.0,
        warmed_up_cosine,
        0.9,
        gpt,
    ),
    "large": Task("validation loss", {"adamw95": 2e-3}, 300, 100, 1.0, warmed_up_cosine, 0.9, large),
    "images": Task(
        "accuracy, %",
        {"adamw95": 2e-3, "adamw999": 2e-3, "sgd": 0.01},
        420,
        42,
        None,
        lambda step, steps: 1.0,
        0.9,
        images,
    ),
    "text": Task(
        "perplexity",
        {"adamw95": 4e-3, "adamw999": 4e-3, "sgd": 20.0},
        1680,
        84,
        0.25,
        _constant_then_tenth,
        0.0,
        text,
    ),
}
OPTIMIZERS: dict[str, Callable[[nn.Module, float, Task], Optimizer]] = {
    "sgd": lambda network, rate, task: torch.optim.SGD(network.parameters(), rate, momentum=task.momentum),
    "adamw95": lambda network, rate, task: torch.optim.AdamW(network.parameters(), rate, (0.9, 0.95), weight_decay=0.1),
    "adamw999": lambda network, rate, task: torch.optim.AdamW(
        network.parameters(), rate, (0.9, 0.999), weight_decay=0.1
    ),
    "muon": lambda network, rate, task: MuonAdamW(network.parameters(), rate, elementwise=embeddings_and_head(network)),
}


class Run(NamedTuple):
    """One training, as it is asked for and as it is named in the results."""

    task: str
    optimizer: str
    system: str
    density: Optional[float]
    seed: int
    rate: float
    steps: int
    ranks: int
    wire: str
    exchange: str = "gather"
    local: str = ""

    def local_numbers(self) -> list[float]:
        """Return steps of a round, outer rate, outer momentum, decay, and with DDP the steps before averages.

        What is not given is what changes nothing; with DDP, the steps before averages that torch's documentation has.
        """
        given = [float(number) for number in self.local.split(":") if number]
        return [*given, *(1.0, 1.0, 0.0, 1.0, POST_LOCAL_START)[len(given) :]]

    def rounds(self) -> LocalSteps:
        """Return the local steps of a system of this package."""
        steps, rate, momentum, decay, _ = self.local_numbers()
        return LocalSteps(int(steps), rate, momentum, momentum > 0, decay)

    @property
    def power_rank(self) -> Optional[int]:
        """That of PowerSGD, which DDP exchanges gradients by; ``None`` for all else."""
        return int(self.system.removeprefix(POWER_SGD)) if self.system.startswith(POWER_SGD) else None

    def settings(self) -> Optional[Settings]:
        """Build what the user chose, anew; ``None`` for DDP."""
        if self.system == "ddp" or self.power_rank is not None:
            return None
        name = self.system.removeprefix(UNCORRECTED)
        correction: Any = None if name != self.system else AUTO
        # With SGD the density falls over the first epochs, as the examples have it; Adam's correction has its own fall.
        warmup = 4 * TASKS[self.task].epoch_steps if self.optimizer == "sgd" else 0
        exchange = AUTO if name in OWN_EXCHANGE else self.exchange
        rounds: Union[int, LocalSteps] = 1
        if self.local:
            rounds, warmup = self.rounds(), 0
        return Settings.of(
            name,
            self.density,
            schedule="single",
            wire=self.wire,
            warmup_steps=warmup,
            optimizer_correction=correction,
            exchange=exchange,
            local_steps=rounds,
        )


def train(run: Run) -> dict[str, Any]:
    """Train, and return how it went."""
    torch.set_num_threads(1)
    task = TASKS[run.task]
    learnable = task.build(run.seed, run.ranks)
    build_optimizer = OPTIMIZERS[run.optimizer]
    every, *_, after = run.local_numbers()
    ranks = VirtualRanks(
        run.ranks,
        learnable.network,
        lambda network: build_optimizer(network, run.rate, task),
        run.settings,
        run.steps,
        task.clip_norm,
        int(every) if run.system == "ddp" and run.local else None,
        int(after),
        run.power_rank,
    )
    start = time.perf_counter()
    curve = []
    for step in range(run.steps):
        for member in ranks.ranks:
            for group in member.optimizer.param_groups:
                group["lr"] = run.rate * task.schedule(step, run.steps)
        losses = [partial(learnable.loss, rank, step) for rank in range(run.ranks)]
        ranks.step(losses)
        if (step + 1) % max(1, run.steps // _CURVE_POINTS) == 0 or step + 1 == run.steps:
            with ranks.ranks[0].shared_model() as network:
                curve.append([step + 1, ranks.wire_bytes, scored(learnable, network)])
    ranks.close()
    elements = sum(parameter.numel() for parameter in ranks.ranks[0].network.parameters())
    seconds = round(time.perf_counter() - start)
    return {
        **run._asdict(),
        "score": curve[-1][2],
        "bytes": ranks.wire_bytes / (dense_bytes(elements, run.ranks) * run.steps),
        "curve": curve,
        "seconds": seconds,
    }


@torch.no_grad()
def scored(learnable: Learnable, network: nn.Module) -> float:
    """Return the score of a network that is being trained."""
    network.eval()
    score = learnable.score(network)
    network.train()
    return score


def runs(options: argparse.Namespace) -> Iterator[Run]:
    """Yield the runs that are asked for."""
    for task, optimizer, system in product(
        options.tasks, options.optimizers, ["ddp"] if options.tune else options.systems
    ):
        steps = options.steps or TASKS[task].steps
        best = options.rate or TASKS[task].rates[optimizer]
        rates = [best * factor for factor in (0.25, 0.5, 1.0, 2.0, 4.0)] if options.tune else [best]
        is_ddp = system == "ddp" or system.startswith(POWER_SGD)
        densities = [None] if is_ddp or system == "dense" else options.densities
        wire = "float32" if is_ddp else options.wire
        exchanges = ["gather"] if is_ddp else options.exchanges
        for density, rate, seed, exchange, local in product(
            densities, rates, options.seeds, exchanges, options.local_steps
        ):
            yield Run(task, optimizer, system, density, seed, rate, steps, options.ranks, wire, exchange, local)


def known_runs(path: Path) -> dict[Run, dict[str, Any]]:
    """Read the results that are there."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {Run(**{field: line[field] for field in Run._fields if field in line}): line for line in lines}


def paired_difference(lines: Sequence[dict[str, Any]], ddp: Sequence[dict[str, Any]]) -> str:
    """Return the mean difference to DDP with the same seeds, and its 95 % confidence interval by Student's t."""
    of_ddp = {line["seed"]: line["score"] for line in ddp}
    found = [line["score"] - of_ddp[line["seed"]] for line in lines if line["seed"] in of_ddp]
    if len(found) not in _STUDENT_T:
        return ""
    return f"{fmean(found):+.4f} ± {_STUDENT_T[len(found)] * stdev(found) / math.sqrt(len(found)):.4f}"


def table(results: dict[Run, dict[str, Any]]) -> Iterator[str]:
    """Yield a Markdown table: mean and standard error over seeds, beside DDP's.

    If no DDP training has as many steps, the table compares with DDP's longest training.
    """
    scores: defaultdict[Run, list[dict[str, Any]]] = defaultdict(list)
    for run, line in results.items():
        scores[run._replace(seed=0)].append(line)
    heads = (
        "task | optimizer, rate | steps, ranks | system | density, wire | score | / ddp | - ddp, 95 % | seeds | bytes"
    )
    yield f"| {heads} / ddp |"
    yield "| --- | --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: |"
    for run, lines in sorted(scores.items(), key=lambda item: tuple(map(str, item[0]))):
        beside = run._replace(system="ddp", density=None, wire="float32", exchange="gather", local="")
        of_ddp = [other for other in scores if other._replace(steps=run.steps) == beside]
        ddp = scores[max(of_ddp, key=lambda other: (other == beside, other.steps))] if of_ddp else []
        values = [line["score"] for line in lines]
        error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        ratio = fmean(values) / fmean([line["score"] for line in ddp]) if ddp else math.nan
        sent = "" if run.density is None else f"{run.density:g}, {run.wire}, {run.exchange}"
        sent += f" local {run.local}" if run.local else ""
        volume = fmean([line["bytes"] for line in lines])
        yield (
            f"| {run.task} | {run.optimizer}, {run.rate:g} | {run.steps}, {run.ranks} | {run.system} | {sent} |"
            f" {fmean(values):.4f} ± {error:.4f} | {ratio:.4f} |"
            f" {paired_difference(lines, ddp)} | {len(values)} | {volume:.4f} |"
        )


def draw(results: dict[Run, dict[str, Any]], path: Path) -> None:
    """Draw the score against steps and against bytes, mean over seeds."""
    import matplotlib.pyplot as plt

    curves: defaultdict[str, list[list[list[float]]]] = defaultdict(list)
    for run, line in sorted(results.items(), key=lambda item: tuple(map(str, item[0]))):
        sent = "" if run.density is None else f" {run.density:g}"
        curves[f"{run.system}{sent}"].append(line["curve"])
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for name, seeds in curves.items():
        means = torch.tensor(seeds).mean(dim=0)
        axes[0].plot(means[:, 0], means[:, 2], label=name)
        axes[1].plot(means[:, 1] / 1e6, means[:, 2], label=name)
    some = next(iter(results))
    axes[0].set(xlabel="steps", ylabel=TASKS[some.task].score)
    axes[1].set(xlabel="megabytes that have left a rank", xscale="log")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    systems = [
        "ddp",
        f"{POWER_SGD}1",
        f"{POWER_SGD}4",
        "dense",
        *SYSTEMS,
        *(UNCORRECTED + system for system in SYSTEMS),
    ]
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["gpt"])
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=["adamw95"])
    parser.add_argument(
        "--systems", nargs="+", choices=systems, default=["ddp", "lags"], metavar="SYSTEM", help=f"{systems}"
    )
    parser.add_argument("--densities", nargs="+", type=float, default=[0.01])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--wire", default="bfloat16", help="type of the values sent (default bfloat16)")
    parser.add_argument("--exchanges", nargs="+", default=["gather"], help="gather, owners or auto")
    parser.add_argument(
        "--local-steps",
        nargs="+",
        default=[""],
        help="of a round, then outer rate, outer momentum (Nesterov's), decay, such as 20:0.7:0.9; ddp with the first"
        " is torch's post-localSGD, which averages after 100 steps, or after a fifth number such as 20:1:0:1:200",
    )
    parser.add_argument("--steps", type=int, help="optimizer steps of a run; without it, the task's own")
    parser.add_argument("--rate", type=float, help="learning rate; without it, DDP's best")
    parser.add_argument("--tune", action="store_true", help="DDP at a quarter to four times the rate")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--results", type=Path, default=Path("quality.jsonl"))
    parser.add_argument("--table", action="store_true", help="make no run, print the table")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="make no run, draw the runs that are asked for")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser


def train_all(missing: Sequence[Run], jobs: int, path: Path) -> None:
    """Train each in a process of its own, several at once, and write down what ends."""
    waiting = list(missing)
    running: list[subprocess.Popen[str]] = []
    while waiting or running:
        while waiting and len(running) < jobs:
            command = [sys.executable, __file__, "--one", json.dumps(waiting.pop(0)._asdict())]
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        time.sleep(0.2)
        for process in [each for each in running if each.poll() is not None]:
            running.remove(process)
            line = process.communicate()[0]
            if process.returncode:
                raise SystemExit(f"a run failed: {process.args!r}")
            with path.open("a") as results:
                results.write(line)
            outcome = json.loads(line)
            print({key: outcome[key] for key in (*Run._fields, "score", "bytes", "seconds")}, flush=True)


def main() -> None:
    """Make the runs that are missing, and print the table."""
    options = _parser().parse_args()
    if options.one:
        print(json.dumps(train(Run(**json.loads(options.one)))))
        return
    asked = list(dict.fromkeys(runs(options)))
    if not options.table and options.picture is None:
        known = known_runs(options.results)
        train_all([run for run in asked if run not in known], options.jobs, options.results)
    known = known_runs(options.results)
    wanted = known if options.table else {run: known[run] for run in asked if run in known}
    if options.picture is not None:
        draw(wanted, options.picture)
    else:
        print("\n".join(table(wanted)))


if __name__ == "__main__":
    main()
