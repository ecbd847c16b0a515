"""Pure functions of flat tensors: no state, no process group, no randomness that is not passed in."""

from lightning_sparse.functional.adam import AdamScalars, accumulate_updates, apply_updates, denominator, to_gradients
from lightning_sparse.functional.codes import (
    BIN_MEANS,
    BLOCK,
    bin_values,
    dequantize,
    pack_codes,
    packed_nbytes,
    quantize,
    quantized_nbytes,
    unpack_codes,
    values_of_bins,
)
from lightning_sparse.functional.elements import (
    IndexCodec,
    add_rows,
    aligned,
    copy_elements,
    index_codec,
    laid_flat,
    message_of,
    read_as,
    round_to,
)
from lightning_sparse.functional.fingerprint import fingerprint
from lightning_sparse.functional.histogram import magnitude_histogram, magnitude_quantile
from lightning_sparse.functional.norms import layer_deltas, norm_of
from lightning_sparse.functional.signs import shift_by_sign, sign_totals
from lightning_sparse.functional.topk import (
    batched_top_k_indices,
    indices_reaching,
    indices_reaching_each,
    top_k_indices,
)

__all__ = [
    "BIN_MEANS",
    "BLOCK",
    "AdamScalars",
    "IndexCodec",
    "accumulate_updates",
    "add_rows",
    "aligned",
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
    "message_of",
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
