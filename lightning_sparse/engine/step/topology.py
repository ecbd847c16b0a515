"""WITH WHOM: the part of a model that a rank has, and the ranks that exchange it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn import Module, functional
from typing_extensions import override

from lightning_sparse.engine.collectives import Communicator, Phases, broadcast_buffers
from lightning_sparse.engine.memory.residual import widened
from lightning_sparse.engine.step.selecting import Workspace
from lightning_sparse.engine.wire.base import Payload
from lightning_sparse.functional.elements import (
    copy_elements,
    cut_into,
    local_tensor,
    mean_of_rows,
    round_to,
    shard_numel,
)
from lightning_sparse.functional.reductions import norm_of_all


class UnwrappedModule(Module):
    """A model without a DDP wrapper, which broadcasts its buffers, and may be called in its place."""

    process_group: Any = None  # of ranks whose buffers are one; all
    require_backward_grad_sync = require_forward_param_sync = True

    def __init__(self, module: Module, broadcast_buffers: bool = True) -> None:
        super().__init__()
        self.module = module
        self.broadcast_buffers = broadcast_buffers

    @override
    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Call the model, with buffers that are rank 0's."""
        self.begin_forward()
        return self.module(*inputs, **named_inputs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Have gradients stay this rank's own inside."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin_forward(self) -> None:
        """Copy buffers from rank 0 as DDP does: before the first forward of a step, and of a validation."""
        if self.require_forward_param_sync and self.broadcast_buffers:
            broadcast_buffers(self.module, self.process_group)
        self.require_forward_param_sync = self.require_backward_grad_sync and torch.is_grad_enabled()


class ShardedModel(UnwrappedModule):
    """A model of which every rank holds a shard: FSDP averages its gradients inside a replica, never between them.

    Args:
        module: the model.
        same_shards: the ranks that hold the same shards, replica by replica, if a group of theirs is there.
    """

    def __init__(self, module: Module, same_shards: Any = None) -> None:
        super().__init__(module, broadcast_buffers=False)
        self._same_shards = same_shards

    @property
    def groups(self) -> tuple[Any, Any]:
        """Those of FSDP's mesh, if it has one: the ranks of this replica, and those that hold the same shards."""
        mesh = next(each.device_mesh for each in self.module.parameters() if hasattr(each, "device_mesh"))
        return mesh.get_group() if mesh.ndim == 1 else None, self._same_shards

    @override
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with super().no_sync():
            self._synchronize(False)
            try:
                yield
            finally:
                self._synchronize(True)

    def _synchronize(self, synchronizes: bool) -> None:
        for each in fsdp_modules(self.module):
            each.set_requires_gradient_sync(synchronizes, recurse=False)


def named_module(wrapper: Any) -> Module:
    """Return a wrapper's module, or what ``torch.compile`` has made that of: its names are without a prefix."""
    module: Module = getattr(wrapper.module, "_orig_mod", wrapper.module)
    return module


def fsdp_modules(module: Module) -> Iterator[Any]:
    """Yield the modules that ``fully_shard`` was called on; to ask for torch's class would import all of FSDP."""
    return (each for each in module.modules() if hasattr(each, "set_requires_gradient_sync"))


def reshard(module: Module) -> None:
    """Have a model hold shards only: after a forward without a backward FSDP leaves the root's parameters whole."""
    for each in fsdp_modules(module):
        each.reshard()


def shard_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return what this rank holds of a parameter's gradient, flat."""
    if getattr(gradient, "placements", None) != getattr(parameter, "placements", None):
        raise RuntimeError(
            "a gradient is not sharded as its parameter is: backward has to reduce it in the replica"
            " (set_requires_gradient_sync(True), which Lightning's accumulation is left to)"
        )
    return local_tensor(gradient).view(-1)


# Of gradients: two such messages are held, or of the largest tensor. Links between GPUs need longer ones.
_MESSAGE_ELEMENTS, _DEVICE_MESSAGE_ELEMENTS = 1 << 22, 1 << 24
_ALIGNED = 16  # elements, so that every message has a multiple of 16 bytes


class LocalGradient(NamedTuple):
    """One parameter's gradient on this rank, before its exchange."""

    name: str
    gradient: Tensor  # flat view of the gradient's storage; the mean goes here, or into memory that takes its place
    is_used: Optional[bool]  # whether backward gave it anything on this rank; ``None`` where it is no gradient
    parameter: Optional[Tensor] = None  # whose gradient it is all of, where other memory may take its place


class Topology(NamedTuple):
    """How many ranks there are, and how they divide between them what is kept."""

    world_size: int
    local_world_size: int = 1  # that share what is kept; 1 where each keeps all


class FlatTopology:
    """All ranks exchange with all, each the whole of every gradient.

    ``inter`` joins ranks that exchange selections, ``world`` all, and ``same_shard`` those that hold the same tensors
    of a model, replica by replica. ``local_world_size`` share each gradient.
    """

    local_world_size = 1

    def __init__(self, inter: Communicator, world: Optional[Communicator] = None) -> None:
        self.inter = inter
        self.world = self.same_shard = inter if world is None else world

    def share_numel(self, numel: int) -> int:
        """Return how many elements each rank's share of so many has."""
        return numel

    def local_share(self, flat: Tensor) -> Tensor:
        """Return this rank's share of a flat tensor: a view, or a copy where it has to be filled up."""
        return flat

    def shares(self, bucket: Sequence[LocalGradient]) -> Sequence[LocalGradient]:
        """Average gradients in the node, and return this rank's share of each, under the parameter's name."""
        return bucket

    def are_used(self, shares: Sequence[LocalGradient]) -> list[Optional[bool]]:
        """Tell of which gradients, or shares of a node's means, backward has given anything."""
        return [local.is_used for local in shares]

    def all_of(self, flag: Tensor) -> Tensor:
        """Tell whether a flag, bool ``[]``, is set on all ranks of the node."""
        return flag

    def norms_of(self, norms: Tensor) -> Tensor:
        """Combine norms of shares, a vector, into those of the whole."""
        return norms

    def norms_together(self, norms: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor]:
        """Return norms of gradients, of which each vector has several, and that of those in each together."""
        whole = self.norms_of(torch.cat(list(norms))).split(list(map(len, norms))) if any(map(len, norms)) else norms
        return whole, torch.stack(list(map(norm_of_all, whole)))

    def write_back(self) -> None:
        """Write what became of the shares into the gradients, whole, on all ranks of the node; end the step."""

    def any_of(self, flags: Tensor) -> Tensor:
        """Tell which flags, uint8, are set on any rank with whose gradients this one's are averaged in its node."""
        return flags

    def mean_gradients(self, gradients: Mapping[str, Tensor], numels: Sequence[int]) -> Tensor:
        """Return the means over ranks of flat bfloat16 gradients, whole, of so many elements each, end to end."""
        return self.inter.call(Payload("all_reduce", torch.cat(list(gradients.values())))).div_(self.inter.world_size)

    def mean_squares(self, squares: Tensor) -> Tensor:
        """Return the mean, over nodes, of squared norms of gradients of which a node's ranks have shares."""
        return self.same_shard.call(Payload("all_reduce", squares)).div_(self.inter.world_size)

    def close(self, has_failed: bool) -> None:
        """Give the process groups back."""
        for each in (self.inter, self.world):
            each.close(has_failed)


class DividedRanks(FlatTopology):
    """The ranks ``intra`` divide each gradient between them; those with equal parts exchange ``inter``."""

    def __init__(self, intra: Communicator, inter: Communicator, world: Communicator) -> None:
        super().__init__(inter, world)
        self._intra = intra
        self.local_world_size = intra.world_size

    @override
    def all_of(self, flag: Tensor) -> Tensor:
        flag = flag.to(self._intra.device, non_blocking=True)
        return self._intra.call(Payload("all_gather", flag.view(1).byte())).bool().all()

    @override
    def norms_of(self, norms: Tensor) -> Tensor:
        whole: Tensor = torch.linalg.vector_norm(self._intra.call(Payload("all_gather", norms)), dim=0)
        return whole

    @override
    def close(self, has_failed: bool) -> None:
        super().close(has_failed)
        self._intra.close(has_failed)


class Shards(DividedRanks):
    """Every rank holds a shard of the model, and is handed that of the gradients' mean over its replica, as by FSDP."""

    def __init__(self, intra: Communicator, inter: Communicator, world: Communicator) -> None:
        super().__init__(intra, inter, world)
        self.same_shard = inter

    @override
    def norms_together(self, norms: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor]:
        # Of some parameters a rank has nothing: norms of single ones are those of its shards.
        return norms, self.norms_of(torch.stack(list(map(norm_of_all, norms))))

    def total_of(self, numbers: Tensor) -> Tensor:
        """Add up numbers about the shards that ranks hold of one replica."""
        return self._intra.call(Payload("all_gather", numbers)).sum(dim=0)


class HierarchicalTopology(DividedRanks):
    """The ranks of a node, on a fast network of their own, average gradients, and each sees to a share of the means.

    Every tensor is cut by itself into equal shares, the last filled up with zeros: nothing depends on its company. Each
    rank receives all parts of its share (all-to-all), averages them in the order of ranks, and does with the mean what
    one rank of each node does with a gradient elsewhere. In the end all shares go to all ranks (all-gather).
    """

    def __init__(self, intra: Communicator, inter: Communicator, world: Communicator) -> None:
        super().__init__(intra, inter, world)
        self._workspace = Workspace()
        self._messages: dict[tuple[str, torch.dtype], Tensor] = {}
        # Groups that the node has averaged, this rank's shares of the means, and the type of their messages.
        self._averaged: list[tuple[Sequence[Tensor], Tensor, torch.dtype]] = []

    @override
    def share_numel(self, numel: int) -> int:
        return shard_numel(numel, self.local_world_size)

    @override
    def local_share(self, flat: Tensor) -> Tensor:
        numel = self.share_numel(flat.numel())
        share = flat[self._intra.rank * numel :][:numel]
        return share if share.numel() == numel else functional.pad(share, (0, numel - share.numel()))

    @override
    def shares(self, bucket: Sequence[LocalGradient]) -> Sequence[LocalGradient]:
        gradients = [local.gradient for local in bucket]
        shares = [
            share for message in self._messages_of(gradients) for share in self._intra.run(self._average(message))
        ]
        return [local._replace(gradient=share, parameter=None) for local, share in zip(bucket, shares)]

    @override
    def are_used(self, shares: Sequence[LocalGradient]) -> list[Optional[bool]]:
        idle = [local.gradient.any() for local in shares if local.is_used is False]
        # Others of the node may have used them. The host waits for a GPU in such a step only.
        found = iter(torch.stack(idle).tolist() if idle else ())
        return [next(found) if local.is_used is False else local.is_used for local in shares]

    @override
    def any_of(self, flags: Tensor) -> Tensor:
        return self._intra.call(Payload("all_gather", flags)).amax(dim=0)

    @override
    def write_back(self) -> None:
        averaged, self._averaged = self._averaged, []
        for gradients, shares, dtype in averaged:
            self._intra.run(self._hand_out(shares, gradients, dtype))
        self._workspace.release()

    @override
    def mean_gradients(self, gradients: Mapping[str, Tensor], numels: Sequence[int]) -> Tensor:
        shares = super().mean_gradients(gradients, numels)
        flat = shares.new_empty(sum(numels))
        self._intra.run(self._hand_out(shares, flat.split(numels), torch.bfloat16))
        return flat

    def _messages_of(self, gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Yield those that travel in a message: as many as it has room for, or one that is larger."""
        most = _MESSAGE_ELEMENTS if self._intra.device.type == "cpu" else _DEVICE_MESSAGE_ELEMENTS
        message, numel = list[Tensor](), 0
        for gradient in gradients:
            if message and numel + gradient.numel() > most:
                yield message
                message, numel = [], 0
            message.append(gradient)
            numel += gradient.numel()
        yield message

    def _average(self, gradients: Sequence[Tensor]) -> Phases[list[Tensor]]:
        """Return this rank's share of each mean, in at least fp32; it is working memory until :meth:`write_back`."""
        dtypes = {gradient.dtype for gradient in gradients}
        dtype = dtypes.pop() if len(dtypes) == 1 else widened(gradients[0].dtype)
        numels = [self.share_numel(gradient.numel()) for gradient in gradients]
        padding = -sum(numels) % _ALIGNED
        sent = cut_into(self._memory("sent", sum(numels) + padding, dtype), [each.to(dtype) for each in gradients])
        parts = yield Payload("all_to_all", sent, out=self._memory("parts", sent.shape[1], dtype))
        shares = self._workspace.take(sent.shape[1], sent.new_empty(0, dtype=widened(dtype)))
        shares.copy_(mean_of_rows(parts, shares.dtype))
        self._averaged.append((gradients, shares, dtype))
        return list(shares[: sum(numels)].split(numels))

    def _memory(self, name: str, columns: int, dtype: torch.dtype) -> Tensor:
        """Return memory ``[world_size, columns]``: that of the last message of this name, unless more is needed."""
        numel, held = self.local_world_size * columns, self._messages.get((name, dtype))
        if held is None or held.numel() < numel:
            held = self._messages[name, dtype] = torch.empty(numel, dtype=dtype, device=self._intra.device)
        return held[:numel].view(self.local_world_size, columns)

    def _hand_out(self, shares: Tensor, tensors: Sequence[Tensor], dtype: torch.dtype) -> Phases[None]:
        """Write the shares of all ranks, laid end to end, into whole flat tensors."""
        rows = yield Payload("all_gather", round_to(shares, dtype), out=self._memory("parts", len(shares), dtype))
        numels = [self.share_numel(tensor.numel()) for tensor in tensors]
        for tensor, piece in zip(tensors, rows[:, : sum(numels)].split(numels, dim=1)):
            copy_elements(round_to(piece, tensor.dtype), tensor)
