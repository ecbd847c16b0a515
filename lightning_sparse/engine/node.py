"""Two levels: the ranks of a node average their gradients whole, and each of them sees to a share of the means."""

from collections.abc import Generator, Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from lightning_sparse.engine.collectives import Collectives
from lightning_sparse.engine.memory import widened
from lightning_sparse.engine.selecting import Workspace
from lightning_sparse.engine.wire import Payload
from lightning_sparse.engine.wire.reduce import ReduceFormat
from lightning_sparse.functional import copy_elements, round_to

Result = TypeVar("Result")
Steps = Generator[Payload, Tensor, Result]


class _Averaged(NamedTuple):
    """A group that the node has averaged: its gradients, and where this rank's share of their means is worked on."""

    gradients: Sequence[Tensor]
    shares: Tensor
    form: ReduceFormat


class Node:
    """The ranks of one node, on a network of their own that is fast.

    Every tensor is cut by itself into as many shares of equal size as there are ranks, so that nothing depends on which
    tensors travel together; the last ones are filled up with zeros. Of a group, each rank receives everybody's part of
    its share, whole (all-to-all), and averages the parts in the order of ranks. What is done with the mean, rank by
    rank, is what one rank of each node does with a whole gradient elsewhere. In the end all shares go to all ranks
    (all-gather).

    Args:
        collectives: between the ranks of the node.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives
        self.ranks = collectives.ranks
        self._forms: dict[torch.dtype, ReduceFormat] = {}
        self._workspace = Workspace()
        self._averaged: list[_Averaged] = []

    def share_numel(self, numel: int) -> int:
        """Return how many elements each rank's share of so many has."""
        return -(-numel // self.ranks)

    def share_of(self, flat: Tensor) -> Tensor:
        """Return this rank's share of a flat tensor: a view, or a copy where it has to be filled up."""
        numel = self.share_numel(flat.numel())
        share = flat[self.collectives.rank * numel :][:numel]
        return share if share.numel() == numel else functional.pad(share, (0, numel - share.numel()))

    def average(self, gradients: Sequence[Tensor]) -> Steps[list[Tensor]]:
        """Return this rank's share of the mean of each flat gradient, in at least fp32, to be worked on until the end.

        Each ``yield`` is a collective of the node.
        """
        dtypes = {gradient.dtype for gradient in gradients}
        dtype = dtypes.pop() if len(dtypes) == 1 else widened(gradients[0].dtype)
        form = self._form_of(dtype)
        sent = form.end_to_end([gradient.to(dtype) for gradient in gradients])
        parts = yield Payload("all_to_all", sent, out=form.reused("parts", sent))
        parts = parts.to(widened(dtype)).div_(self.ranks)  # before they are added: a sum of large values stays finite
        shares = self._workspace.take(parts.shape[1], like=parts)
        torch.add(parts[0], parts[1], out=shares)
        for part in parts[2:]:
            shares.add_(part)
        self._averaged.append(_Averaged(gradients, shares, form))
        numels = [self.share_numel(gradient.numel()) for gradient in gradients]
        return list(shares[: sum(numels)].split(numels))

    def write_back(self) -> Steps[None]:
        """Write what became of the shares into the gradients, whole, on all ranks of the node; end the step."""
        averaged, self._averaged = self._averaged, []
        for gradients, shares, form in averaged:
            written = yield from self._gather(shares, form)
            self._unpack(written, gradients)
        for form in self._forms.values():
            form.end_step()
        self._workspace.end_step()

    def whole(self, shares: Sequence[Tensor], numels: Sequence[int], dtype: torch.dtype) -> Steps[list[Tensor]]:
        """Return whole tensors of so many elements, of this rank's shares of them; rounded to a type on the way."""
        written = yield from self._gather(torch.cat(list(shares)), self._form_of(dtype))
        tensors = [share.new_empty(numel) for share, numel in zip(shares, numels)]
        self._unpack(written, tensors)
        return tensors

    def any_of(self, flags: Sequence[bool]) -> Steps[list[bool]]:
        """Tell of each flag whether any rank has it set; the host waits for a GPU."""
        mine = torch.tensor(flags, dtype=torch.uint8).to(self.collectives.device, non_blocking=True)
        everywhere = yield Payload("all_gather", mine)
        return [bool(flag) for flag in everywhere.bool().any(dim=0).tolist()]

    def all_of(self, flag: Tensor) -> Steps[Tensor]:
        """Tell whether a flag, bool ``[]``, is set on all ranks."""
        everywhere = yield Payload("all_gather", flag.view(1).byte())
        return everywhere.bool().all()

    def norm_of(self, norm: Tensor) -> Steps[Tensor]:
        """Return the norm of what all ranks hold, of that of this rank's."""
        norms = yield Payload("all_gather", norm.view(1))
        whole: Tensor = torch.linalg.vector_norm(norms)
        return whole

    def _form_of(self, dtype: torch.dtype) -> ReduceFormat:
        if dtype not in self._forms:
            self._forms[dtype] = ReduceFormat(dtype, self.collectives.rank, self.ranks)
        return self._forms[dtype]

    def _gather(self, shares: Tensor, form: ReduceFormat) -> Steps[Tensor]:
        sent = round_to(shares, form.dtype)
        return (yield Payload("all_gather", sent, out=form.reused("parts", sent.expand(self.ranks, -1))))

    def _unpack(self, written: Tensor, tensors: Sequence[Tensor]) -> None:
        numels = [self.share_numel(tensor.numel()) for tensor in tensors]
        for tensor, piece in zip(tensors, written[:, : sum(numels)].split(numels, dim=1)):
            copy_elements(round_to(piece, tensor.dtype), tensor)


def chunks_of(numels: Sequence[int], kinds: Sequence[object], most: int) -> list[tuple[int, int]]:
    """Cut tensors in a row, of some kinds, into runs of one kind with no more elements than ``most``, if they can be.

    Example::

        >>> chunks_of([3, 3, 9, 1], ["a", "a", "a", "b"], 6)
        [(0, 2), (2, 3), (3, 4)]
    """
    stops = [0]
    held = 0
    for place, (numel, kind) in enumerate(zip(numels, kinds)):
        if place and (held + numel > most or kind != kinds[place - 1]):
            stops.append(place)
            held = 0
        held += numel
    return list(zip(stops, chain(stops[1:], [len(numels)])))
