"""Pure functions of flat tensors: no state, no process group, no randomness that is not passed in."""

from lightning_sparse.functional.copying import copy_elements
from lightning_sparse.functional.histogram import magnitude_histogram, magnitude_quantile
from lightning_sparse.functional.indices import IndexCodec, index_codec
from lightning_sparse.functional.rounding import round_to
from lightning_sparse.functional.topk import batched_top_k_indices, indices_reaching, top_k_indices

__all__ = [
    "IndexCodec",
    "batched_top_k_indices",
    "copy_elements",
    "index_codec",
    "indices_reaching",
    "magnitude_histogram",
    "magnitude_quantile",
    "round_to",
    "top_k_indices",
]
