"""Top-k: the largest magnitudes of each parameter.

Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017 (arXiv 1704.05021), selected one
threshold for the whole model; Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018 (arXiv
1809.07599), proved that with error feedback it converges. Here every parameter gets its own count, as in Lin et al.,
"Deep Gradient Compression" (arXiv 1712.01887), and the count is exact.
"""

from typing import ClassVar, Optional

from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.base import Compressor
from lightning_sparse.functional import top_k_indices
from lightning_sparse.selection import Selection


class TopK(Compressor):
    """Send exactly ``max(1, round(density * n))`` largest magnitudes of every parameter of ``n`` elements.

    Example::

        >>> import torch
        >>> TopK().select_one("weight", torch.tensor([0.1, -3.0, 2.0, -0.5]), count=2).values
        tensor([-3.,  2.])
    """

    default_density: ClassVar[Optional[float]] = 0.01
    wire_format: ClassVar[str] = "gather"

    @override
    def select_one(self, name: str, accumulated: Tensor, count: int) -> Selection:
        indices = top_k_indices(accumulated, count)
        return Selection(accumulated.index_select(0, indices), indices, accumulated.numel())
