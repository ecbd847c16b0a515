# pyright: strict, reportUnnecessaryTypeIgnoreComment=error
"""A user's script for the type checkers of `make lint`.

The last three lines are wrong. A checker without types reports their ``type: ignore`` comments as unnecessary.
"""

import torch
from pytorch_lightning import Trainer

from lightning_sparse import (
    LocalSteps,
    SparseDDPStrategy,
    SparseFabricStrategy,
    sparsify_gradients,
)
from lightning_sparse.callbacks import AdaptiveDensity, CompressionMonitor, ErrorBudget

trainer = Trainer(
    strategy=SparseDDPStrategy(compressor="topk", density=0.01, wire="bfloat16", find_unused_parameters=True),
    callbacks=[CompressionMonitor(progress_bar=True), AdaptiveDensity([ErrorBudget(2.0)])],
)
sent: float = SparseDDPStrategy().compression_stats()["density"]
SparseFabricStrategy(compressor="topk", density=0.01, warmup_steps=0.1, total_steps=100).synchronize()
model = torch.nn.Linear(2, 2)
sparsify_gradients(
    model, torch.optim.SGD(model.parameters()), "lags", local_steps=LocalSteps(5), total_steps=10
).close()
wrong: int = SparseDDPStrategy().compression_stats()  # type: ignore[assignment]
CompressionMonitor(progress_bar="yes")  # type: ignore[arg-type]
SparseDDPStrategy(density=0.01, wire=16)  # type: ignore[arg-type]
