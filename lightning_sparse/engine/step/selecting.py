"""Ask a compressor what is sent of a group, and split the group into what travels by one way and by the other."""

from collections import defaultdict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import cache
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from lightning_sparse.compressors import Compressor, element_count
from lightning_sparse.compressors.selection import GroupSelection, Selection, WholeSelection, cut, parted
from lightning_sparse.engine.step.worker import Channel
from lightning_sparse.engine.wire import Wires
from lightning_sparse.engine.wire.base import Arrival, WireFormat
from lightning_sparse.functional.elements import add_rows


class Part(NamedTuple):
    """The parameters of a group that travel by one way: sent whole, or some elements of each."""

    positions: list[int]  # in the group
    tensors: list[Tensor]  # selected from: one of each parameter, or one of all of them laid end to end
    selection: GroupSelection
    counts: list[float]  # by parameter, elements that its density asks for; its share of them where merged
    wire: WireFormat
    merged: Optional["MergedParameters"] = None  # what lies end to end

    def exchange(self, channel: Channel, names: Sequence[str], used: Optional[Tensor]) -> Arrival:
        """Send what is selected, and return the mean of each parameter."""
        channel.recorder.see_selection(self.selection, self.counts)
        arrival = channel.run(self.wire.exchange(self.selection, self.tensors, used), names)
        if self.merged is not None:
            with channel.recorder.span("encode"):
                means, kept = self.merged.means(arrival.means[0]), self.merged.kept(arrival.kept[0])
            arrival = arrival._replace(means=means, kept=kept)
        if (samples := channel.recorder.samples) is not None:
            # The host waits for what is sent of each parameter where several are merged.
            samples.add_sent(names, self.selection if self.merged is None else self.merged.sent(self.selection[0]))
        return arrival


class GroupSelector:
    """Ask a compressor for its selections of a group; whole goes what has density 1, or takes far fewer bytes so."""

    def __init__(self, compressor: Compressor, wires: Wires) -> None:
        feedback = compressor.feedback
        if compressor.selects_across_group and feedback.momentum is not None and feedback.masks_momentum:
            raise ValueError(
                f"{type(compressor).__name__}.feedback asks for masks_momentum=True, but a method that selects across a"
                " group cannot mask the momentum of what it sent: set masks_momentum=False, or momentum=None"
            )
        self._compressor = compressor
        self._wires = wires
        self._holding = [wire for wire in wires.formats if type(wire).release is not WireFormat.release]
        self._used: set[WireFormat] = set()  # in this step
        self._used_before: set[WireFormat] = set()
        self._format_for = cache(wires.format_for)
        self._workspace = Workspace()

    def select(
        self,
        names: Sequence[str],
        accumulated: Sequence[Tensor],
        densities: Sequence[float],
        are_used: Sequence[Optional[bool]],
        whole: AbstractSet[str] = frozenset(),
    ) -> list[Part]:
        """Choose what is sent of gradients plus residuals, flat and not changed; parts sent whole come last."""
        few: list[int] = []
        rest: dict[WireFormat, list[int]] = {self._wires.learned: [], self._wires.whole: []}
        for position, (name, tensor, density) in enumerate(zip(names, accumulated, densities)):
            if name in whole:
                rest[self._wires.learned].append(position)
            elif self._is_sent_whole(tensor.numel(), density):
                rest[self._wires.whole].append(position)
            else:
                few.append(position)
        parts = self._ask(few, names, accumulated, densities, are_used) if few else []
        for wire, positions in rest.items():
            tensors = [accumulated[position] for position in positions]
            counts: list[float] = [tensor.numel() for tensor in tensors]
            if positions:
                parts.append(Part(positions, tensors, WholeSelection.of(tensors), counts, wire))
        self._used.update(part.wire for part in parts)
        return parts

    def _is_sent_whole(self, numel: int, density: float) -> bool:
        if self._compressor.dense_wire_format is None:
            return False
        if density >= 1 or self._compressor.selects_across_group:
            return density >= 1
        return self._format_for(numel, element_count(numel, density)) is self._wires.whole

    def release(self) -> None:
        """End the step: take working memory back, and have wires that it did not use give back theirs."""
        self._workspace.release()
        for wire in self._holding:
            if wire in self._used or wire in self._used_before:
                wire.release()
        self._used, self._used_before = set(), self._used

    def _ask(
        self,
        positions: list[int],
        names: Sequence[str],
        accumulated: Sequence[Tensor],
        densities: Sequence[float],
        are_used: Sequence[Optional[bool]],
    ) -> list[Part]:
        names, densities = [names[each] for each in positions], [densities[each] for each in positions]
        tensors = [accumulated[each] for each in positions]
        if self._compressor.selects_across_group and len(positions) > 1:
            merged = self._merge(tensors, [are_used[each] for each in positions])
            count = _merged_count(tensors, densities)
            [(wire, _, selection)] = parted(self._compressor.select(names, [merged.flat], [count]), self._format_of)
            shares = [count * tensor.numel() / merged.flat.numel() for tensor in tensors]
            return [Part(positions, [merged.flat], selection, shares, wire, merged)]
        counts = [element_count(tensor.numel(), density) for tensor, density in zip(tensors, densities)]
        return [
            Part(
                [positions[place] for place in places],
                [tensors[place] for place in places],
                selection,
                [counts[place] for place in places],
                wire,
            )
            for wire, places, selection in parted(self._compressor.select(names, tensors, counts), self._format_of)
        ]

    def _format_of(self, numel: int, count: Optional[int]) -> WireFormat:
        """Return the way of what a compressor has selected of a tensor, ``None`` for all of it."""
        if count is None:
            return self._wires.whole
        wire = self._format_for(numel, count)
        # What was selected element by element stays so: the rest of the tensor is in the residual.
        return self._wires.elements if wire is self._wires.whole else wire

    def _merge(self, tensors: Sequence[Tensor], are_used: Sequence[Optional[bool]]) -> "MergedParameters":
        numel = sum(tensor.numel() for tensor in tensors)
        flat = torch.cat(list(tensors), out=self._workspace.take(numel, tensors[0]))
        merged = MergedParameters(flat, self._workspace.take(numel, tensors[0]), tensors, are_used)
        merged.leave_out_unused()
        return merged


class MergedParameters(NamedTuple):
    """Several parameters as one flat tensor."""

    flat: Tensor  # ``tensors``, gradients plus residuals, laid end to end
    mean: Tensor  # room for as many elements
    tensors: Sequence[Tensor]
    are_used: Sequence[Optional[bool]]  # by this rank; ``None`` where that is not tracked

    def leave_out_unused(self) -> None:
        """Leave out what this rank did not use: where nobody did, its residual would win the places in every step."""
        for piece, is_used in zip(self._split(self.flat), self.are_used):
            if is_used is False:
                piece.zero_()

    def sent(self, selection: Selection) -> Sequence[Selection]:
        """Return what a selection from ``flat`` holds of each parameter; the host waits for it."""
        if selection.indices is None:
            return self._whole(selection.values.reshape(-1))
        return cut(selection, tuple(tensor.numel() for tensor in self.tensors))

    def means(self, mean: Selection) -> WholeSelection:
        """Return the mean over ranks of each parameter."""
        if mean.indices is None:
            return self._whole(mean.values.reshape(-1))
        return self._whole(add_rows(mean.values, mean.indices, self.mean.zero_()))

    def kept(self, kept: Selection) -> WholeSelection:
        """Return what stays here of each parameter, all of it where it was not used; changes ``flat``."""
        flat = kept.values.reshape(-1)
        if kept.indices is not None:
            flat = self.flat.index_copy_(0, kept.indices, kept.values)
        return WholeSelection.of(
            [
                tensor if is_used is False else piece
                for piece, tensor, is_used in zip(self._split(flat), self.tensors, self.are_used)
            ]
        )

    def _split(self, flat: Tensor) -> list[Tensor]:
        return list(flat[: self.flat.numel()].split([tensor.numel() for tensor in self.tensors]))

    def _whole(self, flat: Tensor) -> WholeSelection:
        return WholeSelection.of(self._split(flat))


class Workspace:
    """Memory that groups take in turn, in each step the same: taking large blocks anew costs more than filling them."""

    def __init__(self) -> None:
        self._held: list[Tensor] = []
        self._taken = 0

    def take(self, numel: int, like: Tensor) -> Tensor:
        """Return a flat tensor, its contents undefined, that nobody else gets before :meth:`release`."""
        place, self._taken = self._taken, self._taken + 1
        held = self._held[place] if place < len(self._held) else None
        if held is None or held.numel() != numel or held.dtype != like.dtype:
            self._held[place : place + 1] = [like.new_empty(numel)]
        return self._held[place]

    def release(self) -> None:
        """Take everything back."""
        del self._held[self._taken :]
        self._taken = 0


def _merged_count(tensors: Sequence[Tensor], densities: Sequence[float]) -> int:
    # Numbers of elements are added before they are multiplied: the product of the paper, not a sum of roundings.
    numels: defaultdict[float, int] = defaultdict(int)
    for tensor, density in zip(tensors, densities):
        numels[density] += tensor.numel()
    return max(1, round(sum(density * numel for density, numel in numels.items())))
