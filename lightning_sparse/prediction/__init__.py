"""Prediction: WILL IT PAY, for a model and a network, before anything is trained over it."""

from lightning_sparse.prediction.candidates import (
    DENSITIES,
    BucketedDDP,
    Candidate,
    EngineSystem,
    measure_candidates,
)
from lightning_sparse.prediction.measured import measure_network
from lightning_sparse.prediction.picture import draw, figure_class
from lightning_sparse.prediction.profile import BackwardProfile
from lightning_sparse.prediction.rehearsal import SelectionCost, SettingsOf, StageCost
from lightning_sparse.prediction.report import as_json, as_table
from lightning_sparse.prediction.systems import SystemPrediction, best_of, predict_systems
from lightning_sparse.schedule.network import Network

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
    "predict_systems",
]
