"""Compare densities for adversarial training: a GAN learns eight Gaussians on a circle, with Adam (betas 0.5 and 0.9).

Ranks are threads of one process that run the package's pipeline (``virtual.py``)::

    python examples/benchmarks/gan.py

The discriminator sees two samples at once (PacGAN). Of 4096 samples of the generator at the end, a *good* sample is
within three standard deviations of a mode. A mode is *covered* with a tenth of its share of good samples. *Uncorrected*
is ``optimizer_correction=None``. ``--output`` stores each training, so that an interrupted run continues.
"""

import argparse
import json
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn import functional
from virtual import VirtualRanks

from lightning_sparse.engine.settings import Settings

_MODES, _RADIUS, _DEVIATION, _NOISE, _BATCH, _SAMPLES = 8, 2.0, 0.1, 32, 128, 4096
_ANGLES = torch.arange(_MODES) * (2 * math.pi / _MODES)
_CENTERS = _RADIUS * torch.stack([_ANGLES.cos(), _ANGLES.sin()], dim=1)
WAYS = ["ddp", *(f"{density}{way}" for way, density in product(["", " uncorrected"], [0.01, 0.05, 0.1, 0.2]))]


def _layers(inputs: int, outputs: int, width: int = 128) -> nn.Sequential:
    hidden = [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(width, outputs))


@torch.no_grad()
def scores(generator: nn.Module) -> tuple[int, float]:
    """Return the number of covered modes, and the fraction of good samples."""
    noise = torch.randn(_SAMPLES, _NOISE, generator=torch.Generator().manual_seed(0))
    counts = (torch.cdist(generator(noise), _CENTERS) <= 3 * _DEVIATION).sum(dim=0)
    return int((counts >= 0.1 * _SAMPLES / _MODES).sum()), float(counts.sum()) / _SAMPLES


def _settings(way: str) -> Optional[Settings]:
    if way == "ddp":
        return None
    density, _, uncorrected = way.partition(" ")
    return Settings.of("lags", float(density), optimizer_correction=None if uncorrected else "auto", warmup_steps=0)


def train(way: str, seed: int, steps: int, rate: float, packed: int, ranks: int) -> tuple[int, float]:
    """Train a GAN. Return the scores of the generator."""

    def replicas(inputs: int, outputs: int) -> VirtualRanks:
        def build() -> nn.Module:
            torch.manual_seed(seed)
            return _layers(inputs, outputs)

        def adam(network: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.Adam(network.parameters(), rate, betas=(0.5, 0.9))

        return VirtualRanks(ranks, build, adam, lambda: _settings(way), steps)

    generators, discriminators = replicas(_NOISE, 2), replicas(2 * packed, 1)
    draws = [torch.Generator().manual_seed(1000 * seed + rank) for rank in range(ranks)]

    def fake(rank: int) -> Tensor:
        samples: Tensor = generators.ranks[rank].network(torch.randn(_BATCH, _NOISE, generator=draws[rank]))
        return samples

    def loss_of(rank: int, trains_generator: bool) -> Callable[[nn.Module], Tensor]:
        def loss(_: nn.Module) -> Tensor:
            discriminator = discriminators.ranks[rank].network
            if trains_generator:
                of_generator: Tensor = functional.softplus(-discriminator(fake(rank).view(-1, 2 * packed)))
                return of_generator.mean()
            draw = draws[rank]
            centers = _CENTERS[torch.randint(_MODES, (_BATCH,), generator=draw)]
            real = centers + _DEVIATION * torch.randn(_BATCH, 2, generator=draw)
            of_fake, of_real = (discriminator(each.view(-1, 2 * packed)) for each in (fake(rank).detach(), real))
            of_both: Tensor = functional.softplus(of_fake) + functional.softplus(-of_real)
            return of_both.mean()

        return loss

    for _ in range(steps):
        discriminators.step([loss_of(rank, False) for rank in range(ranks)])
        generators.step([loss_of(rank, True) for rank in range(ranks)])
    for each in (generators, discriminators):
        each.close()
    return scores(generators.ranks[0].network)


def main() -> None:
    """Make the trainings that are missing, and print the table."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, metavar="WAY")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=500, help="steps of each network")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--packed", type=int, default=2, help="samples that the discriminator sees at once")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path(".benchmarks/gan.json"))
    options = parser.parse_args()
    settings = options.steps, options.rate, options.packed, options.ranks
    found = json.loads(options.output.read_text()) if options.output.exists() else {}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for seed, way in product(options.seeds, options.ways):
        if (name := str((way, seed, *settings))) not in found:
            found[name] = train(way, seed, *settings)
            print(name, *found[name], flush=True)
            options.output.write_text(json.dumps(found))
    print("| way | modes of 8, by seed | median | good samples |\n| --- | --- | ---: | ---: |")
    for way in options.ways:
        modes, good = zip(*(found[str((way, seed, *settings))] for seed in options.seeds))
        print(f"| {way} | {', '.join(map(str, modes))} | {median(modes):g} | {fmean(good):.2f} |")


if __name__ == "__main__":
    main()
