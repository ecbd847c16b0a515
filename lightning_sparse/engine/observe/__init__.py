"""What is SEEN of a step, gathered beside it: nothing here changes a value, or waits for a device unasked."""

from lightning_sparse.engine.observe.facts import StepFacts, compression_ratio, mean_stats
from lightning_sparse.engine.observe.marks import Clock, GroupMarks, Mark, Span, StepMarks
from lightning_sparse.engine.observe.recorder import Recorder
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
