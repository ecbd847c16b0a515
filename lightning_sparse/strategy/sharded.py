"""The strategy for models too large for one device: FSDP inside a replica, compressed exchange between replicas."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Optional, Union

from torch.distributed.device_mesh import init_device_mesh
from typing_extensions import Unpack, override

from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.base import is_whole
from lightning_sparse.engine.collectives import all_gather_object, broadcast_tensors
from lightning_sparse.engine.requirements import missing_capabilities, refuse
from lightning_sparse.engine.settings import AUTO, Settings
from lightning_sparse.engine.step.topology import ShardedModel
from lightning_sparse.functional.elements import local_tensor
from lightning_sparse.loop.arguments import ShardArguments, pop_settings, with_settings_signature
from lightning_sparse.loop.checks import check_model, of_the_model
from lightning_sparse.schedule import FixedSize
from lightning_sparse.strategy.lightning import ModelParallelStrategy, Trainer
from lightning_sparse.strategy.trainer import SparseStrategy

NODES = "nodes"
_MESH = ("replicate", "data_parallel", "tensor_parallel")


class SparseModelParallelStrategy(SparseStrategy, ModelParallelStrategy):
    """Sharded training (FSDP2) in several replicas, which exchange only the largest elements of each gradient.

    All else is as in :class:`~pytorch_lightning.strategies.ModelParallelStrategy`. ``configure_model`` needs no
    change: ``self.device_mesh`` has the usual two dimension names, and spans one replica. Inside a replica, FSDP
    averages dense gradients. Then each rank exchanges gradients of its shards with the ranks that hold the same shards
    in other replicas. Unsent elements stay in a residual on the rank: 4 bytes for each element of the rank's shards.

    Args:
        compressor: like in :class:`~lightning_sparse.SparseDDPStrategy`, limited to compressors that support shards:
            ``topk``, ``lags``, ``omgs``, ``dgc``, ``qsgd``, ``dense``.
        density: like in ``SparseDDPStrategy``.
        resume_compression: like in ``SparseDDPStrategy``.
        replicas: number of replicas, each of consecutive ranks; ``"nodes"`` for one replica per node.
        data_parallel_size: number of ranks over which FSDP shards a replica; ``"auto"`` for all ranks of the replica.
        **given: settings of :class:`~lightning_sparse.Compression`, without ``schedule``, ``overlaps_backward`` and
            ``levels``, and other arguments of ``ModelParallelStrategy``. ``tensor_parallel_size`` must be 1. With local
            steps each replica steps alone.

    Attributes:
        settings: the validated settings.

    Raises:
        ValueError: for an unknown name, a density out of range, or a compressor that does not support shards.

    Example::

        >>> SparseModelParallelStrategy(density=0.01, replicas=2).compression_stats()
        {}
    """

    @with_settings_signature("schedule", "overlaps_backward", "levels")
    def __init__(
        self,
        compressor: Union[str, Compressor] = "lags",
        density: Optional[float] = None,
        *,
        resume_compression: bool = True,
        replicas: Union[str, int] = NODES,
        data_parallel_size: Union[str, int] = AUTO,
        **given: Unpack[ShardArguments],
    ) -> None:
        self._sizes = replicas, data_parallel_size
        settings = pop_settings(SparseModelParallelStrategy, compressor, density, given, ModelParallelStrategy)
        refuse(_of_shards(settings, given, *self._sizes))
        self._set_up(replace(settings, schedule=FixedSize()), resume_compression)
        super().__init__(**given)  # type: ignore[misc]

    @override
    def setup_environment(self) -> None:
        super(ModelParallelStrategy, self).setup_environment()
        ModelParallelStrategy._setup_distributed(self)
        replicas, shards = self._sizes
        replicas = self.num_nodes if replicas == NODES else int(replicas)
        shards = self.world_size // replicas if shards == AUTO else int(shards)
        if replicas * shards != self.world_size:
            sizes = f"replicas={replicas} times data_parallel_size={shards}"
            raise ValueError(f"{sizes} must be the number of ranks, {self.world_size}")
        self._whole_mesh = init_device_mesh(self.root_device.type, (replicas, shards, 1), mesh_dim_names=_MESH)
        self._device_mesh = self._module._device_mesh = self._whole_mesh[_MESH[1:]]  # one replica

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @override
    def _start(self, trainer: Trainer) -> None:
        module = self._module
        check_model(module, self.settings.local_steps)
        if not module.automatic_optimization:
            raise ValueError(
                "automatic_optimization=False is not supported: shards are exchanged after the last backward of a step,"
                " which is unknown in manual optimization. Use automatic optimization, or SparseDDPStrategy."
            )
        reasons = of_the_model(module, self.device_mesh.mesh.flatten().tolist(), self.root_device)
        refuse(filter(None, all_gather_object(next(reasons, ""))))  # all ranks raise the error of the lowest rank
        same_shards = self._whole_mesh.get_group(_MESH[0])
        broadcast_tensors([*map(local_tensor, module.parameters()), *module.buffers()], same_shards)
        self._bare = ShardedModel(module)
        replicas, self._node_ranks, _ = self._whole_mesh.shape
        if replicas == 1:
            self._log("the model has one replica, so nothing is exchanged, as with ModelParallelStrategy.")
        else:
            super()._start(trainer)

    @override
    def on_train_start(self) -> None:
        self._restore()
        super().on_train_start()


def _of_shards(settings: Settings, given: Mapping[str, Any], replicas: Any, shards: Any) -> Iterator[str]:
    yield from missing_capabilities("in a sharded model", settings)
    layers = given.get("tensor_parallel_size", 1)
    if layers not in (1, AUTO):  # a command line passes "auto" by default
        yield (
            f"tensor_parallel_size={layers!r} is not supported: some parameters would be replicated on several ranks,"
            " and would count several times in the norms of shards. Use data_parallel_size to shard over these ranks."
        )
    for name, size, word in (("replicas", replicas, NODES), ("data_parallel_size", shards, AUTO)):
        if size != word and not is_whole(size, 1):
            yield f"{name}={size!r} must be {word!r}, or an integer of at least 1"
