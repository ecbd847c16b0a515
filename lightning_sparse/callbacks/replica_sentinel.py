"""A check that all ranks train bitwise identical replicas."""

from typing_extensions import override

from lightning_sparse.callbacks.base import StepObserver
from lightning_sparse.compressors.base import checked_count
from lightning_sparse.engine import Engine
from lightning_sparse.loop.checks import check_replicas
from lightning_sparse.strategy.lightning import Trainer


class ReplicaSentinel(StepObserver):
    """Compare an 8-byte fingerprint of every parameter between ranks, and name the first parameter that differs.

    Args:
        every_n_steps: optimizer steps between two checks.

    Raises:
        ValueError: for an invalid argument. At the start of ``fit``, if the settings let replicas differ by design.
        ReplicaError: in training, when a parameter differs.

    Example::

        >>> sentinel = ReplicaSentinel(every_n_steps=1000)
    """

    def __init__(self, every_n_steps: int = 100) -> None:
        self.every_n_steps = checked_count("every_n_steps", every_n_steps, "steps")

    @override
    def after_step(self, trainer: Trainer, engine: Engine, step: int) -> None:
        check_replicas(engine, f"after step {step}")
