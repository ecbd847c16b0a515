"""Measure what selection costs one rank of ExDyna, which looks for large elements in a partition of its own.

On one CPU thread, or on a GPU where there is one; no root needed. All ranks are played in turn by this process, and
only what the first one does is timed::

    python examples/benchmarks/partition.py
    python examples/benchmarks/partition.py --elements 20000000 --density 0.001 --ranks 1 2 4 8
"""

import argparse
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from virtual import Meeting

from lightning_sparse import Selection
from lightning_sparse.compressors import ExDyna, TopK
from lightning_sparse.compressors.layout import ModelLayout
from lightning_sparse.engine.observe import Clock

_TENSORS = 12
_WARM_UP = 5


def exdyna_seconds(ranks: int, elements: int, density: float, repeats: int, device: torch.device) -> float:
    """Return the median seconds that rank 0 takes to select; the others select untimed, from the same gradient."""
    names, tensors = _model(elements, device)
    layouts = [ModelLayout(names, tuple(map(len, tensors)), rank, ranks, device) for rank in range(ranks)]
    compressors = [ExDyna() for _ in layouts]
    for compressor, layout in zip(compressors, layouts):
        compressor.begin(layout)
    clock, seconds = Clock(device), []
    for _ in range(_WARM_UP + repeats):
        chosen = []
        for rank, compressor in enumerate(compressors):
            compressor.density_of(names[0], density)
            start = clock.mark()
            chosen.append(compressor.select(names, tensors, [0] * _TENSORS))
            if rank == 0:
                seconds.append(clock.seconds(start, clock.mark()))
        _finish(compressors, names, [_union(selections) for selections in zip(*chosen)])
    return statistics.median(seconds[_WARM_UP:])


def top_k_seconds(elements: int, density: float, repeats: int, device: torch.device) -> float:
    """Return the median seconds that top-k of every tensor takes."""
    names, tensors = _model(elements, device)
    clock, seconds = Clock(device), []
    for _ in range(_WARM_UP + repeats):
        start = clock.mark()
        TopK().select(names, tensors, [max(1, round(density * len(tensor))) for tensor in tensors])
        seconds.append(clock.seconds(start, clock.mark()))
    return statistics.median(seconds[_WARM_UP:])


def _model(elements: int, device: torch.device) -> tuple[tuple[str, ...], list[Tensor]]:
    names = tuple(f"layer {position}" for position in range(_TENSORS))
    return names, [torch.randn(elements // _TENSORS, device=device) for _ in names]


def _union(selections: Sequence[Selection]) -> Selection:
    indices = torch.cat([selection.indices for selection in selections if selection.indices is not None])
    return Selection(torch.ones_like(indices, dtype=torch.float32), indices, selections[0].numel)


def _finish(compressors: Sequence[ExDyna], names: Sequence[str], means: Sequence[Selection]) -> None:
    meeting = Meeting(len(compressors))

    def finish(rank: int, compressor: ExDyna) -> None:
        def all_gather(tensor: Tensor) -> Tensor:
            return torch.stack(meeting.exchange(rank, tensor))

        compressor.finish_step(names, means, torch.tensor(True), all_gather)

    with ThreadPoolExecutor(len(compressors)) as threads:
        list(threads.map(finish, range(len(compressors)), compressors))


def main() -> None:
    """Print a row for each number of ranks."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--elements", type=int, default=20_000_000)
    parser.add_argument("--density", type=float, default=0.001)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = (options.elements, options.density, options.repeats, device)
    print(f"{options.elements:,d} elements, density {options.density:g}, {device.type}, medians of {options.repeats}")
    print(f"top-k of the whole model   {1e3 * top_k_seconds(*sizes):8.2f} ms")
    for ranks in options.ranks:
        print(f"ExDyna, a rank of {ranks:<9d}{1e3 * exdyna_seconds(ranks, *sizes):8.2f} ms", flush=True)


if __name__ == "__main__":
    main()
