# pyright: strict, reportUnnecessaryTypeIgnoreComment=error
"""A user's script, as type checkers see it: `make lint`.

The last two lines are wrong. A checker that does not find them wrong has nothing to check them by, and says that it is
told to ignore nothing.
"""

from pytorch_lightning import Trainer

from lightning_sparse import SparseDDPStrategy, SparseFabricModelParallelStrategy, SparseFabricStrategy
from lightning_sparse.callbacks import AdaptiveDensity, CompressionMonitor, Warmup

trainer = Trainer(
    strategy=SparseDDPStrategy(compressor="topk", density=0.01),
    callbacks=[CompressionMonitor(progress_bar=True), AdaptiveDensity([Warmup(2)])],
)
sent: float = SparseDDPStrategy().compression_stats()["density"]
SparseFabricStrategy(compressor="topk", density=0.01).set_epoch(0)
SparseFabricModelParallelStrategy(lambda model, mesh: model, density=0.01).set_epoch(0)
wrong: int = SparseDDPStrategy().compression_stats()  # type: ignore[assignment]
CompressionMonitor(progress_bar="yes")  # type: ignore[arg-type]
