"""The rows of the step benchmark: what a user could try, each as Trainer arguments."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Optional

import torch
from paced import FreeSelection
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # public, but not in its __all__
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from virtual import POWER_SGD_WORTH, factored_numel

from lightning_sparse import AdamCorrection, LocalSteps, SparseDDPStrategy, SparseModelParallelStrategy
from lightning_sparse.callbacks import CompressionMonitor, OverlapTimeline
from lightning_sparse.compressors import LAGS
from lightning_sparse.schedule import FixedSize

_ONE_BUCKET_MB = 10_000
_TRIAL_STEPS = {"merged": 76, "auto": 150}  # what schedules that measure first need at most

Shapes = Sequence[Sequence[int]]


class Row(NamedTuple):
    """One way to train.

    Attributes:
        arguments: makes the Trainer's arguments for a number of hosts.
        reduced_bytes: from the shapes of all parameters, the bytes that a rank hands to all-reduces in an exchange;
            ``None`` where the strategy counts what leaves it.
        hook: DDP hook and the maker of its state; Lightning registers hooks on CUDA only.
        batches_per_step: batches between two exchanges.
        local_steps: optimizer steps of a round of local steps, over which times and bytes are averaged.
        trial_steps: steps in which the schedule tries groupings, before it follows a plan.
        callbacks: makes those that the way consists of.
        optimizer: builds the optimizer of some parameters; ``None`` for the workload's.
    """

    arguments: Callable[[int], dict[str, Any]]
    reduced_bytes: Optional[Callable[[Shapes], float]] = None
    hook: Optional[tuple[Callable[[], Any], Callable[..., Any]]] = None
    batches_per_step: int = 1
    local_steps: int = 1
    trial_steps: int = 0
    callbacks: Callable[[], Sequence[Callback]] = tuple
    optimizer: Optional[Callable[[Any], torch.optim.Optimizer]] = None


class RegisterHook(Callback):
    """Register a DDP communication hook on any device."""

    def __init__(self, make_state: Callable[[], Any], hook: Callable[..., Any]) -> None:
        self.make_state = make_state
        self.hook = hook

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Register, now that the model is wrapped."""
        assert isinstance(trainer.strategy.model, DistributedDataParallel)
        trainer.strategy.model.register_comm_hook(self.make_state(), self.hook)


def round_to_bfloat16_hook(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
    """Call torch's bf16 hook; under its own name DDP refuses it on CPU."""
    return default_hooks.bf16_compress_hook(state, bucket)


def dense_bytes(shapes: Shapes) -> float:
    """Return the bytes of all elements in fp32."""
    return 4.0 * sum(_numel(shape) for shape in shapes)


def power_sgd_bytes(shapes: Shapes, rank: int) -> float:
    """Return the bytes that torch's PowerSGD hook hands to its all-reduces, in fp32."""
    return 4.0 * sum(factored_numel(shape, rank) for shape in shapes)


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _power_sgd(rank: int, bucket_cap_mb: int = _ONE_BUCKET_MB) -> Row:
    def make_state() -> powerSGD_hook.PowerSGDState:
        return powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=2, min_compression_rate=POWER_SGD_WORTH
        )

    # With several buckets, the second all-reduces of the hook race with each other on gloo.
    hook = (make_state, powerSGD_hook.powerSGD_hook)
    return _ddp(lambda shapes: power_sgd_bytes(shapes, rank), hook, bucket_cap_mb=bucket_cap_mb)


def _ddp(
    reduced_bytes: Callable[[Shapes], float] = dense_bytes,
    hook: Optional[tuple[Callable[[], Any], Callable[..., Any]]] = None,
    **ddp_arguments: Any,
) -> Row:
    return Row(lambda hosts: {"strategy": DDPStrategy(**ddp_arguments), "num_nodes": hosts}, reduced_bytes, hook)


def _sparse(**arguments: Any) -> Row:
    trial_steps = _TRIAL_STEPS.get(arguments.get("schedule", "merged"), 0)
    return Row(lambda hosts: {"strategy": SparseDDPStrategy(**arguments), "num_nodes": hosts}, trial_steps=trial_steps)


def _hsdp() -> Row:
    """Shard in two replicas, which torch has average gradients whole."""

    def arguments(hosts: int) -> dict[str, Any]:
        return {"strategy": ModelParallelStrategy(data_parallel_size=hosts), "num_nodes": hosts}

    return Row(arguments, lambda shapes: dense_bytes(shapes) / 3)  # of half of them, an all-reduce between two


class ReplicasApart(SparseModelParallelStrategy):
    """Replicas that exchange nothing: what is left of a step where that takes no time."""

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """Exchange nothing, as in a batch that is accumulated."""
        self._bare.require_backward_grad_sync = False
        super().pre_backward(closure_loss)


def _sparse_hsdp(density: float, kind: type[SparseModelParallelStrategy] = SparseModelParallelStrategy) -> Row:
    def arguments(hosts: int) -> dict[str, Any]:
        strategy = kind(density=density, wire="bfloat16", warmup_steps=0, replicas=2)
        return {"strategy": strategy, "num_nodes": hosts}

    return Row(arguments)


def _top_k(density: float, **arguments: Any) -> Row:
    return _sparsifier("topk", density, **arguments)


def _sparsifier(compressor: Any, density: float, **arguments: Any) -> Row:
    # A benchmark has one short epoch, which a warm-up of the density would fill.
    settings = {"compressor": compressor, "density": density, "wire": "bfloat16", "warmup_steps": 0}
    return _sparse(**{**settings, **arguments})


def _scheduled(name: str, compressor: Any, density: float, sizes: Sequence[int] = ()) -> dict[str, Row]:
    """Return a sparsifier under every schedule, by name; without one, it is ``merged``."""
    return {
        f"{name} {density}": _sparsifier(compressor, density),
        **{
            f"{name} {density} {schedule}": _sparsifier(compressor, density, schedule=schedule)
            for schedule in ("single", "layerwise")
        },
        **{
            f"{name} {density} size {size}k": _sparsifier(compressor, density, schedule=FixedSize(size << 10))
            for size in sizes
        },
    }


def _rounds(local_steps: LocalSteps, **arguments: Any) -> Row:
    """Train in rounds of local steps; as a name of a strategy where that is one."""
    return _sparse(local_steps=local_steps, **arguments)._replace(local_steps=int(local_steps.every), trial_steps=0)


def _monitored(row: Row) -> Row:
    """Log every step, of which a user logs one in 50: so that what that costs rises above the noise."""

    def arguments(hosts: int) -> dict[str, Any]:
        return {**row.arguments(hosts), "logger": TensorBoardLogger(tempfile.mkdtemp()), "log_every_n_steps": 1}

    return row._replace(arguments=arguments, callbacks=lambda: [CompressionMonitor()])


def _traced(row: Row, name: str) -> Row:
    """Write one of the last steps down, for a picture."""
    timeline = partial(OverlapTimeline, steps=[row.trial_steps + 6], path=f".benchmarks/overlap/{name}.json")
    return row._replace(callbacks=lambda: [timeline()])


def _adamw(row: Row) -> Row:
    return row._replace(optimizer=partial(torch.optim.AdamW, lr=1e-3))


# Sparse soon: a few steps are measured, not the warm-up of a training.
_CORRECTION = AdamCorrection(warmup_steps=2, density_decay_steps=0, second_moment_interval=20)
AVERAGED_EVERY = 20  # steps, by torch's post-localSGD
_DILOCO = LocalSteps(50, outer_lr=0.7, outer_momentum=0.9, nesterov=True)
_LOCO = LocalSteps(30, residual_decay=0.95)
_ALONE = Row(lambda hosts: {"strategy": SingleDeviceStrategy(torch.device("cpu"))}, lambda shapes: 0.0)


def _in_bfloat16(**ddp_arguments: Any) -> Row:
    return _ddp(lambda shapes: dense_bytes(shapes) / 2, (lambda: None, round_to_bfloat16_hook), **ddp_arguments)


_IN_BFLOAT16 = _in_bfloat16()
BUCKETS_MB = (1, 2, 5, 10)  # limits beside torch's 25
SIZES = tuple(64 << place for place in range(10))  # of the fixed groupings, in units of 1024 elements
DDP = "ddp"
NO_COMMUNICATION = "no communication"
ROWS: dict[str, Row] = {
    NO_COMMUNICATION: _ALONE,
    DDP: _ddp(),
    "ddp, bucket view": _ddp(gradient_as_bucket_view=True),
    **{f"ddp, {size} MB": _ddp(bucket_cap_mb=size) for size in BUCKETS_MB},
    "ddp + bf16 hook": _IN_BFLOAT16,
    **{f"ddp + bf16 hook, {size} MB": _in_bfloat16(bucket_cap_mb=size) for size in BUCKETS_MB},
    **{f"ddp + PowerSGD rank {rank}, 5 MB": _power_sgd(rank, 5) for rank in (1, 2, 4)},
    "ddp + PowerSGD rank 1": _power_sgd(1),
    "ddp + PowerSGD rank 4": _power_sgd(4),
    "ddp, accumulate 2": Row(
        lambda hosts: {"strategy": DDPStrategy(), "num_nodes": hosts, "accumulate_grad_batches": 2},
        dense_bytes,
        batches_per_step=2,
    ),
    "sparse_dense": _sparse(compressor="dense"),
    "sparse_topk 0.01": _top_k(0.01),
    "sparse_topk 0.01, gather": _top_k(0.01, exchange="gather"),
    "sparse_topk 0.01, owners": _top_k(0.01, exchange="owners"),
    "sparse_topk 0.001": _top_k(0.001),
    "sparse_lags 0.001, every step logged": _monitored(_sparsifier("lags", 0.001)),
    "sparse_exdyna 0.001": _sparsifier("exdyna", 0.001),
    "sparse_micro 0.001": _sparsifier("micro", 0.001),
    "sparse_sdagc 0.001": _sparsifier("sdagc", 0.001),
    "sparse_dgc 0.001": _sparsifier("dgc", 0.001),
    "no communication, AdamW": _adamw(_ALONE),
    "ddp, AdamW": _adamw(_ddp()),
    "ddp + bf16 hook, AdamW": _adamw(_IN_BFLOAT16),
    "ddp + PowerSGD rank 1, AdamW": _adamw(_power_sgd(1)),
    "ddp + PowerSGD rank 4, AdamW": _adamw(_power_sgd(4)),
    "sparse_lags 0.01, AdamW": _adamw(_sparsifier("lags", 0.01, optimizer_correction=_CORRECTION)),
    "sparse_lags 0.01 4bit, AdamW": _adamw(_sparsifier("lags", 0.01, wire="4bit", optimizer_correction=_CORRECTION)),
    "sparse_auto 0.01, AdamW": _adamw(_sparsifier("lags", 0.01, schedule="auto", optimizer_correction=_CORRECTION)),
    "sparse_lags 0.001, AdamW": _adamw(_sparsifier("lags", 0.001, optimizer_correction=_CORRECTION)),
    "sparse_diloco, AdamW": _adamw(_rounds(replace(_DILOCO, every=20), compressor="dense")),
    "sparse_loco, AdamW": _adamw(_rounds(_LOCO, density=1 / 64, wire="2bit")),
    "5 local steps, topk 0.05, AdamW": _adamw(_rounds(LocalSteps(5), density=0.05, wire="bfloat16")),
    "sparse_topk 0.01, AdamW": _adamw(_top_k(0.01, optimizer_correction=_CORRECTION)),
    "sparse_topk 0.001, AdamW": _adamw(_top_k(0.001, optimizer_correction=_CORRECTION)),
    "sparse_topk 0.001, AdamW, learning": _adamw(
        _top_k(
            0.001, optimizer_correction=AdamCorrection(warmup_steps=2, density_decay_steps=0, second_moment_interval=5)
        )
    ),
    "sparse_topk 0.001, AdamW, dense steps": _adamw(
        _top_k(0.001, wire="float32", schedule="single", optimizer_correction=AdamCorrection(warmup_steps=10_000))
    ),
    "sparse_topk 0.001, AdamW, uncorrected": _adamw(_top_k(0.001, optimizer_correction=None)),
    "sparse_diloco": _rounds(_DILOCO, compressor="dense"),
    "sparse_loco": _rounds(_LOCO, density=1 / 64, wire="2bit"),
    "hsdp": _hsdp(),
    "sparse_hsdp 0.01": _sparse_hsdp(0.01),
    "hsdp, replicas apart": _sparse_hsdp(0.01, ReplicasApart)._replace(reduced_bytes=lambda shapes: 0.0),
    "sparse_a2sgd": _sparse(compressor="a2sgd"),
    "sparse_qsgd": _sparse(compressor="qsgd"),
    "sparse_topk 0.001 float32": _top_k(0.001, wire="float32"),
    "sparse_topk 0.001 layerwise": _top_k(0.001, schedule="layerwise"),
    "sparse_topk 0.001 single": _top_k(0.001, schedule="single"),
    "sparse_auto 0.001": _sparsifier("lags", 0.001, schedule="auto"),
    "sparse_auto 0.001 float32": _sparsifier("lags", 0.001, schedule="auto", wire="float32"),
    "sparse_auto 0.01": _sparsifier("lags", 0.01, schedule="auto"),
    "sparse_omgs 0.001": _sparsifier("omgs", 0.001),
    "sparse_omgs 0.01": _sparsifier("omgs", 0.01),
    "sparse_exdyna 0.01": _sparsifier("exdyna", 0.01),
    "sparse_lags 0.001, adaptive": _sparsifier(LAGS(adaptive_density=True), 0.001),
    **_scheduled("sparse_lags", "lags", 0.001, SIZES),
    **_scheduled("sparse_lags", "lags", 0.01, SIZES),
    "sparse_lags 0.01, traced": _traced(_sparsifier("lags", 0.01), "merged"),
    "sparse_lags 0.01 single, traced": _traced(_sparsifier("lags", 0.01, schedule="single"), "single"),
    **_scheduled("free selection", FreeSelection(), 0.001),
    **_scheduled("free selection", FreeSelection(), 0.01),
}
DEFAULT_ROWS = [
    NO_COMMUNICATION,
    DDP,
    "ddp + bf16 hook",
    "ddp + PowerSGD rank 1",
    "ddp + PowerSGD rank 4",
    "ddp, accumulate 2",
    "sparse_dense",
    "sparse_topk 0.01",
    "sparse_topk 0.001",
    "sparse_topk 0.001 layerwise",
    "sparse_topk 0.001 single",
]
