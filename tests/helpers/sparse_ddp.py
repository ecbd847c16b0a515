# ruff: noqa: F401

from lightning_sparse.testing.subjects import (
    COMPRESSOR_NAMES,
    SCHEDULE_NAMES,
    WIRES,
    density_for,
    is_exact,
    subject_of,
)
from lightning_sparse.testing.wrapping import (
    Edges,
    backpropagate,
    batch,
    parameters_of,
    sgd_steps,
    sparse_ddp,
    watch_gradients,
)


def declaring(promise):
    return [name for name in COMPRESSOR_NAMES if promise(subject_of(name))]


# LAGS selects as top-k, MiCRO as ExDyna, and QSGD is dense with a wire of four bits.
DIFFERENT_NAMES = [name for name in COMPRESSOR_NAMES if name not in ("lags", "micro", "qsgd")]
DENSITY = {name: density_for(name) for name in COMPRESSOR_NAMES}
KEEPING_NAMES = declaring(lambda each: each.feedback.keeps_residual)
EXACT_NAMES = declaring(is_exact)
AGREEING_NAMES = declaring(lambda each: not each.replicas_diverge)
GROUPING_FREE_NAMES = declaring(lambda each: not each.selects_across_bucket)
