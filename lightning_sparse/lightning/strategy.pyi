# Written by `python -m tests.helpers.stubs` from the source that this module is made of.

from lightning.fabric.strategies import ddp as fabric_ddp
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.feedback import AdamCorrection
from lightning_sparse.compressors.feedback import ErrorFeedback
from lightning_sparse.loop.sparsify import Sparsifier
from lightning_sparse.engine.wire import Owners
from lightning_sparse.schedule import Plan
from lightning_sparse.schedule import Schedule
from torch.nn import Module
from typing import Any
from typing import Optional
from typing import Union

class SparseDDPStrategy(DDPStrategy):

    def __init__(self, compressor: Union[str, Compressor]=..., density: Optional[float]=..., schedule: Union[str, Schedule]=..., wire: str=..., warmup_epochs: Optional[int]=..., resume_compression: bool=..., optimizer_correction: Union[str, AdamCorrection, None]=..., exchange: Union[str, Owners]=..., overlaps_backward: bool=..., local_steps: Union[int, str]=..., outer_lr: float=..., outer_momentum: float=..., nesterov: bool=..., residual_decay: float=..., overlap_steps: int=..., fragments: int=..., synchronous_steps: int=..., levels: Union[str, int]=..., gradient_as_bucket_view: bool=..., **ddp_kwargs: Any) -> None:
        ...

    @property
    def is_plain(self) -> bool:
        ...

    def compression_stats(self) -> dict[str, float]:
        ...

    def exchange_plan(self) -> Optional[Plan]:
        ...

    def remember(self, stats: dict[str, float], plan: Optional[Plan]) -> None:
        ...

    def correct_momentum(self, correction: Optional[ErrorFeedback]) -> None:
        ...

    @property
    def meetings(self) -> Optional[int]:
        ...

    @property
    def checkpoint_io(self) -> CheckpointIO:
        ...

    @checkpoint_io.setter
    def checkpoint_io(self, plugin: CheckpointIO) -> None:
        ...
class SparseFabricStrategy(fabric_ddp.DDPStrategy):

    def __init__(self, compressor: Union[str, Compressor]=..., density: Optional[float]=..., schedule: Union[str, Schedule]=..., wire: str=..., warmup_epochs: Optional[int]=..., resume_compression: bool=..., optimizer_correction: Union[str, AdamCorrection, None]=..., exchange: Union[str, Owners]=..., overlaps_backward: bool=..., total_steps: Optional[int]=..., gradient_as_bucket_view: bool=..., **ddp_kwargs: Any) -> None:
        ...

    def handle(self, model: Optional[Module]=...) -> Optional[Sparsifier]:
        ...

    def compression_stats(self, model: Optional[Module]=...) -> dict[str, float]:
        ...

    def exchange_plan(self, model: Optional[Module]=...) -> Optional[Plan]:
        ...

    def set_epoch(self, epoch: int) -> None:
        ...

    def close(self) -> None:
        ...

    @property
    def checkpoint_io(self) -> CheckpointIO:
        ...

    @checkpoint_io.setter
    def checkpoint_io(self, plugin: CheckpointIO) -> None:
        ...
