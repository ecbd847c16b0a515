"""Measure the exact selection of the largest gradient elements, residual included, beside ``torch.topk``.

On one CPU thread, and on a GPU where there is one; no root needed::

    python examples/benchmarks/selection.py
    python examples/benchmarks/selection.py --elements 20000000 --densities 0.001 --repeats 20

Ours is what a training step does for one parameter: add the residual to the gradient, select, read the selected values,
keep the rest. ``torch.topk(x.abs(), k)`` only selects; it is given the same accumulated gradient in the same repeat.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparse.compressors.topk import largest_of_each
from lightning_sparse.engine.memory import Memory
from lightning_sparse.engine.observe import Clock

_NAME = "parameter"
_ROW = 512  # elements of an embedding row
_ROWS_SEEN = 0.02  # fraction of an embedding's rows that a batch touches
_WARM_UP = 2


class Times(NamedTuple):
    """Seconds of one repeat."""

    compensate: float
    select: float
    update: float
    torch_topk: float

    @property
    def ours(self) -> float:
        """All that a training step does on the way to a selection."""
        return self.compensate + self.select + self.update


def normal(numel: int, device: torch.device) -> Tensor:
    """Make a gradient of normally distributed elements."""
    return torch.randn(numel, device=device)


def embedding(numel: int, device: torch.device) -> Tensor:
    """Make the gradient of an embedding: most rows are zero."""
    gradient = torch.randn(-(-numel // _ROW), _ROW, device=device)
    gradient[torch.rand(len(gradient), device=device) >= _ROWS_SEEN] = 0.0
    return gradient.flatten()[:numel]


INPUTS: dict[str, Callable[[int, torch.device], Tensor]] = {"normal": normal, "embedding": embedding}


def repeat(gradient: Tensor, count: int) -> Iterator[Times]:
    """Measure step after step with the same gradient and the residual that builds up."""
    memory, clock = Memory(), Clock(gradient.device)
    working = torch.empty_like(gradient)
    accepted = torch.ones(1, dtype=torch.bool, device=gradient.device)
    while True:
        working.copy_(gradient)
        marks = [clock.mark()]
        accumulated = memory.compensate([_NAME], [working], {})
        marks.append(clock.mark())
        selected = largest_of_each(accumulated, [count])
        marks.append(clock.mark())
        torch.topk(accumulated[0].abs(), count)
        marks.append(clock.mark())
        kept = selected.replaced(torch.zeros_like(selected.values), selected.indices)
        memory.update_residual([_NAME], accumulated, kept, accepted)
        marks.append(clock.mark())
        compensate, select, torch_topk, update = map(clock.seconds, marks, marks[1:])
        yield Times(compensate, select, update, torch_topk)


def median_times(gradient: Tensor, count: int, repeats: int) -> Times:
    """Return the median of each time over some repeats."""
    times = [seen for seen, _ in zip(repeat(gradient, count), range(_WARM_UP + repeats))][_WARM_UP:]
    return Times(*(statistics.median(column) for column in zip(*times)))


def as_text(elements: int, density: float, kind: str, times: Times) -> str:
    """Write a line of the table."""
    columns = [times.compensate, times.select, times.update, times.ours, times.torch_topk]
    written = "".join(f"{1e3 * seconds:11.3f}" for seconds in columns)
    return f"{elements:>11,d} {density:8g} {kind:>10s}{written}{times.ours / times.torch_topk:8.2f}"


def _print_table(device: torch.device, options: argparse.Namespace) -> None:
    threads = f", {torch.get_num_threads()} thread(s)" if device.type == "cpu" else ""
    print(f"\n{device.type}{threads}, medians of {options.repeats} in milliseconds")
    heads = "".join(f"{head:>11s}" for head in ("compensate", "select", "update", "ours", "torch.topk"))
    print(f"{'elements':>11s} {'density':>8s} {'gradient':>10s}{heads}{'ratio':>8s}")
    for elements in options.elements:
        for kind, make in INPUTS.items():
            gradient = make(elements, device)
            for density in options.densities:
                times = median_times(gradient, max(1, round(density * elements)), options.repeats)
                print(as_text(elements, density, kind, times), flush=True)


def main() -> None:
    """Print a table for the CPU, and one for the GPU where there is one."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--elements", type=int, nargs="+", default=[100_000, 1_000_000, 5_000_000, 20_000_000])
    parser.add_argument("--densities", type=float, nargs="+", default=[0.0001, 0.001, 0.01, 0.1])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}")
    _print_table(torch.device("cpu"), options)
    if torch.cuda.is_available():
        print(f"\n{torch.cuda.get_device_name()}")
        _print_table(torch.device("cuda"), options)


if __name__ == "__main__":
    main()
