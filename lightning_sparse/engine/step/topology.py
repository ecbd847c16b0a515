"""Topologies, which define the part of the model that a rank exchanges, and the ranks that exchange this part."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, groupby
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn import Module, functional
from typing_extensions import override

from lightning_sparse.engine.collectives import Communicator, Phases, broadcast_buffers
from lightning_sparse.engine.memory import widened
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
    """Wrapper in place of DDP. A call broadcasts buffers and runs the model. Backward reduces no gradients."""

    process_group: Any = None  # attribute of DDP's wrapper; None means all ranks
    require_backward_grad_sync = require_forward_param_sync = True

    def __init__(self, module: Module, broadcast_buffers: bool = True) -> None:
        super().__init__()
        self.module = module
        self.broadcast_buffers = broadcast_buffers

    @override
    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Call :meth:`begin_forward`, and then the model."""
        self.begin_forward()
        return self.module(*inputs, **named_inputs)

    @override
    def state_dict(self, *given: Any, **named: Any) -> Any:
        return self.module.state_dict(*given, **named)

    @override
    def load_state_dict(self, *given: Any, **named: Any) -> Any:
        return self.module.load_state_dict(*given, **named)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Disable the exchange of gradients inside the context."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin_forward(self) -> None:
        """Broadcast buffers from rank 0 as DDP does: not if the previous forward ran in ``no_sync`` or ``no_grad``."""
        if self.require_forward_param_sync and self.broadcast_buffers:
            broadcast_buffers(self.module)
        self.require_forward_param_sync = self.require_backward_grad_sync and torch.is_grad_enabled()


class ShardedModel(UnwrappedModule):
    """A model that FSDP shards inside each replica. FSDP averages gradients inside a replica, not between replicas."""

    def __init__(self, module: Module) -> None:
        super().__init__(module, broadcast_buffers=False)

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
    """Return the wrapped module without ``torch.compile``, so that parameter names have no ``_orig_mod`` prefix."""
    module: Module = getattr(wrapper.module, "_orig_mod", wrapper.module)
    return module


def fsdp_modules(module: Module) -> Iterator[Any]:
    """Yield FSDP2 modules, identified by a method, because an import of torch's class would import all of FSDP."""
    return (each for each in module.modules() if hasattr(each, "set_requires_gradient_sync"))


def reshard(module: Module) -> None:
    """Free unsharded parameters. After a forward without a backward, FSDP does not reshard the root module."""
    for each in fsdp_modules(module):
        each.reshard()


def shard_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return this rank's shard of a parameter's gradient, flat."""
    if getattr(gradient, "placements", None) != getattr(parameter, "placements", None):
        raise RuntimeError(
            "a gradient is not sharded as its parameter is, because FSDP has not reduced the gradient."
            " Accumulate gradients with Lightning, without set_requires_gradient_sync(False)."
        )
    return local_tensor(gradient).view(-1)


# Elements after which a message inside a node ends, on a CPU and on a GPU. Links of GPUs need longer messages.
_MESSAGE_ELEMENTS, _DEVICE_MESSAGE_ELEMENTS = 1 << 22, 1 << 24
_ALIGNED = 16  # Messages have a multiple of 16 elements, and thus of 16 bytes.


class LocalGradient(NamedTuple):
    """One parameter's gradient on this rank, before the exchange."""

    name: str
    gradient: Tensor  # flat view of p.grad, or a copy; commit writes the mean here
    is_used: Optional[bool]  # whether backward has added to the gradient; ``None`` if unknown


class FlatTopology:
    """A topology in which every rank exchanges complete gradients with all other ranks.

    Subclasses divide each gradient among several ranks. One rank's part is its *share*: here, the complete gradient.

    Attributes:
        inter: communicator of the ranks that exchange selections.
        world: communicator of all ranks.
        same_shard: communicator of the ranks with the same tensors of the model, one in each replica.
        local_world_size: number of ranks that divide each gradient.
    """

    local_world_size = 1

    def __init__(self, inter: Communicator, world: Optional[Communicator] = None) -> None:
        self.inter = inter
        self.world = self.same_shard = inter if world is None else world

    def share_numel(self, numel: int) -> int:
        """Return the number of elements in each rank's share of a tensor with ``numel`` elements."""
        return numel

    def local_share(self, flat: Tensor) -> Tensor:
        """Return this rank's share of a flat tensor: a view, or a copy if padding is necessary."""
        return flat

    def shares(self, bucket: Sequence[LocalGradient]) -> Sequence[LocalGradient]:
        """Return this rank's share of each gradient. With two levels, first average gradients inside the node."""
        return bucket

    def all_of(self, flag: Tensor) -> Tensor:
        """Return whether a flag, bool ``[]``, is set on all ranks of the node."""
        return flag

    def total_norm(self, norms: Tensor) -> Tensor:
        """Return the norm of all gradients together, given the norms of this rank's shares."""
        return norm_of_all(norms)

    def write_back(self) -> None:
        """End the step. With two levels, all-gather shares inside the node, and write complete gradients."""

    def any_of(self, flags: Tensor) -> Tensor:
        """Return uint8 flags: each is 1 if the flag in ``flags`` is 1 on any rank of this node."""
        return flags

    def mean_gradients(self, gradients: Mapping[str, Tensor], numels: Sequence[int]) -> Tensor:
        """Average flat bfloat16 shares over ranks. Return concatenated complete gradients of ``numels`` elements."""
        return self.inter.call(Payload("all_reduce", torch.cat(list(gradients.values())))).div_(self.inter.world_size)

    def close(self, has_failed: bool) -> None:
        """Call ``close(has_failed)`` of each communicator."""
        for each in (self.inter, self.world):
            each.close(has_failed)


class DividedRanks(FlatTopology):
    """A topology in which the ranks of ``intra`` divide each gradient. The ranks of ``inter`` have the same share.

    With a sharded model, a rank's share is the shard of the gradient, averaged by FSDP in the replica.
    """

    def __init__(self, intra: Communicator, inter: Communicator, world: Communicator) -> None:
        super().__init__(inter, world)
        self._intra, self.same_shard = intra, inter
        self.local_world_size = intra.world_size

    @override
    def all_of(self, flag: Tensor) -> Tensor:
        flag = flag.to(self._intra.device, non_blocking=True)
        return self._intra.call(Payload("all_gather", flag.view(1).byte())).bool().all()

    @override
    def close(self, has_failed: bool) -> None:
        super().close(has_failed)
        self._intra.close(has_failed)


class HierarchicalTopology(DividedRanks):
    """A topology in which the ranks of a node average gradients, and each rank exchanges a share of the means.

    The network inside a node is assumed to be fast. Every tensor is cut separately into equal shares with zeros as
    padding, so shares do not depend on other tensors. In an all-to-all, a rank receives the gradients of one share from
    all ranks of the node. The rank averages these gradients in rank order, and exchanges the mean with the ranks of
    other nodes that have the same share. An all-gather finally sends all shares to all ranks of the node.
    """

    def __init__(self, intra: Communicator, inter: Communicator, world: Communicator) -> None:
        super().__init__(intra, inter, world)
        self.same_shard = world
        # Per message of this step: complete gradients, this rank's shares of the node's means, dtype of the message.
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
        most = _MESSAGE_ELEMENTS if self._intra.device.type == "cpu" else _DEVICE_MESSAGE_ELEMENTS
        ends = accumulate(map(Tensor.numel, gradients))
        shares: list[Tensor] = []
        for _, message in groupby(zip(gradients, ends), key=lambda pair: (pair[1] - 1) // most):
            shares += self._intra.run(self._average([gradient for gradient, _ in message]))
        # Other ranks of the node may have used a parameter that this rank has not used.
        return [LocalGradient(local.name, share, local.is_used or None) for local, share in zip(bucket, shares)]

    @override
    def total_norm(self, norms: Tensor) -> Tensor:
        return norm_of_all(self._intra.call(Payload("all_gather", norm_of_all(norms).view(1))))

    @override
    def any_of(self, flags: Tensor) -> Tensor:
        return self._intra.call(Payload("all_gather", flags)).amax(dim=0)

    @override
    def write_back(self) -> None:
        averaged, self._averaged = self._averaged, []
        for gradients, shares, dtype in averaged:
            self._intra.run(self._hand_out(shares, gradients, dtype))

    @override
    def mean_gradients(self, gradients: Mapping[str, Tensor], numels: Sequence[int]) -> Tensor:
        shares = super().mean_gradients(gradients, numels)
        flat = shares.new_empty(sum(numels))
        self._intra.run(self._hand_out(shares, flat.split(numels), torch.bfloat16))
        return flat

    def _average(self, gradients: Sequence[Tensor]) -> Phases[list[Tensor]]:
        """Average gradients over the node. Return this rank's shares in fp32 or wider, valid until the write-back."""
        dtypes = {gradient.dtype for gradient in gradients}
        dtype = dtypes.pop() if len(dtypes) == 1 else widened(gradients[0].dtype)
        numels = [self.share_numel(gradient.numel()) for gradient in gradients]
        padding = -sum(numels) % _ALIGNED
        rows = gradients[0].new_empty(self.local_world_size, sum(numels) + padding, dtype=dtype)
        parts = yield Payload("all_to_all", cut_into(rows, [each.to(dtype) for each in gradients]))
        shares = mean_of_rows(parts, widened(dtype))
        if shares.dtype is dtype:  # a view of ``parts``, which would hold all rows in memory
            shares = shares.clone()
        self._averaged.append((gradients, shares, dtype))
        return list(shares[: sum(numels)].split(numels))

    def _hand_out(self, shares: Tensor, tensors: Sequence[Tensor], dtype: torch.dtype) -> Phases[None]:
        """All-gather concatenated shares inside the node, and write complete flat ``tensors``."""
        rows = yield Payload("all_gather", round_to(shares, dtype))
        numels = [self.share_numel(tensor.numel()) for tensor in tensors]
        for tensor, piece in zip(tensors, rows[:, : sum(numels)].split(numels, dim=1)):
            copy_elements(round_to(piece, tensor.dtype), tensor)
