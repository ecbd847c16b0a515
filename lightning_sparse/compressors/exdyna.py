"""ExDyna: each rank searches one partition of the model. All partitions have equal loads, or in MiCRO equal sizes.

Yoon and Oh, "Preserving Near-Optimal Gradient Sparsification Cost for Scalable Distributed Deep Learning", CCGrid 2024
(arXiv 2402.13781); "MiCRO: Near-Zero Cost Gradient Sparsification for Scaling and Accelerating Distributed DNN
Training", HiPC 2023 (arXiv 2310.00967).
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Optional

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.base import Compressor, Gather, ModelLayout
from lightning_sparse.compressors.selection import FlatSelection, Selection
from lightning_sparse.compressors.topk import indices_reaching, top_k_indices
from lightning_sparse.functional.elements import copied_to, counts_of, repeat_interleave, starts_of
from lightning_sparse.functional.reductions import magnitude_histogram, magnitude_quantile

_SMALLEST = 2.0**-126  # smallest normal fp32 number; a threshold of zero would select everything
_LARGEST = 2.0**127
_GAIN = 0.05  # gain of the control loop; density settles in about 25 steps, and oscillates with three times this gain
_MIN_GAIN = _GAIN / 100  # minimum gain; with nearly constant gradients, density then settles in hundreds of steps
_CALMING = 0.5  # factor that multiplies the gain after a step in which the error changes sign
_RECOVERY = 1.05  # factor that multiplies the gain after any other step
_CHANCE = 2.0  # standard deviations; if the old or the new error is smaller, a change of sign may be chance
_LARGEST_STEP = 0.1  # largest change of ln(threshold) in a step
_FAR_OFF = 2.0  # ratio of selected to wanted elements, or the inverse, above which a new histogram is computed
_SIGMAS = 4.0  # standard deviations of the count; smaller errors may be chance, and cause no new histogram
_BLOCKS = 1024  # number of blocks, as published: enough to balance partitions, few enough to store a load per block
_MIN_BLOCK = 32  # elements per block, as published; fewer only if the model has fewer elements per rank
_LOAD_MEMORY = 0.95  # decay of a block's load per step; a single step selects too few elements to compare blocks
_STEPS_BETWEEN_CUTS = 16


class ExDyna(Compressor):
    """Send elements that reach a common threshold. Each rank searches a part of the model with an equal load.

    The model, flat in order of definition, is cut into about 1024 blocks. A partition is a run of blocks. In step ``t``
    rank ``r`` searches partition ``(t + r) mod world_size`` of the accumulated gradient for magnitudes that reach the
    threshold. Every rank then sends all elements that any rank selected, and has no residual at these elements.
    Partitions do not overlap, so the number of sent elements does not grow with the number of ranks. The load of a
    block is a moving average of the number of elements selected in the block. All ranks compute the same loads and the
    same partitions, without communication.

    The first step has no threshold. A count that is wrong by a factor of 2 may reset the threshold. Without a
    threshold, each rank selects the largest magnitudes of a partition, and builds a histogram. The sum of the
    histograms (8 KiB per rank) gives the next threshold. The density applies to the whole model, with at least an
    element per rank. ``docs/papers.md`` lists the differences from the paper.

    Example::

        >>> layout = ModelLayout(("weight",), (4,), rank=0, world_size=2, device=torch.device("cpu"))
        >>> exdyna = ExDyna()
        >>> exdyna.begin(layout)
        >>> exdyna.select(["weight"], [torch.tensor([0.1, -3.0, 2.0, -0.5])], counts=[2])[0].values
        tensor([-3.])
    """

    default_density: ClassVar[Optional[float]] = 0.01
    wire_format: ClassVar[str] = "union"
    rebalances: ClassVar[bool] = True  # whether partitions have equal loads; otherwise, equal sizes

    def __init__(self) -> None:
        self._density = self.default_density or 1.0
        self.begin(ModelLayout((), (), 0, 1, torch.device("cpu")))

    @override
    def begin(self, layout: ModelLayout) -> None:
        self._layout = layout
        self._starts = dict(zip(layout.names, starts_of(layout.numels)))  # offsets in the flat model
        self._step = 0
        self._threshold = ThresholdState()
        self._histogram = magnitude_histogram(torch.empty(0, device=layout.device))
        # Offset of each block in the flat model, ascending, and the end of the last block.
        self._edges = (block_edges if self.rebalances else even_cuts)(layout.numel, layout.world_size)
        blocks = len(self._edges) - 1
        self._cuts = even_cuts(blocks, layout.world_size)  # first block of each partition, and the number of blocks
        self._loads = torch.zeros(blocks, dtype=torch.float64, device="cpu")

    @override
    def begin_step(self, density: float) -> None:
        self._density = density

    @override
    def select(self, names: Sequence[str], accumulated: Sequence[Tensor], counts: Sequence[int]) -> Sequence[Selection]:
        partition = (self._step + self._layout.rank) % self._layout.world_size
        owned = [self._edges[block] for block in self._cuts[partition : partition + 2]]
        starts = [self._starts[name] for name in names]
        ranges = [
            [min(max(edge - start, 0), tensor.numel()) for edge in owned] for start, tensor in zip(starts, accumulated)
        ]
        pieces = [tensor[first:last] for tensor, (first, last) in zip(accumulated, ranges)]
        chosen = self._choose(pieces, [start + first for start, (first, _) in zip(starts, ranges)])
        indices = [each + first for each, (first, _) in zip(chosen, ranges)]
        # If a tensor has a non-finite element in any partition, select only this element, so all ranks skip the step.
        for number, spoilt in _first_not_finite(accumulated).items():
            indices[number] = spoilt
        return FlatSelection.of(accumulated, indices)

    def _choose(self, pieces: Sequence[Tensor], starts: Sequence[int]) -> list[Tensor]:
        """Return the selected indices in each piece. ``starts`` are the offsets of the pieces in the flat model."""
        if self._wanted(self._layout.numel) == self._layout.numel:
            return [torch.arange(piece.numel(), device=piece.device) for piece in pieces]
        if self._threshold.threshold is not None:
            numels = tuple(map(Tensor.numel, pieces))
            found = indices_reaching(torch.cat(list(pieces)), self._threshold.threshold)
            return [some - start for some, start in zip(found.split(counts_of(found, numels)), starts_of(numels))]
        return [self._measure(piece, start) for piece, start in zip(pieces, starts)]

    def _measure(self, piece: Tensor, start: int) -> Tensor:
        """Select the largest elements of a piece. Add the magnitudes of all elements of the piece to the histogram."""
        numel, wanted = self._layout.numel, self._wanted(self._layout.numel)
        # The counts are differences of a running total, so the counts of all pieces of the model add up to `wanted`.
        count = wanted * (start + piece.numel()) // numel - wanted * start // numel
        self._histogram += magnitude_histogram(piece)
        return top_k_indices(piece, count) if count else torch.empty(0, dtype=torch.int64, device=piece.device)

    def _wanted(self, numel: int) -> int:
        return min(numel, max(self._layout.world_size, round(self._density * numel)))

    @override
    def finish_step(self, names: Sequence[str], means: Sequence[Selection], finite: Tensor, all_gather: Gather) -> None:
        if not bool(finite):  # a synchronization, because the state is on the host
            self._histogram.zero_()
            return
        indices = [mean.indices.flatten() for mean in means]  # type: ignore[union-attr]  # a union has indices
        numel = sum(mean.numel for mean in means)
        wanted = self._wanted(numel)
        if wanted < numel and self._threshold.threshold is not None:
            self._threshold = self._threshold.updated(sum(map(Tensor.numel, indices)), wanted)
        elif wanted < numel:
            # fp32 has half the bytes of int64; all ranks round a large count equally.
            gathered = all_gather(self._histogram.float())
            self._histogram.zero_()
            measured = magnitude_quantile(gathered.double().sum(dim=0), wanted) or None
            self._threshold = ThresholdState(measured, self._threshold.gain)
        if self.rebalances:
            starts = tuple(self._starts[name] for name in names)
            counts = tuple(map(Tensor.numel, indices))
            self._rebalance(torch.cat(indices) + repeat_interleave(starts, counts, indices[0].device))
        self._step += 1

    def _rebalance(self, positions: Tensor) -> None:
        """Update the loads of blocks from ``positions`` of selected elements. Every 16 steps, cut new partitions."""
        before = self._loads.to(positions.device, non_blocking=True)
        blocks = torch.bucketize(positions, copied_to(self._edges, positions.device)[1:-1], right=True)
        counts = torch.zeros_like(before).index_add_(0, blocks, torch.ones_like(blocks, dtype=before.dtype))
        self._loads = before.mul(_LOAD_MEMORY).add_(counts, alpha=1 - _LOAD_MEMORY)
        if (self._step + 1) % _STEPS_BETWEEN_CUTS == 0 and (loads := self._loads.cpu()).any():
            self._cuts = balanced_cuts(loads, self._layout.world_size)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the step, threshold (0 for none), gain and error of the control loop, partitions, loads of blocks."""
        cuts = torch.tensor(self._cuts, device="cpu")
        threshold, gain, error = self._threshold
        state = {"step": self._step, "threshold": threshold or 0.0, "gain": gain, "error": error, "cuts": cuts}
        return {**state, "loads": self._loads.cpu()} if self.rebalances else state

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the state. With another world size or another model, partitions start with equal sizes."""
        expected = self.state_dict().keys()
        if state.keys() != expected:
            raise ValueError(
                f"{type(self).__name__} has the state {', '.join(expected)}, but got"
                f" {', '.join(map(str, state)) or 'nothing'}; load the state into the compressor that saved the state"
            )
        self._step = int(state["step"])
        self._threshold = ThresholdState(float(state["threshold"]) or None, float(state["gain"]), float(state["error"]))
        cuts = tuple(state["cuts"].tolist())
        if len(cuts) == len(self._cuts) and cuts[-1] == self._cuts[-1]:
            self._cuts = cuts
        if self.rebalances and state["loads"].numel() == self._loads.numel():
            self._loads = state["loads"].clone()


class ThresholdState(NamedTuple):
    """A threshold for the whole model, equal on all ranks, with the state of the control loop."""

    threshold: Optional[float] = None  # threshold of the next step; None to measure a new threshold
    gain: float = _GAIN  # change of ln(threshold) per ln(selected / wanted)
    error: float = 0.0  # ln(selected / wanted) of the last step; 0 after a measurement

    def updated(self, selected: int, wanted: int) -> "ThresholdState":
        """Return the state for the next step. ``selected`` and ``wanted`` are counts of the last step's elements."""
        assert self.threshold is not None
        error = math.log(max(selected, 0.5) / wanted)
        # When the threshold falls, all residuals just below the old threshold are sent at once. The high count raises
        # the threshold, so the next count is low, and so on. With a large gain this cycle never ends.
        overshoots = error * self.error < 0 and min(abs(error), abs(self.error)) * math.sqrt(wanted) > _CHANCE
        gain = max(_MIN_GAIN, self.gain * _CALMING) if overshoots else min(_GAIN, self.gain * _RECOVERY)
        is_far_off = not wanted / _FAR_OFF < selected < wanted * _FAR_OFF
        # A step that computes a histogram sets ``self.error`` to 0, and sends all large elements. A small count in the
        # next step is then normal.
        if self.error and is_far_off and abs(selected - wanted) >= _SIGMAS * math.sqrt(wanted):
            return ThresholdState(None, gain)
        step = max(-_LARGEST_STEP, min(_LARGEST_STEP, gain * error))
        return ThresholdState(min(max(self.threshold * math.exp(step), _SMALLEST), _LARGEST), gain, error)


def even_cuts(total: int, parts: int) -> tuple[int, ...]:
    """Cut ``total`` items into parts that differ by at most 1 item, larger parts first."""
    size, larger = divmod(total, parts)
    return tuple(part * size + min(part, larger) for part in range(parts + 1))


def block_edges(numel: int, world_size: int) -> tuple[int, ...]:
    """Cut a model into blocks that differ by at most 1 element."""
    blocks = max(world_size, min(_BLOCKS, numel // _MIN_BLOCK))
    return tuple(block * numel // blocks for block in range(blocks + 1))


def balanced_cuts(loads: Tensor, world_size: int) -> tuple[int, ...]:
    """Cut blocks into one run per rank. Loads of runs are nearly equal. Each run has at least one block.

    Loads are float64 ``[blocks]`` on the CPU, not all zero. There are at least ``world_size`` blocks.

        >>> balanced_cuts(torch.tensor([8.0, 1.0, 1.0, 2.0, 2.0, 2.0]), world_size=2)
        (0, 1, 6)
    """
    blocks = loads.numel()
    reached = torch.cat([loads.new_zeros(1), loads.cumsum(0)])
    targets = torch.arange(1, world_size, dtype=loads.dtype) * (reached[-1] / world_size)
    after = torch.searchsorted(reached, targets).clamp_(1, blocks)
    before = after - 1
    is_nearer = targets - reached[before] < reached[after] - targets
    cuts = [0]
    for rank, nearest in enumerate(torch.where(is_nearer, before, after).tolist(), start=1):
        cuts.append(min(max(nearest, cuts[-1] + 1), blocks - world_size + rank))
    return (*cuts, blocks)


def _first_not_finite(tensors: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return the index (int64 ``[1]``) of the first non-finite element, by the number of a tensor with one."""
    # The norm is the fastest pass over all elements. A finite norm proves that all elements are finite. An infinite
    # norm may be an overflow. The host waits for the norms, and later for the number of selected elements.
    are_finite = torch.stack(torch._foreach_norm(list(tensors))).isfinite().tolist()
    suspects = [number for number, is_finite in enumerate(are_finite) if not is_finite]
    first = {number: tensors[number].isfinite().logical_not_().nonzero().squeeze(1)[:1] for number in suspects}
    return {number: indices for number, indices in first.items() if indices.numel()}


class MiCRO(ExDyna):
    """Send elements that reach a common threshold. Each rank searches an equal part of the model.

    MiCRO is :class:`~lightning_sparse.compressors.ExDyna` with partitions of fixed size. If one partition has most of
    the large elements, messages have much padding, because all messages have the size of the largest message.
    """

    rebalances: ClassVar[bool] = False
