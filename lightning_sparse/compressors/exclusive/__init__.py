"""Exclusive selection: each rank looks for large elements in a partition of its own, above one common threshold."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.base import Compressor, Gather
from lightning_sparse.compressors.exclusive.partitions import Partitions
from lightning_sparse.compressors.exclusive.threshold import THRESHOLD_RULES, Pursuit
from lightning_sparse.compressors.layout import ModelLayout
from lightning_sparse.compressors.selection import Selection
from lightning_sparse.functional import indices_reaching_each, magnitude_histogram, magnitude_quantile, top_k_indices
from lightning_sparse.registry import one_of


class ExclusiveSelection(Compressor):
    """The common base of ExDyna and MiCRO, which differ in how the model is cut into partitions.

    The model is one flat vector, in the order of its definition, and cut into as many partitions as there are ranks.
    In step ``t`` rank ``r`` searches partition ``(t + r) mod ranks`` of its accumulated gradient for magnitudes that
    reach the threshold. Every rank then sends its values at the union of all choices, so that nobody keeps anything
    there. Partitions do not overlap: the union is as large as the choices together, however many ranks there are.

    An element that is large on one rank only waits until that rank visits its partition, for as many steps as there
    are ranks at most.

    While there is no threshold (mode ``"default"``, at the start), each rank takes the largest magnitudes of each
    tensor, in proportion to how much of it lies in its partition, and counts the magnitudes of its partition. The
    counts of all ranks together (8 KiB from each) give the threshold of the next step. So it is again when a threshold
    that was not measured just before has selected twice as much as was wanted, or half: what waits has then grown or
    shrunk too fast to be followed step by step. As long as fewer elements than are wanted differ from zero, there is no
    threshold.

    The number of elements wanted follows from the density of the whole model, of which :meth:`density_of` takes note:
    the counts of the tensors, one at least for each, add up to more in a model of many small tensors.

    Args:
        mode: ``"default"``, or ``"paper"`` for the published start, steps and cuts.

    Raises:
        ValueError: if the mode is unknown.
    """

    default_density: ClassVar[Optional[float]] = 0.01
    wire_format: ClassVar[str] = "union"
    modes: ClassVar[tuple[str, ...]] = ("default", "paper")

    def __init__(self, mode: str = "default") -> None:
        self.mode = one_of("mode", mode, self.modes)
        self._rule = THRESHOLD_RULES[mode]
        self.begin(ModelLayout((), (), 0, 1, torch.device("cpu")))

    @override
    def begin(self, layout: ModelLayout) -> None:
        self._layout = layout
        self._starts = layout.starts()
        self._density = 1.0 if self.default_density is None else self.default_density
        self._step = 0
        self._pursuit = Pursuit()
        self._histogram: Optional[Tensor] = None
        self._partitions = self._first_partitions(layout)

    @abstractmethod
    def _first_partitions(self, layout: ModelLayout) -> Partitions:
        """Cut the model before anything is known of it."""

    def _next_partitions(self, positions: Tensor) -> None:
        """Cut anew, where a step has selected ``positions`` (int64 ``[count]``) of the flat vector."""

    @override
    def density_of(self, name: str, density: float) -> float:
        self._density = density
        return density

    @override
    def select(self, names: Sequence[str], accumulated: Sequence[Tensor], counts: Sequence[int]) -> list[Selection]:
        owned = self._partitions.owned(self._layout.rank, self._step)
        # One element is enough to void the step, in whosever partition it lies.
        spoilt = _first_not_finite(accumulated)
        starts = [self._starts[name] for name in names]
        ranges = [
            (0, 0) if indices is not None else _within(owned, start, tensor.numel())
            for start, tensor, indices in zip(starts, accumulated, spoilt)
        ]
        pieces = [tensor[first:last] for tensor, (first, last) in zip(accumulated, ranges)]
        chosen = self._choose(pieces, [start + first for start, (first, _) in zip(starts, ranges)])
        return [
            Selection(piece.index_select(0, found), found + first, tensor.numel())
            if indices is None
            else Selection(tensor.index_select(0, indices), indices, tensor.numel())
            for tensor, indices, piece, found, (first, _) in zip(accumulated, spoilt, pieces, chosen, ranges)
        ]

    def _choose(self, pieces: Sequence[Tensor], starts: Sequence[int]) -> list[Tensor]:
        """Return positions in pieces of the model, of which each starts at a place of the flat vector."""
        if self._wanted(self._layout.numel) == self._layout.numel:
            return [torch.arange(piece.numel(), device=piece.device) for piece in pieces]
        threshold = self._present_threshold()
        if threshold is not None:
            return indices_reaching_each(pieces, threshold)
        return [self._measure(piece, start) for piece, start in zip(pieces, starts)]

    def _measure(self, piece: Tensor, start: int) -> Tensor:
        """Choose a piece's share of what is wanted, and count its magnitudes."""
        numel, wanted = self._layout.numel, self._wanted(self._layout.numel)
        # Differences of a running total: over the whole model they add up to what is wanted, however it is cut.
        count = wanted * (start + piece.numel()) // numel - wanted * start // numel
        if piece.numel():
            histogram = magnitude_histogram(piece)
            self._histogram = histogram if self._histogram is None else self._histogram.add_(histogram)
        return top_k_indices(piece, count) if count else _no_indices(piece)

    def _wanted(self, numel: int) -> int:
        return min(numel, max(self._layout.ranks, round(self._density * numel)))

    def _present_threshold(self) -> Optional[float]:
        threshold = self._pursuit.threshold
        return self._rule.start(self._wanted(self._layout.numel)) if threshold is None else threshold

    @override
    def finish_step(
        self, names: Sequence[str], means: Sequence[Selection], finite: Tensor, all_gather: Gather
    ) -> Sequence[Selection]:
        histogram, self._histogram = self._histogram, None
        # The state is the host's: it decides what the next step looks at. Waiting for this one bool costs little where
        # the sizes of all messages had to be waited for.
        if not bool(finite):
            return means
        positions = torch.cat([_positions(mean) + self._starts[name] for name, mean in zip(names, means)])
        numel = sum(mean.numel for mean in means)  # without parameters whose gradients have a sparse layout
        wanted = self._wanted(numel)
        if wanted < numel:
            threshold = self._present_threshold()
            if threshold is None:
                counted = magnitude_histogram(positions[:0].float()) if histogram is None else histogram
                # Half the bytes of int64; a count that fp32 rounds is rounded alike for all who receive it.
                gathered = all_gather(counted.float())
                measured = magnitude_quantile(gathered.double().sum(dim=0), wanted) or None
                self._pursuit = Pursuit(measured, self._pursuit.gain)
            else:
                self._pursuit = self._rule.follow(threshold, self._pursuit, positions.numel(), wanted)
        self._next_partitions(positions)
        self._step += 1
        return means

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the step counter, the threshold (0 for none) with its gain and error, and where partitions are cut."""
        cuts = torch.tensor(self._partitions.cuts, device="cpu")
        threshold, gain, error = self._pursuit
        return {"step": self._step, "threshold": threshold or 0.0, "gain": gain, "error": error, "cuts": cuts}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the state; for another number of ranks, or another model, partitions start anew.

        Raises:
            ValueError: if the state is another method's.
        """
        expected = self.state_dict().keys()
        # Checkpoints of version 0.1 keep neither.
        gain, error = (state.get(name, getattr(Pursuit(), name)) for name in ("gain", "error"))
        if state.keys() | {"gain", "error"} != expected:
            raise ValueError(
                f"{type(self).__name__} keeps {', '.join(expected)}, but was given a state of"
                f" {', '.join(map(str, state)) or 'nothing'}; load it into the compressor that it was saved with"
            )
        self._step = int(state["step"])
        self._pursuit = Pursuit(float(state["threshold"]) or None, float(gain), float(error))
        cuts = tuple(state["cuts"].tolist())
        present = self._partitions.cuts
        if len(cuts) == len(present) and cuts[-1] == present[-1]:
            self._partitions = self._partitions._replace(cuts=cuts)


def _first_not_finite(tensors: Sequence[Tensor]) -> list[Optional[Tensor]]:
    """Return, by tensor, the position (int64 ``[1]``) of an element that is not finite; ``None`` where all are."""
    # The sum of squares is the fastest look at every element; it may itself overflow, so only a norm that is finite
    # proves anything. The host has to wait for it, as it has for the number of elements that reach a threshold.
    are_finite = torch.stack(torch._foreach_norm(list(tensors))).isfinite().tolist()
    return [None if is_finite else _not_finite(tensor) for tensor, is_finite in zip(tensors, are_finite)]


def _not_finite(tensor: Tensor) -> Optional[Tensor]:
    indices = tensor.isfinite().logical_not_().nonzero().squeeze(1)[:1]
    return indices if indices.numel() else None


def _within(owned: tuple[int, int], start: int, numel: int) -> tuple[int, int]:
    """Return which part of a tensor that starts somewhere in the flat vector is owned."""
    first, last = (min(max(edge - start, 0), numel) for edge in owned)
    return first, last


def _no_indices(tensor: Tensor) -> Tensor:
    """Return no index into a tensor."""
    return torch.empty(0, dtype=torch.int64, device=tensor.device)


def _positions(mean: Selection) -> Tensor:
    assert mean.indices is not None
    return mean.indices.flatten()
