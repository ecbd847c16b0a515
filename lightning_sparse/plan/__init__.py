"""The command ``lightning-sparse plan``: profiles a model here, and says what its steps would take over a network."""

from lightning_sparse.plan.command import plan
from lightning_sparse.plan.model import profile_model

__all__ = ["plan", "profile_model"]
