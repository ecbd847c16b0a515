"""Pure functions of flat tensors: no state, no process group, no randomness that is not passed in."""

from lightning_sparse.functional.adam import AdamScalars, accumulate_updates, apply_updates, denominator, to_gradients
from lightning_sparse.functional.bins import BIN_MEANS, bin_values, values_of_bins
from lightning_sparse.functional.copying import add_rows, copy_elements, laid_flat, read_as
from lightning_sparse.functional.deltas import layer_deltas
from lightning_sparse.functional.fingerprint import fingerprint
from lightning_sparse.functional.histogram import magnitude_histogram, magnitude_quantile
from lightning_sparse.functional.indices import IndexCodec, index_codec
from lightning_sparse.functional.norm import norm_of
from lightning_sparse.functional.packing import pack_codes, packed_nbytes, unpack_codes
from lightning_sparse.functional.quantization import BLOCK, dequantize, quantize, quantized_nbytes
from lightning_sparse.functional.reaching import indices_reaching, indices_reaching_each
from lightning_sparse.functional.rounding import round_to
from lightning_sparse.functional.signs import shift_by_sign, sign_totals
from lightning_sparse.functional.topk import batched_top_k_indices, top_k_indices

__all__ = [
    "BIN_MEANS",
    "BLOCK",
    "AdamScalars",
    "IndexCodec",
    "accumulate_updates",
    "add_rows",
    "apply_updates",
    "batched_top_k_indices",
    "bin_values",
    "copy_elements",
    "denominator",
    "dequantize",
    "fingerprint",
    "index_codec",
    "indices_reaching",
    "indices_reaching_each",
    "laid_flat",
    "layer_deltas",
    "magnitude_histogram",
    "magnitude_quantile",
    "norm_of",
    "pack_codes",
    "packed_nbytes",
    "quantize",
    "quantized_nbytes",
    "read_as",
    "round_to",
    "shift_by_sign",
    "sign_totals",
    "to_gradients",
    "top_k_indices",
    "unpack_codes",
    "values_of_bins",
]
