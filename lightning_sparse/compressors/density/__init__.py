"""Rules that say how much is sent of each parameter, as training goes on; see :class:`AdaptiveDensity`."""

from lightning_sparse.compressors.density.critical_regime import CriticalRegime
from lightning_sparse.compressors.density.error_budget import ErrorBudget
from lightning_sparse.compressors.density.rule import Measurement, Rule, RuleContext
from lightning_sparse.compressors.density.warmup import Warmup

__all__ = ["CriticalRegime", "ErrorBudget", "Measurement", "Rule", "RuleContext", "Warmup"]
