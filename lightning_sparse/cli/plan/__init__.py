"""The command ``lightning-sparse plan``: WILL IT PAY? Profiles a model here, and says what its steps would take."""

from lightning_sparse.cli.plan.backward_profile import BackwardProfile
from lightning_sparse.cli.plan.candidates import (
    DENSITIES,
    BucketedDDP,
    Candidate,
    EngineSystem,
    measure_candidates,
)
from lightning_sparse.cli.plan.command import plan
from lightning_sparse.cli.plan.forecast import SystemPrediction, best_of, predict_systems
from lightning_sparse.cli.plan.measured import measure_network
from lightning_sparse.cli.plan.model import profile_model
from lightning_sparse.cli.plan.picture import draw, figure_class
from lightning_sparse.cli.plan.rehearsal import SelectionCost, SettingsOf, StageCost
from lightning_sparse.cli.plan.report import as_json, as_table
from lightning_sparse.schedule.cost.network import Network

__all__ = [
    "DENSITIES",
    "BackwardProfile",
    "BucketedDDP",
    "Candidate",
    "EngineSystem",
    "Network",
    "SelectionCost",
    "SettingsOf",
    "StageCost",
    "SystemPrediction",
    "as_json",
    "as_table",
    "best_of",
    "draw",
    "figure_class",
    "measure_candidates",
    "measure_network",
    "plan",
    "predict_systems",
    "profile_model",
]
