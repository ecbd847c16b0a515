"""Two levels: the ranks of a node average their gradients whole, and each of them sees to a share of the means."""

from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from lightning_sparse.engine.collectives import Collectives
from lightning_sparse.engine.memory import widened
from lightning_sparse.engine.step.selecting import Workspace
from lightning_sparse.engine.wire import Payload
from lightning_sparse.functional import round_to

_MESSAGE_ELEMENTS = 1 << 22  # of all ranks together: two such messages are held, whatever the size of a group
_ALIGNED = 16  # elements, so that every message has a multiple of 16 bytes

Result = TypeVar("Result")
Steps = Generator[Payload, Tensor, Result]


class _Averaged(NamedTuple):
    """A group that the node has averaged: its gradients, and where this rank's shares of their means are worked on.

    Messages are of type ``dtype``.
    """

    gradients: Sequence[Tensor]
    shares: Tensor
    dtype: torch.dtype


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
        self._workspace = Workspace()
        self._messages: dict[tuple[str, torch.dtype], Tensor] = {}
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
        rows = [self._rows(gradient.to(dtype)) for gradient in gradients]
        numels = [row.shape[1] for row in rows]
        padding = -sum(numels) % _ALIGNED
        rows.append(rows[0].new_zeros(self.ranks, padding))
        shares = self._workspace.take(sum(numels) + padding, rows[0].new_empty(0, dtype=widened(dtype)))
        for start, stop in self._parts_of(len(shares)):
            within = _within([*numels, padding], start, stop)
            pieces = [rows[place][:, first:last] for place, first, last in within]
            sent = torch.cat(pieces, dim=1, out=self._message("sent", stop - start, dtype))
            parts = yield Payload("all_to_all", sent, out=self._message("parts", stop - start, dtype))
            parts = parts.to(shares.dtype).div_(self.ranks)  # before they are added: a sum of large values stays finite
            mean = torch.add(parts[0], parts[1], out=shares[start:stop])
            for part in parts[2:]:
                mean.add_(part)
        self._averaged.append(_Averaged(gradients, shares, dtype))
        return list(shares[: sum(numels)].split(numels))

    def write_back(self) -> Steps[None]:
        """Write what became of the shares into the gradients, whole, on all ranks of the node; end the step."""
        averaged, self._averaged = self._averaged, []
        for gradients, shares, dtype in averaged:
            yield from self._hand_out(shares, gradients, dtype)
        self._workspace.end_step()

    def whole(self, shares: Sequence[Tensor], numels: Sequence[int], dtype: torch.dtype) -> Steps[list[Tensor]]:
        """Return whole tensors of so many elements, of this rank's shares of them; rounded to a type on the way."""
        tensors = [share.new_empty(numel) for share, numel in zip(shares, numels)]
        yield from self._hand_out(torch.cat(list(shares)), tensors, dtype)
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

    def _rows(self, flat: Tensor) -> Tensor:
        """Return a flat tensor as the shares of all ranks, ``[ranks, share]``."""
        padding = -flat.numel() % self.ranks
        return (functional.pad(flat, (0, padding)) if padding else flat).view(self.ranks, -1)

    def _parts_of(self, columns: int) -> Iterator[tuple[int, int]]:
        """Cut the shares of a group into those of a message each."""
        step = max(_ALIGNED, _MESSAGE_ELEMENTS // self.ranks // _ALIGNED * _ALIGNED)
        return ((start, min(start + step, columns)) for start in range(0, columns, step))

    def _message(self, name: str, columns: int, dtype: torch.dtype) -> Tensor:
        """Return memory ``[ranks, columns]``: that of the last message of this name, unless more is needed."""
        held = self._messages.get((name, dtype))
        if held is None or held.numel() < self.ranks * columns:
            held = torch.empty(self.ranks * columns, dtype=dtype, device=self.collectives.device)
            self._messages[name, dtype] = held
        return held[: self.ranks * columns].view(self.ranks, columns)

    def _hand_out(self, shares: Tensor, tensors: Sequence[Tensor], dtype: torch.dtype) -> Steps[None]:
        """Write the shares of all ranks, laid end to end, into whole flat tensors."""
        numels = [self.share_numel(tensor.numel()) for tensor in tensors]
        for start, stop in self._parts_of(len(shares)):
            sent = round_to(shares[start:stop], dtype)
            written = yield Payload("all_gather", sent, out=self._message("parts", stop - start, dtype))
            column = 0
            for place, first, last in _within(numels, start, stop):
                piece = written[:, column : column + last - first]
                self._write(round_to(piece, tensors[place].dtype), tensors[place], first)
                column += last - first

    def _write(self, rows: Tensor, tensor: Tensor, first: int) -> None:
        """Write into the shares of all ranks, from their element ``first`` on."""
        numel, columns = self.share_numel(tensor.numel()), rows.shape[1]
        if numel * self.ranks == tensor.numel():
            tensor.view(self.ranks, numel)[:, first : first + columns].copy_(rows)
            return
        for rank, row in enumerate(rows):
            there = tensor[rank * numel + first :][:columns]
            there.copy_(row[: len(there)])


def _within(numels: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield which part of each tensor is between two places, where all are laid end to end.

    Example::

        >>> list(_within([4, 2, 5], 3, 7))
        [(0, 3, 4), (1, 0, 2), (2, 0, 1)]
    """
    begin = 0
    for place, numel in enumerate(numels):
        first, last = max(0, start - begin), min(numel, stop - begin)
        if first < last:
            yield place, first, last
        begin += numel
