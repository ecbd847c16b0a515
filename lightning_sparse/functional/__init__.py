"""Pure functions of flat tensors: no state, no process group, no randomness that is not passed in."""

from lightning_sparse.functional.copying import copy_elements
from lightning_sparse.functional.deltas import layer_deltas
from lightning_sparse.functional.indices import IndexCodec, index_codec
from lightning_sparse.functional.rounding import round_to
from lightning_sparse.functional.topk import batched_top_k_indices, top_k_indices

__all__ = [
    "IndexCodec",
    "batched_top_k_indices",
    "copy_elements",
    "index_codec",
    "layer_deltas",
    "round_to",
    "top_k_indices",
]
