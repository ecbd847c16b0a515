"""Log lines and warnings of a training."""

import math
import warnings
from collections.abc import Mapping
from typing import Optional

from lightning_sparse.engine.collectives import default_group
from lightning_sparse.engine.settings import Settings

WITHOUT_OPTIMIZER = (
    "no optimizer holds {names}: gradients of these parameters are not exchanged, and differ between ranks. To train"
    " the parameters, add the parameters to an optimizer."
)
NEEDS_DENSE = (
    "{name} adapts to dense gradients, and the mean gradients are sparse, so the final model is worse. A small GPT,"
    " 1000 steps, validation loss: AdamW at density 0.01 2.11, with DDP 1.55 (beta2 0.95); MuonAdamW at 1/16 1.258,"
    " with DDP 1.212. Choose torch.optim.AdamW or Adam, which make updates before selection by default; SGD;"
    " strategy='sparse_qsgd', which sends every element in 4 bits (Muon: 1.215); or strategy='ddp'."
)
CHANGED = (
    "gradients were changed between backward and the optimizer's step. After its warm-up, a corrected Adam or AdamW"
    " ignores such changes, because ranks exchange updates, not gradients. Change the loss or the parameters instead,"
    " or set optimizer_correction=None. Clipping is ignored without this warning."
)
UNCOUNTED_BATCHES = 8  # consecutive batches before the warning, because hooks may change weights during accumulation
UNCOUNTED = (
    f"the weights changed in {UNCOUNTED_BATCHES} consecutive batches without a step of a registered optimizer."
    " Warm-ups, rounds, momentum and Adam's updates follow these steps. Update the weights by step() of an"
    " optimizer that configure_optimizers returns, or that sparsify_gradients received (for a new optimizer call"
    " handle.close() and sparsify_gradients again). Or end each round yourself, in a plain loop by handle.synchronize()"
)


def warn_user(message: str) -> None:
    """Warn on rank 0."""
    if default_group().rank() == 0:
        warnings.warn(message, stacklevel=2)


def describe(settings: Settings) -> str:
    """Describe settings in one line: compressor, warm-up, schedule, exchange, wire and correction."""
    compressor, local, bits = settings.compressor, settings.local_steps, settings.wire_bits
    what = "gradient" if local is None else "change of parameters"
    if compressor.default_density is not None:
        sent = f"{settings.density:g} of each {what}"
    else:
        sent = f"each {what} whole" if compressor.wire_format == "reduce" else f"each {what} in a custom encoding"
    parts = {
        "warm-up steps": settings.warmup_steps,
        "schedule": type(settings.schedule).__name__.lower(),
        "local steps": local and local.every,
        "exchange": settings.exchange,
        "wire": str(settings.wire).removeprefix("torch.") if bits is None else f"{bits}bit",
        "momentum before selection": settings.feedback.momentum,
        "selection from": settings.adam and "Adam's updates",
    }
    return "; ".join(
        [f"{type(compressor).__name__} sends {sent}", *(f"{part}: {value}" for part, value in parts.items() if value)]
    )


def report(stats: Mapping[str, float], verdict: Optional[str] = None) -> str:
    """Describe the sent bytes, the time that the exchange takes after backward, and the ``verdict`` of ``sparse_auto``.

    Example::

        >>> sizes = {"total_wire_bytes": 35.9e6, "total_dense_bytes": 203e6, "total_compression_ratio": 5.65}
        >>> report({**sizes, "total_steps": 165.0, "exposed_share": 0.118})
        '165 steps sent 35.9 MB instead of 203 MB, compression ratio 5.65; exposed: 11.8 % of the time.'
    """
    inter = stats.get("total_inter_node_bytes")
    inside = "" if inter is None else f" ({in_bytes(inter)} to other nodes)"
    parts = [
        f"{stats['total_steps']:.0f} steps sent {in_bytes(stats['total_wire_bytes'])}{inside} instead of"
        f" {in_bytes(stats['total_dense_bytes'])}, compression ratio {stats['total_compression_ratio']:.3g}"
    ]
    if not math.isnan(stats["exposed_share"]):
        parts.append(f"exposed: {100 * stats['exposed_share']:.1f} % of the time")
    return "; ".join([*parts, *filter(None, [verdict])]) + "."


def in_bytes(count: float) -> str:
    """Format a number of bytes, such as 1.23 MB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.3g} B"
