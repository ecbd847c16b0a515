# Written by `python -m tests.helpers.stubs` from the source that this module is made of.

from collections.abc import Sequence
from lightning.pytorch import Callback
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer
from lightning_sparse.callbacks.layer_delta import LayerDelta as LayerDelta
from lightning_sparse.compressors.density import CriticalRegime as CriticalRegime
from lightning_sparse.compressors.density import ErrorBudget as ErrorBudget
from lightning_sparse.compressors.density import Measurement as Measurement
from lightning_sparse.compressors.density import Moment as Moment
from lightning_sparse.compressors.density import Rule as Rule
from lightning_sparse.compressors.density import Warmup as Warmup
from lightning_sparse.engine import Engine
from lightning_sparse.lightning.strategy import SparseDDPStrategy
from pathlib import Path
from typing import ClassVar
from typing import Optional
from typing import Union

class StepObserver(Callback):
    cure: ClassVar[str]

    def looks_at(self, trainer: Trainer, step: int) -> bool:
        ...

    def before_step(self, trainer: Trainer, engine: Engine) -> None:
        ...

    def after_step(self, trainer: Trainer, pl_module: LightningModule, strategy: SparseDDPStrategy, step: int) -> None:
        ...
class AdaptiveDensity(StepObserver):

    def __init__(self, rules: Sequence[Rule], max_density: float=..., every_n_steps: int=...) -> None:
        ...
class AssumptionMonitor(StepObserver):

    def __init__(self, every_n_steps: int=...) -> None:
        ...
class CompressionMonitor(StepObserver):

    def __init__(self, progress_bar: bool=..., by_parameter: bool=..., histograms: bool=..., pictures: bool=...) -> None:
        ...
class MomentumCorrection(StepObserver):
    cure: ClassVar[str]

    def __init__(self, momentum: Union[float, str]=..., nesterov: bool=..., masks_momentum: bool=..., clip_norm: Optional[float]=...) -> None:
        ...
class OverlapTimeline(StepObserver):

    def __init__(self, steps: Optional[Sequence[int]]=..., every_n_steps: Optional[int]=..., max_steps: int=..., path: Optional[Union[str, Path]]=..., pictures: bool=...) -> None:
        ...
class ReplicaError(RuntimeError):
    ...
class ReplicaSentinel(StepObserver):
    actions: ClassVar[tuple[str, ...]]

    def __init__(self, every_n_steps: int=..., action: str=...) -> None:
        ...
class RequeueAtStepEnd(Callback):

    def __init__(self) -> None:
        ...
