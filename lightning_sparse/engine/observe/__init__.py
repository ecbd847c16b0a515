"""Observers: facts about a step, gathered beside it. Nothing here touches a value or waits for a device unasked."""

from lightning_sparse.engine.observe.clock import Clock, Mark
from lightning_sparse.engine.observe.facts import StepFacts, StepVolume, compression_ratio, mean_stats, plain_stats
from lightning_sparse.engine.observe.marks import GroupMarks, Span, StepMarks
from lightning_sparse.engine.observe.recorder import GroupObserver, Recorder
from lightning_sparse.engine.observe.samples import ParameterFacts, ParameterSamples

__all__ = [
    "Clock",
    "GroupMarks",
    "GroupObserver",
    "Mark",
    "ParameterFacts",
    "ParameterSamples",
    "Recorder",
    "Span",
    "StepFacts",
    "StepMarks",
    "StepVolume",
    "compression_ratio",
    "mean_stats",
    "plain_stats",
]
