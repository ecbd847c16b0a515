"""Rules that say how much is sent of each parameter, as training goes on; see :class:`AdaptiveDensity`."""

from lightning_sparse.rules.base import Measurement, Moment, Rule
from lightning_sparse.rules.budget import ErrorBudget
from lightning_sparse.rules.hiding import HideCommunication
from lightning_sparse.rules.regime import CriticalRegime
from lightning_sparse.rules.warmup import Warmup

__all__ = ["CriticalRegime", "ErrorBudget", "HideCommunication", "Measurement", "Moment", "Rule", "Warmup"]
