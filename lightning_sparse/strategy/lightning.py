"""Lightning's classes from ``pytorch_lightning`` or ``lightning.pytorch``: the package that was imported first.

The two packages have the same code, but separate classes. All modules of ``lightning_sparse`` import Lightning's
classes from this module, which chooses a package at import time. Type checkers see ``pytorch_lightning``.
"""
# Other modules import these names from this module.
# ruff: noqa: F401

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Optional

_PACKAGES = ("pytorch_lightning", "lightning_fabric", "lightning.pytorch", "lightning.fabric")
_DEFAULT = "pytorch_lightning" if find_spec("pytorch_lightning") else "lightning.pytorch"
_FIRST = next((name for name in sys.modules if name in _PACKAGES), _DEFAULT)
NAME = "lightning.pytorch" if _FIRST.startswith("lightning.") else "pytorch_lightning"

if TYPE_CHECKING or NAME == "pytorch_lightning":
    from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning_fabric.strategies import STRATEGY_REGISTRY
    from lightning_fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
    from lightning_fabric.utilities.exceptions import MisconfigurationException
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.callbacks import LambdaCallback
    from pytorch_lightning.cli import ArgsType, LightningCLI
    from pytorch_lightning.loggers import TensorBoardLogger
    from pytorch_lightning.plugins import AsyncCheckpointIO
    from pytorch_lightning.profilers import PyTorchProfiler
    from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy, ParallelStrategy, StrategyRegistry
    from pytorch_lightning.utilities.exceptions import SIGTERMException
else:
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import LambdaCallback
    from lightning.pytorch.cli import ArgsType, LightningCLI
    from lightning.pytorch.loggers import TensorBoardLogger
    from lightning.pytorch.plugins import AsyncCheckpointIO
    from lightning.pytorch.profilers import PyTorchProfiler
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, ParallelStrategy, StrategyRegistry
    from lightning.pytorch.utilities.exceptions import SIGTERMException

OTHER = "pytorch_lightning" if NAME == "lightning.pytorch" else "lightning.pytorch"
HINT = f"for {NAME}, which this process has imported first; to use {OTHER}, import {OTHER} before {NAME}"


def total_steps_of(trainer: Trainer) -> Optional[int]:
    """Return the maximum number of optimizer steps of the training, or ``None`` if Lightning has no estimate."""
    try:
        total = trainer.estimated_stepping_batches
    except MisconfigurationException:  # ``accumulate_grad_batches`` changes during training
        return None
    return None if total == float("inf") or total < 0 else int(total)  # -1 if a data loader has no length
