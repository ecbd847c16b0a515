"""Check, layer by layer, the assumption under which LAGS-SGD converges: ``delta <= 1`` (arXiv 1911.08727).

A classifier of handwritten digits is trained by several ranks in one process. ``delta`` is the squared norm of what the
selections of all ranks leave over of their mean, divided by what a random choice of as many elements leaves over. It
needs no network, no GPU and no download, and takes a few seconds::

    python examples/check_assumption.py --compressor lags --density 0.01
"""

import argparse
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Optional

import torch
from image_data import digits
from torch import Tensor
from torch.nn import functional
from train_image import ImageClassifier

from lightning_sparse import Compressor, ModelLayout, Selection
from lightning_sparse.compressors import COMPRESSORS

_BATCH = 16  # images of each rank
_EVERY = 25  # steps from one look to the next


def delta(accumulated: Sequence[Tensor], sent: Sequence[Tensor], count: int) -> float:
    """Return ``delta`` of a layer: ``|x - r|^2 / ((1 - k / n) |x|^2)``, the denominator a random choice's expectation.

    ``x`` is the mean over ranks of what has ``accumulated``, ``r`` of what is ``sent``, ``k`` of ``n`` elements each.

    Example::

        >>> layer = torch.tensor([3.0, 1.0])
        >>> round(delta([layer, layer], [torch.tensor([3.0, 0.0])] * 2, count=1), 3)
        0.2
    """
    whole, applied = torch.stack(list(accumulated)).mean(dim=0), torch.stack(list(sent)).mean(dim=0)
    random_rest = (1 - count / whole.numel()) * whole.square().sum()
    return float((whole - applied).square().sum() / random_rest)


def written(selection: Selection) -> Tensor:
    """Return what a rank sends of a layer, zero where it sends nothing."""
    assert selection.indices is not None
    return torch.zeros(selection.numel).index_copy_(0, selection.indices, selection.values)


def measure(compressor: Compressor, density: float, ranks: int, steps: int) -> Mapping[str, Sequence[float]]:
    """Train with error feedback and SGD; return ``delta`` of every layer in each step that is looked at."""
    network = ImageClassifier(0.01).network
    optimizer = torch.optim.SGD(network.parameters(), 0.01, momentum=0.9)
    layers = dict(network.named_parameters())
    names, numels = list(layers), [each.numel() for each in layers.values()]
    counts = [max(1, round(density * numel)) for numel in numels]
    compressor.begin(ModelLayout(tuple(names), tuple(numels), 0, ranks, torch.device("cpu")))
    residuals = [[torch.zeros(numel) for numel in numels] for _ in range(ranks)]
    images, labels = digits().train.tensors
    found: dict[str, list[float]] = {name: [] for name, count, numel in zip(names, counts, numels) if count < numel}
    for step in range(steps):
        accumulated, sent = list[list[Tensor]](), list[list[Tensor]]()
        for residual in residuals:  # of each rank
            batch = torch.randint(len(images), (_BATCH,))
            loss = functional.cross_entropy(network(images[batch]), labels[batch])
            gradients = torch.autograd.grad(loss, list(layers.values()))
            accumulated.append([kept + gradient.flatten() for kept, gradient in zip(residual, gradients)])
            sent.append(list(map(written, compressor.select(names, accumulated[-1], counts))))
            residual[:] = [whole - part for whole, part in zip(accumulated[-1], sent[-1])]
        for place, (name, parameter) in enumerate(layers.items()):
            of_layer = [each[place] for each in sent]
            parameter.grad = torch.stack(of_layer).mean(dim=0).view_as(parameter)
            if step % _EVERY == _EVERY - 1 and name in found:
                found[name].append(delta([each[place] for each in accumulated], of_layer, counts[place]))
        optimizer.step()
    return found


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compressor", choices=["topk", "lags"], default="lags")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    found = measure(COMPRESSORS[options.compressor](), options.density, options.ranks, options.steps)
    print("| layer | mean of delta | largest |\n| --- | ---: | ---: |")
    for name, deltas in found.items():
        print(f"| `{name}` | {fmean(deltas):.3f} | {max(deltas):.3f} |")


if __name__ == "__main__":
    main()
