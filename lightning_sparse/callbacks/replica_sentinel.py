"""Watch that all ranks train one and the same model."""

from typing import ClassVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_sparse.callbacks.base import StepObserver
from lightning_sparse.compressors.base import checked_count
from lightning_sparse.compressors.registry import checked_name
from lightning_sparse.engine.collectives import gather_together
from lightning_sparse.functional.reductions import fingerprint
from lightning_sparse.jobs.lightning import LightningModule, Trainer
from lightning_sparse.strategy.trainer import SparseDDPStrategy


class ReplicaError(RuntimeError):
    """The parameters of two ranks differ, and should not."""


class ReplicaSentinel(StepObserver):
    """Compare a fingerprint of every parameter over ranks, and name the first that differs.

    Replicas stay bit-identical by construction; what makes them differ is a parameter changed on some ranks only, a
    layer outside the model that DDP knows, or failing hardware. A comparison reads the parameters once and gathers
    eight bytes for each; other steps cost nothing.

    Args:
        every_n_steps: compare after every so many steps.
        action: ``"raise"`` to end training on all ranks, ``"warn"`` to go on.

    Raises:
        ValueError: for an interval below 1 or an unknown action; at the start of ``fit``, if replicas drift by design.
        ReplicaError: in training, when a parameter differs.

    Example::

        >>> sentinel = ReplicaSentinel(every_n_steps=1000, action="warn")
    """

    actions: ClassVar[tuple[str, ...]] = ("raise", "warn")

    def __init__(self, every_n_steps: int = 100, action: str = "raise") -> None:
        self.every_n_steps = checked_count("every_n_steps", every_n_steps, "steps")
        self.action = checked_name("action", action, self.actions)

    @override
    def after_step(self, trainer: Trainer, pl_module: LightningModule, strategy: SparseDDPStrategy, step: int) -> None:
        parameters = dict(pl_module.named_parameters())
        rows = torch.stack(gather_together(torch.stack(list(map(fingerprint, parameters.values()))).cpu()))
        differs = (rows != rows[0]).any(dim=0)
        if not differs.any():
            return
        names = [name for name, is_different in zip(parameters, differs.tolist()) if is_different]
        column = rows[:, list(parameters).index(names[0])]
        ranks = [rank for rank, is_different in enumerate((column != column[0]).tolist()) if is_different]
        message = (
            f"after step {step} the parameter {names[0]!r} differs from rank 0's on rank {', '.join(map(str, ranks))}"
            f" ({len(names)} of {len(parameters)} parameters differ): what ranks train is no longer one model. Look for"
            " code that changes parameters on some ranks only; go on from a checkpoint that was saved before"
        )
        if self.action == "raise":
            raise ReplicaError(message)
        rank_zero_warn(message)
