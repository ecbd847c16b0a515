"""What is SEEN of a step, gathered beside it: nothing here changes a value, or waits for a device unasked."""

from lightning_sparse.engine.observe.record import (
    Clock,
    GroupMarks,
    Mark,
    Recorder,
    Span,
    StepFacts,
    StepMarks,
    compression_ratio,
    mean_stats,
)
from lightning_sparse.engine.observe.samples import ParameterSamples

__all__ = [
    "Clock",
    "GroupMarks",
    "Mark",
    "ParameterSamples",
    "Recorder",
    "Span",
    "StepFacts",
    "StepMarks",
    "compression_ratio",
    "mean_stats",
]
