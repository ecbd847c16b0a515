"""What of a group is selected from what: whole parameters, single ones, or those of the group laid end to end."""

from collections import defaultdict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import accumulate
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from lightning_sparse.compressors import Compressor, element_count
from lightning_sparse.compressors.selection import Selection
from lightning_sparse.engine.wire import Arrival
from lightning_sparse.functional import add_rows


class GroupChoice(NamedTuple):
    """What is sent of a group.

    Attributes:
        tensors: what was selected from: those of which elements are sent, then those that are sent whole.
        selections: one for each of them.
        counts: by parameter, the number of elements that its density asks for; its share of them where it is merged.
        positions: by parameter, where it stands in the order of ``tensors`` with every parameter by itself.
        merged: parameters that are laid end to end in the first tensor; ``None`` where each has a tensor of its own.
    """

    tensors: list[Tensor]
    selections: Sequence[Selection]
    counts: Sequence[float]
    positions: list[int]
    merged: Optional["MergedParameters"]

    def by_parameter(self, arrival: Arrival) -> Arrival:
        """Turn what arrived for each of ``tensors`` into what arrived for each parameter of the group, in its order."""
        means, kept = arrival.means, arrival.kept
        if self.merged is None and self.positions == list(range(len(means))):
            return arrival
        if self.merged is not None:
            means = [*self.merged.means(means[0]), *means[1:]]
            kept = [*self.merged.kept(kept[0]), *kept[1:]]
        return arrival._replace(
            means=[means[position] for position in self.positions], kept=[kept[position] for position in self.positions]
        )

    def sent_by_parameter(self) -> list[Selection]:
        """Return what is sent of each parameter of the group, in its order; the host waits where it is merged."""
        sent = self.selections
        if self.merged is not None:
            sent = [*self.merged.sent(sent[0]), *sent[1:]]
        return [sent[position] for position in self.positions]


class GroupSelector:
    """Ask a compressor for its selections of a group.

    A parameter whose density is 1 is sent whole, where the compressor has a way for that; it is asked for the others,
    one by one or, where it selects across the group, laid end to end.

    Args:
        compressor: who selects.

    Raises:
        ValueError: if it selects across the group and asks for momentum factor masking: what it sent of a parameter is
            then no longer known by element.
    """

    def __init__(self, compressor: Compressor) -> None:
        feedback = compressor.feedback
        if compressor.selects_across_group and feedback.momentum is not None and feedback.masks_momentum:
            raise ValueError(
                f"{type(compressor).__name__}.feedback asks for masks_momentum=True, but a method that selects across a"
                " group cannot mask the momentum of what it sent: set masks_momentum=False, or momentum=None"
            )
        self._compressor = compressor
        self._workspace = Workspace()

    def select(
        self,
        names: Sequence[str],
        accumulated: Sequence[Tensor],
        densities: Sequence[float],
        are_used: Sequence[Optional[bool]],
        whole: AbstractSet[str] = frozenset(),
    ) -> GroupChoice:
        """Choose what is sent.

        Args:
            names: parameter names.
            accumulated: for each its flat tensor of gradient plus residual; not changed.
            densities: for each the fraction of elements to send.
            are_used: for each whether this rank used it; ``None`` where that is not tracked.
            whole: names of those that are sent whole without asking the compressor, whose density is 1.
        """
        has_a_way = self._compressor.dense_wire_format is not None
        sends_whole = [name in whole or (has_a_way and density >= 1) for name, density in zip(names, densities)]
        order = sorted(range(len(names)), key=sends_whole.__getitem__)
        few, rest = order[: sends_whole.count(False)], order[sends_whole.count(False) :]
        counts: list[float] = [element_count(tensor.numel(), each) for tensor, each in zip(accumulated, densities)]
        tensors = [accumulated[position] for position in few]
        wanted = [int(counts[position]) for position in few]
        merged = None
        if self._compressor.selects_across_group and len(few) > 1:
            merged = self._merge(tensors, [are_used[position] for position in few])
            wanted = [_merged_count(tensors, [densities[position] for position in few])]
            tensors = [merged.flat]
            for position in few:
                counts[position] = wanted[0] * accumulated[position].numel() / merged.flat.numel()
        selections = self._compressor.select([names[position] for position in few], tensors, wanted) if few else []
        if rest:
            selections = [*selections, *(_all_of(accumulated[position]) for position in rest)]
        return GroupChoice(
            tensors=[*tensors, *(accumulated[position] for position in rest)],
            selections=selections,
            counts=counts,
            positions=sorted(range(len(order)), key=order.__getitem__),
            merged=merged,
        )

    def end_step(self) -> None:
        """Take note that nothing of this step is looked at any more: its working memory serves the next one."""
        self._workspace.end_step()

    def _merge(self, tensors: Sequence[Tensor], are_used: Sequence[Optional[bool]]) -> "MergedParameters":
        numel = sum(tensor.numel() for tensor in tensors)
        flat = torch.cat(list(tensors), out=self._workspace.take(numel, tensors[0]))
        merged = MergedParameters(flat, self._workspace.take(numel, tensors[0]), tensors, are_used)
        merged.leave_out_unused()
        return merged


class MergedParameters(NamedTuple):
    """Several parameters as one flat tensor.

    Attributes:
        flat: their accumulated gradients laid end to end.
        mean: room for as many elements.
        tensors: the accumulated gradient of each.
        are_used: for each whether this rank used it; ``None`` where that is not tracked.
    """

    flat: Tensor
    mean: Tensor
    tensors: Sequence[Tensor]
    are_used: Sequence[Optional[bool]]

    def leave_out_unused(self) -> None:
        """Keep a parameter that this rank did not use out of the competition.

        If no rank used it, what is sent of it is not applied: its residual would win the same places for nothing, step
        after step.
        """
        for piece, is_used in zip(self._split(self.flat), self.are_used):
            if is_used is False:
                piece.zero_()

    def sent(self, selection: Selection) -> list[Selection]:
        """Return what a selection from ``flat`` holds of each parameter; the host waits for it."""
        numels = [tensor.numel() for tensor in self.tensors]
        if selection.indices is None:
            return self._whole(selection.values.reshape(-1))
        stops = list(accumulate(numels))
        # How many elements of the selection lie before the end of each parameter.
        bounds = torch.tensor(stops, device=selection.indices.device)
        cuts = torch.searchsorted(selection.indices, bounds).diff(prepend=bounds.new_zeros(1)).tolist()
        filled = [None] * len(cuts) if selection.filled is None else selection.filled.split(cuts)
        pieces = zip(selection.values.split(cuts), selection.indices.split(cuts), numels, stops, filled)
        return [
            Selection(values, indices - (stop - numel), numel, taken) for values, indices, numel, stop, taken in pieces
        ]

    def means(self, mean: Selection) -> list[Selection]:
        """Return the mean over ranks of each parameter."""
        if mean.indices is None:
            return self._whole(mean.values.reshape(-1))
        return self._whole(add_rows(mean.values, mean.indices, self.mean.zero_()))

    def kept(self, kept: Selection) -> list[Selection]:
        """Return what stays here of each parameter; changes ``flat``."""
        if kept.indices is None:
            whole = self._whole(kept.values.reshape(-1))
        else:
            whole = self._whole(self.flat.index_copy_(0, kept.indices, kept.values))
        return [
            Selection(tensor[:0], _no_indices(tensor), tensor.numel()) if is_used is False else selection
            for selection, tensor, is_used in zip(whole, self.tensors, self.are_used)
        ]

    def _split(self, flat: Tensor) -> list[Tensor]:
        return list(flat[: self.flat.numel()].split([tensor.numel() for tensor in self.tensors]))

    def _whole(self, flat: Tensor) -> list[Selection]:
        return [_all_of(piece) for piece in self._split(flat)]


class Workspace:
    """Memory that groups take in turn, and that serves again, in the same order, in the next step.

    Large blocks go back to the system when freed; taking them anew for every group costs more than filling them. What a
    step did not need is given back, so that a change of groups leaves nothing behind.
    """

    def __init__(self) -> None:
        self._held: list[Tensor] = []
        self._taken = 0

    def take(self, numel: int, like: Tensor) -> Tensor:
        """Return a flat tensor, its contents undefined, that nobody else gets before :meth:`end_step`.

        Args:
            numel: number of elements.
            like: whose type and device it has.
        """
        place, self._taken = self._taken, self._taken + 1
        held = self._held[place] if place < len(self._held) else None
        if held is None or held.numel() != numel or held.dtype != like.dtype:
            self._held[place : place + 1] = [like.new_empty(numel)]
        return self._held[place]

    def end_step(self) -> None:
        """Take everything back."""
        del self._held[self._taken :]
        self._taken = 0


def _merged_count(tensors: Sequence[Tensor], densities: Sequence[float]) -> int:
    # Numbers of elements are added before they are multiplied: the product of the paper, not a sum of roundings.
    numels: defaultdict[float, int] = defaultdict(int)
    for tensor, density in zip(tensors, densities):
        numels[density] += tensor.numel()
    return max(1, round(sum(density * numel for density, numel in numels.items())))


def _all_of(tensor: Tensor) -> Selection:
    return Selection(tensor, None, tensor.numel())


def _no_indices(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.int64, device=tensor.device)
