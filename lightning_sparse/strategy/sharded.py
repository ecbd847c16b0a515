"""The strategy of models that do not fit: FSDP inside a replica, as users set it up, and ours between replicas."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, Optional, Union

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.base import Clipping
from lightning_sparse.engine.adam.correction import AdamCorrection
from lightning_sparse.engine.collectives import copy_from_first, gather_together
from lightning_sparse.engine.settings import AUTO, LocalSteps, Row, Settings, refusal_of_shares, refuse, rounds_of
from lightning_sparse.engine.step.shards import ShardedModel, ShardStream
from lightning_sparse.engine.wire.owners import Owners
from lightning_sparse.functional.elements import held_of
from lightning_sparse.loop.checks import check_parameters
from lightning_sparse.loop.loop import Loop
from lightning_sparse.loop.optimizers import TrainedParameters, listed
from lightning_sparse.schedule import FixedSize, Plan
from lightning_sparse.strategy.checkpoints import (
    Checkpointer,
    PathLike,
    Save,
    on_host,
    restore,
    saved_layouts,
)
from lightning_sparse.strategy.lightning import ModelParallelStrategy, Trainer
from lightning_sparse.strategy.trainer import SparseStrategy, clipping_of, total_steps_of

NODES = "nodes"
_MESH = ("replicate", "data_parallel", "tensor_parallel")
_SHARD = 'fully_shard(layer, mesh=self.device_mesh["data_parallel"])'


class SparseModelParallelStrategy(SparseStrategy, ModelParallelStrategy):
    """Sharded training (FSDP2) in replicas that send each other only the largest part of each gradient.

    Everything else is :class:`~pytorch_lightning.strategies.ModelParallelStrategy`, and ``configure_model`` stays as it
    is: ``self.device_mesh`` has its two names, and is the part of one replica. Inside a replica FSDP averages gradients
    whole; then each rank exchanges its shards with the ranks of the other replicas that hold the same ones. What is not
    sent stays in a residual on that rank: 4 bytes for each element of its shards.

    Args:
        compressor: as of :class:`~lightning_sparse.SparseDDPStrategy`, of those that can work on shards: ``topk``,
            ``lags``, ``omgs``, ``dgc``, ``dense``.
        density: as there, like the following.
        wire: see there.
        warmup_epochs: see there.
        resume_compression: see there.
        optimizer_correction: see there.
        exchange: see there.
        local_steps: 1: shards are exchanged in every step, and rounds of local steps between replicas are not there.
        replicas: how many replicas there are, of ranks that follow one another; ``"nodes"`` for one on each node.
        data_parallel_size: ranks over which FSDP shards, in a replica; ``"auto"`` for all that there are.
        **model_parallel: other arguments of ``ModelParallelStrategy``; of ``tensor_parallel_size`` only 1.

    Attributes:
        settings: what the user chose, checked.

    Raises:
        ValueError: for an unknown name, a density out of range, a compressor that cannot work on shards, or rounds.

    Example::

        >>> SparseModelParallelStrategy(density=0.01, replicas=2).compression_stats()
        {}
    """

    holds_shards: ClassVar[bool] = True

    def __init__(
        self,
        compressor: Union[str, Compressor] = "lags",
        density: Optional[float] = None,
        wire: str = "float32",
        warmup_epochs: Optional[int] = None,
        resume_compression: bool = True,
        optimizer_correction: Union[str, AdamCorrection, None] = AUTO,
        exchange: Union[str, Owners] = AUTO,
        local_steps: Union[int, str, LocalSteps] = 1,
        replicas: Union[str, int] = NODES,
        data_parallel_size: Union[str, int] = AUTO,
        **model_parallel: Any,
    ) -> None:
        self.settings = Settings(
            compressor,
            density,
            FixedSize(),  # nothing overlaps with backward, so nothing is gained by another
            wire,
            warmup_epochs,
            optimizer_correction,
            exchange,
            overlaps_backward=False,
        )
        sizes = {"replicas": replicas, "data_parallel_size": data_parallel_size}
        layers = model_parallel.pop("tensor_parallel_size", 1)
        refuse(*_of_shards(self.settings, local_steps, layers, sizes))
        self._replicas = replicas
        self._loop = Loop(self.settings, self._say)
        self._checkpointer = Checkpointer(self, resume_compression)
        self._is_blocked = self._has_failed = False
        super().__init__(data_parallel_size, tensor_parallel_size=1, **model_parallel)  # type: ignore[arg-type]

    def compression_stats(self) -> dict[str, float]:
        """Return what the last step's exchange, and all of them, did on this rank; empty before the first step.

        As of :meth:`~lightning_sparse.SparseDDPStrategy.compression_stats`, of what replicas send to each other:
        ``dense_bytes`` are those of HSDP's all-reduce of this rank's shards in fp32.
        """
        return self._loop.stats()

    def exchange_plan(self) -> Optional[Plan]:
        """Return ``None``: nothing overlaps with backward, so that nothing is planned."""
        return None

    @override
    def setup_environment(self) -> None:
        super(ModelParallelStrategy, self).setup_environment()
        self._setup_distributed()
        shape = self._mesh_shape()
        self._whole_mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=_MESH)
        self._data_parallel_size = shape[1]
        self._device_mesh = self._whole_mesh[_MESH[1:]]
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    def _mesh_shape(self) -> tuple[int, int, int]:
        """Return how many replicas there are, over how many ranks each is sharded, and that layers are not divided."""
        replicas = self.num_nodes if self._replicas == NODES else int(self._replicas)
        shards = self.world_size // replicas if self._data_parallel_size == AUTO else int(self._data_parallel_size)
        if replicas * shards != self.world_size:
            raise ValueError(
                f"replicas={replicas} and data_parallel_size={shards} multiplied must be the number of ranks,"
                f" {self.world_size}"
            )
        return replicas, shards, 1

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        assert self.lightning_module is not None
        module = self.lightning_module
        check_parameters(module)
        self._has_failed = False
        _refuse_together(_of_the_model(module, self.device_mesh, self.root_device))
        same_shards = self._whole_mesh.get_group(_MESH[0])
        copy_from_first([*map(held_of, module.parameters()), *module.buffers()], same_shards)
        super().setup_optimizers(trainer)
        replicas, shards, _ = self._whole_mesh.shape
        self._checkpointer.node_ranks, self._checkpointer.same_shards = shards, same_shards
        if replicas == 1:
            self._say("one replica, so there is nothing to exchange or compress: this is ModelParallelStrategy.")
            return
        self._sharded = ShardedModel(module)
        self._trained = TrainedParameters(module)
        value = trainer.gradient_clip_val
        clipping = Clipping() if value is None else clipping_of(value, trainer.gradient_clip_algorithm)
        scaler = getattr(self.precision_plugin, "scaler", None)
        self._loop.start(self._sharded, self.optimizers, self._timeout, scaler, clipping, shards)
        self._give_back()  # where users have optimizers set up anew
        if self._loop.corrects_adam:
            self._clip_gradients = self.precision_plugin.clip_gradients
            self.precision_plugin.clip_gradients = self._clip  # type: ignore[method-assign]  # given back in teardown

    def _give_back(self) -> None:
        vars(self.precision_plugin).pop("clip_gradients", None)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self._loop.corrects_adam:
            self._loop.expect_steps(total_steps_of(self._trainer))
        if self.engine is not None:
            self._checkpointer.restore(self._restore)
        elif self._checkpointer.has_loaded_save:
            self._say("one replica: what several had kept for later steps is not used.")
        self._checkpointer.loaded = None
        self._loop.resume()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._loop.epoch = self._trainer.current_epoch
        if self.engine is not None and self._trained.have_changed(self.optimizers):
            self._trained.agree(self._loop.unfinished.is_begun, self.global_rank, self.world_size, self._timeout)
            self._loop.detach(is_plain=False)
            self._trained = TrainedParameters(self._sharded.module)
            self._loop.attach(self._sharded, is_plain=False)
        return super().training_step(*args, **kwargs)

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Have FSDP add up gradients whole inside, where Lightning knows of DDP only, and exchange nothing."""
        self._synchronize(False)
        try:
            yield
        finally:
            self._synchronize(True)

    def _synchronize(self, synchronizes: bool) -> None:
        self._is_blocked = not synchronizes
        assert self.lightning_module is not None
        for module in self.lightning_module.modules():
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(synchronizes, recurse=False)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        self._loop.wants_plain()  # it looks whether Adam's second moment is known; no step is left to others
        self._loop.begin(is_automatic=True)
        super().pre_backward(closure_loss)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self.engine is not None and not self._is_blocked:
            assert isinstance(self.engine.stream, ShardStream)
            self.engine.stream.exchange()
        self._loop.end_backward()

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with self._loop.step_of(optimizer):
            return super().optimizer_step(optimizer, *args, **kwargs)

    def _held(self) -> dict[str, Tensor]:
        assert self.lightning_module is not None
        return {name: held_of(each) for name, each in self.lightning_module.named_parameters()}

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: PathLike, storage_options: Optional[Any] = None
    ) -> None:
        # Lightning leaves the optimizers out where the user wants the weights only.
        kept = self._loop.state() if "optimizer_states" in checkpoint else None
        if kept is not None:
            kept["layouts"] = saved_layouts(self._held())
        name, write_file = type(self.settings.compressor).__name__, super().save_checkpoint
        self._checkpointer.save(kept, name, checkpoint, filepath, storage_options, write_file)

    @override
    def load_checkpoint(self, checkpoint_path: PathLike, weights_only: Optional[bool] = None) -> dict[str, Any]:
        with ExitStack() as loading:
            for optimizer in self.optimizers:  # torch makes a step of zeros to have something to load into
                loading.enter_context(self._loop.step_of(optimizer, counts=False))
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._checkpointer.note(checkpoint, checkpoint_path)
        return checkpoint

    def _restore(self, kept: dict[str, Any], save: Save, path: str) -> Sequence[str]:
        """Give the engine what this rank had kept of its shards; return what it cannot use."""
        whole = save._replace(node_ranks=1)  # of its shards a rank keeps all
        return restore(self._loop, kept, whole, self._held(), path)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._has_failed = True
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self._give_back()
        self._loop.end(self._has_failed, keep=on_host)
        super().teardown()
        self._checkpointer.close()


def _of_shards(settings: Settings, local_steps: Any, layers: Any, sizes: Mapping[str, Any]) -> Iterator[Row]:
    """Yield what there is no place for where every rank holds a shard."""
    compressor = type(settings.compressor).__name__
    yield (
        not settings.can_have_levels,
        f"compressor={compressor} {refusal_of_shares(settings.compressor)}, and here each rank has shards alone: choose"
        " 'topk', 'lags', 'omgs', 'dgc' or 'dense'",
    )
    yield (
        rounds_of(local_steps) is not None,
        f"local_steps={local_steps!r} asks for rounds between replicas, which are not there for shards: use 1, which"
        " exchanges in every step, or SparseDDPStrategy where the model fits",
    )
    yield (
        layers not in (1, AUTO),  # which a command line gives where nobody has said anything
        f"tensor_parallel_size={layers!r} leaves parameters whole on several ranks, which would count several times in"
        " the norms of shards: shard over these ranks, too, with data_parallel_size",
    )
    for (name, size), word in zip(sizes.items(), (NODES, AUTO)):
        is_number = isinstance(size, int) and not isinstance(size, bool) and size >= 1
        yield (not is_number and size != word, f"{name}={size!r} must be {word!r}, or a number of ranks, at least 1")


def _refuse_together(rows: Iterator[Row]) -> None:
    """Raise on every rank what the first that has one has to say."""
    reasons = gather_together(next((reason for is_refused, reason in rows if is_refused), ""))
    refuse(*((True, reason) for reason in reasons if reason))


def _of_the_model(module: Any, mesh: DeviceMesh, device: torch.device) -> Iterator[Row]:
    """Yield what cannot be trained in shards that replicas exchange; what comes later goes by what came before."""
    trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
    yield (
        not module.automatic_optimization,
        "automatic_optimization=False steps by hand, and which backward is a step's last, after which shards are"
        " exchanged, is known under automatic optimization alone: use that, or SparseDDPStrategy",
    )
    whole = [name for name, each in trained.items() if not hasattr(each, "device_mesh")]
    kind = "nothing" if len(whole) == len(trained) else f"all but {listed(whole)}"
    yield (
        bool(whole),
        f"configure_model has sharded {kind}, and what is left whole nobody averages in a replica: call {_SHARD} of its"
        " layers, then of the module that holds the rest; a model that fits is better served by strategy='sparse_lags'",
    )
    ranks = mesh.mesh.flatten().tolist()
    elsewhere = [name for name, each in trained.items() if each.device_mesh.mesh.flatten().tolist() != ranks]
    yield (
        bool(elsewhere),
        f"configure_model has sharded {listed(elsewhere)} over other ranks than {ranks}, which are a replica, and"
        f" between replicas FSDP must not exchange: call {_SHARD}, whose mesh is that of one replica",
    )
    yield from of_the_shards({name: held_of(each) for name, each in trained.items()}, device)


def of_the_shards(held: Mapping[str, Tensor], device: torch.device) -> Iterator[Row]:
    """Yield what a rank cannot exchange of the shards that it holds, on a device."""
    elsewhere = [name for name, shard in held.items() if shard.device.type != device.type]
    yield (
        bool(elsewhere),
        f"shards of {listed(elsewhere)} are not on {device}, where gradients are exchanged: leave CPUOffloadPolicy out;"
        " replicas of more ranks take less memory of each",
    )
    yield (
        not any(shard.numel() for shard in held.values()),
        "a rank holds no element of any parameter, as no dimension 0 is as long as there are shards: take a smaller"
        " data_parallel_size",
    )
