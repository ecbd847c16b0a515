"""Top-k: the largest magnitudes of each parameter.

Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017 (arXiv 1704.05021): a threshold
for the whole model. Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018 (arXiv 1809.07599): error
feedback makes top-k converge. Here every parameter has an exact count, as in Lin et al. (arXiv 1712.01887).

On a CPU, a cheap vectorised pass first discards nearly all elements of a large tensor: all magnitudes below a
threshold. The threshold comes from a strided sample, and is a little too low on purpose. ``torch.topk`` selects among
the remaining elements, or, if the sample was misleading (or many elements are equal), among all elements. At a low
density, ``torch.topk`` selects the blocks with the largest maxima instead, and then selects within these blocks.

On a GPU ``torch.topk`` selects among all elements, without a synchronization. Tensors of equal size share kernel
launches, because a launch costs more than the work on a small tensor. Results do not depend on other tensors.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar, Optional, Union

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.base import Compressor
from lightning_sparse.compressors.selection import FlatSelection, Selection

_SMALL = 1 << 15  # largest tensor, in elements, for which torch.topk alone is faster than a sampled threshold
_BATCH = 1 << 22  # elements of the tensors in one batched call: copies take 16 MiB at most
_BLOCK = 32  # elements
_BLOCKS_PER_COUNT = 8  # minimum number of blocks per selected element; with fewer, a sampled threshold is faster
_MANY = 1 << 21  # elements; for larger tensors, a sampled threshold is faster at all densities
_SAMPLE_STRIDE = 8  # minimum stride of a sample; a denser sample costs more time than it saves later
_SAMPLE = 1 << 16  # elements in a sample; the number of elements above the threshold is then exact to about 1 %
_SAMPLE_SIGMAS = 4.0  # standard deviations by which a threshold is lowered; if still too high, torch.topk runs as well
_CPU_CHUNK = 1 << 18  # magnitudes of a chunk (1 MiB), which stay in a core's second-level cache between two passes
_FEW = 1 << 12  # elements; for smaller tensors, the number of torch calls determines the time
_WORD = 8  # boolean flags; eight are read as one int64
_SURPLUS = 2  # largest number of candidates per selected element; with more, a selection among candidates is slow


class TopK(Compressor):
    """Send the ``max(1, round(density * n))`` largest magnitudes of every parameter, which has ``n`` elements.

    Example::

        >>> TopK().select(["weight"], [torch.tensor([0.1, -3.0, 2.0, -0.5])], counts=[2])[0].values
        tensor([-3.,  2.])
    """

    default_density: ClassVar[Optional[float]] = 0.01
    has_density_by_parameter: ClassVar[bool] = True
    wire_format: ClassVar[str] = "gather"
    dense_wire_format: ClassVar[Optional[str]] = "reduce"

    @override
    def select(self, names: Sequence[str], accumulated: Sequence[Tensor], counts: Sequence[int]) -> Sequence[Selection]:
        return largest_of_each(accumulated, counts)


def largest_of_each(tensors: Sequence[Tensor], counts: Sequence[int]) -> FlatSelection:
    """Select the ``counts[i]`` largest magnitudes of each flat tensor ``i``."""
    alike: defaultdict[tuple[int, int, torch.dtype], list[int]] = defaultdict(list)  # tensors with one key share a call
    for position, (tensor, count) in enumerate(zip(tensors, counts)):
        alike[tensor.numel(), count, tensor.dtype].append(position)
    indices: dict[int, Tensor] = {}
    for (_, count, _), positions in alike.items():
        indices.update(zip(positions, batched_top_k_indices([tensors[each] for each in positions], count)))
    return FlatSelection.of(tensors, [indices[position] for position in range(len(tensors))])


def top_k_indices(tensor: Tensor, count: int) -> Tensor:
    """Return the indices of the ``count`` largest magnitudes of a flat tensor, int64 ``[count]``, ascending.

    The magnitudes equal those of ``torch.topk(tensor.abs(), count)``. Ties are broken deterministically. A NaN counts
    as larger than any number. ``ValueError`` for a ``count`` outside ``[1, n]``.

        >>> top_k_indices(torch.tensor([0.1, -3.0, 2.0, -0.5]), 2)
        tensor([1, 2])
    """
    return batched_top_k_indices([tensor], count)[0]


def batched_top_k_indices(tensors: Sequence[Tensor], count: int) -> Tensor:
    """Return :func:`top_k_indices` of tensors of equal size, dtype and device as int64 ``[len(tensors), count]``."""
    numel = tensors[0].numel()
    if not 1 <= count <= numel:
        raise ValueError(f"count={count} must lie between 1 and the number of elements, {numel}")
    size = max(1, _BATCH // numel)
    batches = [tensors[start : start + size] for start in range(0, len(tensors), size)]
    return torch.cat([_select(batch, count) for batch in batches])


def _select(rows: Sequence[Tensor], count: int) -> Tensor:
    numel = rows[0].numel()
    if count == numel:
        return torch.arange(numel, device=rows[0].device).expand(len(rows), -1)
    if rows[0].device.type == "cpu" and numel > _SMALL:
        has_few = count * _BLOCK * _BLOCKS_PER_COUNT <= numel <= _MANY
        return torch.stack([(_by_block_maxima if has_few else _by_sampled_threshold)(row, count) for row in rows])
    return _largest(torch.stack(tuple(rows)).abs_(), count)


def _largest(magnitudes: Tensor, count: int) -> Tensor:
    # torch.topk also counts a NaN as larger than any number.
    return torch.topk(magnitudes, count, sorted=False).indices.sort().values


def _by_block_maxima(tensor: Tensor, count: int) -> Tensor:
    # The largest elements are in the blocks with the largest maxima. In the last block, -1 is below every magnitude.
    magnitudes = tensor.abs()
    if missing := -tensor.numel() % _BLOCK:
        magnitudes = torch.cat([magnitudes, magnitudes.new_full((missing,), -1.0)])
    blocks = magnitudes.view(-1, _BLOCK)
    chosen = _largest(blocks.amax(dim=1), count)
    found = _largest(blocks.index_select(0, chosen).flatten(), count)
    block = found // _BLOCK
    return found.add_(chosen.index_select(0, block).sub_(block).mul_(_BLOCK))


def _by_sampled_threshold(tensor: Tensor, count: int) -> Tensor:
    threshold = _sampled_threshold(tensor, count)
    candidates = None if threshold is None else indices_reaching(tensor, threshold)
    if candidates is None or candidates.numel() < count:
        return _largest(tensor.abs(), count)
    magnitudes = tensor.index_select(0, candidates).abs_()
    # The few surplus candidates are removed, which is cheaper than a top-k of all candidates and preserves the order.
    surplus = torch.topk(magnitudes, magnitudes.numel() - count, largest=False, sorted=False).indices
    return candidates[torch.ones_like(candidates, dtype=torch.bool).index_fill_(0, surplus, False)]


def _sampled_threshold(tensor: Tensor, count: int) -> Optional[Tensor]:
    """Estimate a lower bound of the ``count`` largest magnitudes. Return ``None`` if too many elements are equal."""
    # An odd stride samples different columns of a matrix with rows of 2, 4, 8, ... elements.
    stride = max(_SAMPLE_STRIDE, tensor.numel() // _SAMPLE) | 1
    sample = tensor[::stride].abs().nan_to_num_(nan=math.inf, posinf=math.inf)
    expected = count / tensor.numel() * sample.numel()
    rank = min(sample.numel(), math.ceil(expected + _SAMPLE_SIGMAS * math.sqrt(expected)))
    threshold = torch.topk(sample, rank, sorted=False).values.min()
    return threshold if (sample >= threshold).sum() <= _SURPLUS * rank else None


def indices_reaching(tensor: Tensor, floor: Union[Tensor, float]) -> Tensor:
    """Return the ascending int64 indices of magnitudes not below ``floor``, NaN included. Synchronizes with a GPU."""
    if tensor.device.type != "cpu" or tensor.numel() <= _FEW:
        return torch.lt(tensor.abs(), floor).logical_not_().nonzero().squeeze(1)
    chunk = min(_CPU_CHUNK, -(-tensor.numel() // _WORD) * _WORD)
    magnitudes = tensor.new_empty(chunk)
    mask = torch.zeros(chunk, dtype=torch.bool)
    found = []
    for start in range(0, tensor.numel(), chunk):
        piece = tensor[start : start + chunk]
        numel = piece.numel()
        torch.lt(torch.abs(piece, out=magnitudes[:numel]), floor, out=mask[:numel]).logical_not_()
        mask[numel:] = False
        found.append(_flagged(mask).add_(start))
    return torch.cat(found)


def _flagged(mask: Tensor) -> Tensor:
    """Return the ascending indices of true elements of a flat mask. The mask's size is a multiple of ``_WORD``."""
    # Eight flags are one word. Most words have no true flag, so one comparison skips eight flags.
    words = torch.nonzero(mask.view(torch.int64)).squeeze(1)
    row, flag = torch.nonzero(mask.view(-1, _WORD).index_select(0, words)).unbind(1)
    return words.index_select(0, row).mul_(_WORD).add_(flag)
