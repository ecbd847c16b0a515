"""The rows of the step benchmark: what a user could try, each as Trainer arguments."""

from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.schedule import Merged

ONE_BUCKET_MB = 10_000


class Row(NamedTuple):
    """One way to train.

    Attributes:
        arguments: makes the Trainer's arguments for a number of hosts.
        hook: DDP hook and the maker of its state; Lightning registers hooks on CUDA only.
        batches_per_step: batches between two exchanges.
    """

    arguments: Callable[[int], dict[str, Any]]
    hook: Optional[tuple[Callable[[], Any], Callable[..., Any]]] = None
    batches_per_step: int = 1


class RegisterHook(Callback):
    """Register a DDP communication hook on any device."""

    def __init__(self, make_state: Callable[[], Any], hook: Callable[..., Any]) -> None:
        self.make_state = make_state
        self.hook = hook

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Register, now that the model is wrapped."""
        trainer.strategy.model.register_comm_hook(self.make_state(), self.hook)


def round_to_bfloat16_hook(state: None, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """Call torch's bf16 hook; under its own name DDP refuses it on CPU."""
    return default_hooks.bf16_compress_hook(state, bucket)


def _power_sgd(rank: int) -> tuple[Callable[[], Any], Callable[..., Any]]:
    def make_state() -> powerSGD_hook.PowerSGDState:
        return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)

    return make_state, powerSGD_hook.powerSGD_hook


def _ddp(**ddp_arguments: Any) -> Callable[[int], dict[str, Any]]:
    return lambda hosts: {"strategy": DDPStrategy(**ddp_arguments), "num_nodes": hosts}


def _sparse(**arguments: Any) -> Callable[[int], dict[str, Any]]:
    return lambda hosts: {"strategy": SparseDDPStrategy(**arguments), "num_nodes": hosts}


ROWS: dict[str, Row] = {
    "no communication": Row(lambda hosts: {"strategy": SingleDeviceStrategy(torch.device("cpu"))}),
    "ddp": Row(_ddp()),
    "ddp + bf16 hook": Row(_ddp(), hook=(lambda: None, round_to_bfloat16_hook)),
    "ddp + PowerSGD rank 1": Row(_ddp(bucket_cap_mb=ONE_BUCKET_MB), hook=_power_sgd(1)),
    "ddp + PowerSGD rank 4": Row(_ddp(bucket_cap_mb=ONE_BUCKET_MB), hook=_power_sgd(4)),
    "ddp, accumulate 2": Row(lambda hosts: {**_ddp()(hosts), "accumulate_grad_batches": 2}, batches_per_step=2),
    "sparse_dense": Row(_sparse(compressor="dense")),
    "sparse_topk 0.01": Row(_sparse(density=0.01, wire="bfloat16")),
    "sparse_topk 0.001": Row(_sparse(density=0.001, wire="bfloat16")),
    "sparse_topk 0.001 float32": Row(_sparse(density=0.001)),
    "sparse_topk 0.001 layerwise": Row(_sparse(density=0.001, wire="bfloat16", schedule="layerwise")),
    "sparse_topk 0.001 single": Row(_sparse(density=0.001, wire="bfloat16", schedule="single")),
    **{
        f"sparse_topk 0.001 merged {size}": Row(
            _sparse(density=0.001, wire="bfloat16", schedule=Merged(min_elements=int(float(size) * (1 << 20))))
        )
        for size in ("0.25", "1", "2", "8")
    },
}
