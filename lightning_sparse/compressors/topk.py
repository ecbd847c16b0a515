"""Top-k: the largest magnitudes of each parameter.

Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017 (arXiv 1704.05021): a threshold
for the whole model. Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018 (arXiv 1809.07599): error
feedback makes top-k converge. Here every parameter has an exact count, as in Lin et al. (arXiv 1712.01887).
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar, Optional

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.base import Compressor
from lightning_sparse.compressors.selection import FlatSelection, Selection
from lightning_sparse.functional.topk import batched_top_k_indices


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
