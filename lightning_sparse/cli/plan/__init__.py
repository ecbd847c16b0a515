"""The command ``lightning-sparse plan``: WILL IT PAY? Profiles a model here, and says what its steps would take."""

from lightning_sparse.cli.plan.command import plan
from lightning_sparse.cli.plan.forecast import (
    DENSITIES,
    Candidate,
    SystemPrediction,
    best_of,
    measure_candidates,
    predict_systems,
)
from lightning_sparse.cli.plan.model import profile_model
from lightning_sparse.cli.plan.profiler import BackwardProfile
from lightning_sparse.cli.plan.rehearsal import SelectionCost, SettingsOf, StageCost
from lightning_sparse.cli.plan.report import as_json, as_table, draw
from lightning_sparse.schedule.cost.network import Network

__all__ = [
    "DENSITIES",
    "BackwardProfile",
    "Candidate",
    "Network",
    "SelectionCost",
    "SettingsOf",
    "StageCost",
    "SystemPrediction",
    "as_json",
    "as_table",
    "best_of",
    "draw",
    "measure_candidates",
    "plan",
    "predict_systems",
    "profile_model",
]
