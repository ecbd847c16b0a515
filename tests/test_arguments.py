"""Every class refuses arguments out of range, and names the argument."""

import pytest

from lightning_sparse import (
    AdamCorrection,
    LocalSteps,
    SparseDDPStrategy,
    SparseFabricStrategy,
    SparseModelParallelStrategy,
)
from lightning_sparse.callbacks import (
    AdaptiveDensity,
    ErrorBudget,
    MomentumCorrection,
    OverlapTimeline,
    ReplicaSentinel,
)
from lightning_sparse.compressors import A2SGD, DGC, LAGS, SDAGC


def ruled(**arguments):
    return AdaptiveDensity([ErrorBudget(1)], **arguments)


OUT_OF_RANGE = [
    (A2SGD, "param_sync_every", (0, -1, 2.5, "50")),
    (DGC, "momentum", (1.0, "sgd")),
    (DGC, "clip_norm", (0.0,)),
    (LAGS, "error_feedback", ("lr",)),
    (LAGS, "densities", ({"first.weight": 2.0}, {"first.weight": 0.0})),
    (SDAGC, "alpha", (0.0,)),
    (SDAGC, "capacity", (0.5,)),
    (SDAGC, "momentum", (-0.1,)),
    (LocalSteps, "every", (0, True, 2.5, "often")),
    (LocalSteps, "outer_lr", (0.0,)),
    (LocalSteps, "outer_momentum", (1.0,)),
    (LocalSteps, "residual_decay", (-0.1,)),
    (LocalSteps, "nesterov", (True,)),
    (AdamCorrection, "warmup_steps", (1, 0.5)),
    (AdamCorrection, "density_decay_steps", (-1,)),
    (AdamCorrection, "second_moment_interval", (0, True)),
    (ReplicaSentinel, "every_n_steps", (0, -1, 2.5, True, "often")),
    (OverlapTimeline, "steps", ([], [-1], [1.5], "12", 7)),
    (MomentumCorrection, "momentum", (1.0, None)),
    (MomentumCorrection, "clip_norm", (0.0,)),
    (AdaptiveDensity, "rules", ([], ["warmup"], ErrorBudget(1))),
    (ruled, "max_density", (0.0,)),
    (ruled, "every_n_steps", (0,)),
    (ErrorBudget, "budget", (0.0,)),
    (SparseDDPStrategy, "density", (0, 100, "0.1", True)),
    (SparseDDPStrategy, "compressor", ("topp",)),
    (SparseDDPStrategy, "optimizer_correction", ("adam",)),
    (SparseDDPStrategy, "warmup_steps", (-1, True, 1.0, 4.5, "4")),
    (SparseDDPStrategy, "warmup_epochs", (4,)),
    (SparseDDPStrategy, "schedule", ("schedule",)),
    (SparseDDPStrategy, "wire", ("wire",)),
    (SparseDDPStrategy, "exchange", ("exchange",)),
    (SparseDDPStrategy, "levels", (0, 3, "two", None)),
    (SparseFabricStrategy, "density", (1.5,)),
    (SparseFabricStrategy, "bucket_cap_mb", (25,)),
    (SparseFabricStrategy, "compressor", ("a2sgd",)),
    (SparseModelParallelStrategy, "compressor", ("a2sgd", "sdagc", "micro", "exdyna")),
    (SparseModelParallelStrategy, "replicas", (0,)),
    (SparseModelParallelStrategy, "data_parallel_size", (1.5,)),
    (SparseModelParallelStrategy, "tensor_parallel_size", (2,)),
    (SparseModelParallelStrategy, "density", (2,)),
]


@pytest.mark.parametrize(("build", "argument", "values"), OUT_OF_RANGE)
def test_arguments_out_of_range_are_refused(build, argument, values):
    error = TypeError if argument == "rules" else ValueError
    for value in values:
        with pytest.raises(error, match=rf"{argument}[=\[]"):
            build(**{argument: value})
