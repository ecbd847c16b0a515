"""Select the density and the wire format of each parameter, and the elements that a bucket sends."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache, lru_cache
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import Tensor

from lightning_sparse.compressors import Compressor, element_count
from lightning_sparse.compressors.base import same_everywhere
from lightning_sparse.compressors.selection import (
    FlatSelection,
    Selection,
    broken_rule,
    grouped,
    overwrite,
    scatter,
    whole,
)
from lightning_sparse.engine.collectives import Communicator
from lightning_sparse.engine.step.topology import LocalGradient
from lightning_sparse.engine.wire import Wires
from lightning_sparse.engine.wire.base import ExchangeResult, WireFormat
from lightning_sparse.functional.elements import counts_of

_STAGES = 4  # number of densities in a warm-up; Deep Gradient Compression uses one density per epoch
_UNKNOWN_STEPS = 1_000_000  # assumed number of training steps until the training loop sets the number
_FEW = 64  # number of cached densities
_STAIR = 1.25  # ratio of successive densities while the density falls after Adam's dense steps


class Densities:
    """The density of each parameter in the next step.

    1. The user sets the density: ``density=`` of the model, or per parameter (``LAGS(densities=...)``).
    2. Warm-ups raise the density: over ``warmup_steps``, and after the dense steps of a corrected Adam.
    3. Rules (:class:`~lightning_sparse.callbacks.AdaptiveDensity`) raise the density to ``ruled``, up to ``ceiling``.
    4. A plan of buckets raises the density to ``planned``, if the extra elements cost no time.
    5. ``sends_all`` sets the density to 1, which empties the residuals before ``sparse_auto`` sends dense gradients.
    """

    def __init__(self, compressor: Compressor, density: float, warmup_steps: Union[int, float] = 0) -> None:
        self._compressor, self._target = compressor, density
        self._warmup_steps = warmup_steps  # number of steps (int), or fraction of the training's steps (float)
        self.ruled: Mapping[str, float] = {}
        self.ceiling = 1.0
        self.planned: Mapping[str, float] = {}
        self.sends_all = False
        self._total_steps: Optional[int] = None  # number of steps of the training
        self._is_resumed = False  # whether a checkpoint has set _total_steps
        self._steps: Counter[int] = Counter()  # number of steps, by index of the optimizer
        self._in_warm_up = lru_cache(_FEW)(_raised)  # cached, because most steps repeat densities
        self.begin_step()

    def begin_step(self, progress: float = 1.0) -> None:
        """Set a warm-up's stage for the next step. ``progress`` is the finished fraction of Adam's warm-up, 0 to 1."""
        made, length = max(self._steps.values(), default=0), self._warmup_length
        self._stage = (_STAGES if made >= length else _STAGES * made // length, progress)
        self._compressor.begin_step(self._in_warm_up(self._target, *self._stage))

    def of(self, name: str) -> float:
        """Return the density of a parameter in the next step."""
        return 1.0 if self.sends_all else max(self.wanted(name), self.planned.get(name, 0.0))

    def wanted(self, name: str) -> float:
        """Return a parameter's density according to user, warm-ups and rules. A plan may only raise this density."""
        asked = self._in_warm_up(self.target(name), *self._stage)
        return max(asked, min(self.ruled.get(name, 0.0), self.ceiling))

    def count(self, name: str, numel: int) -> int:
        """Return the number of elements that a parameter of ``numel`` elements sends at the density :meth:`wanted`."""
        return element_count(numel, self.wanted(name))

    def target(self, name: str) -> float:
        """Return the density that the user has set for a parameter."""
        return self._compressor.densities.get(name, self._target)

    def expect_steps(self, total_steps: Optional[int]) -> None:
        """Set the number of training steps. After a resume, the number from the checkpoint is used."""
        if not self._is_resumed:
            self._total_steps = total_steps

    def count_step(self, optimizer: int) -> None:
        """Count a step of the optimizer with the index ``optimizer``."""
        self._steps[optimizer] += 1

    @property
    def _warmup_length(self) -> int:
        if isinstance(self._warmup_steps, int):
            return self._warmup_steps
        return math.ceil(round(self._warmup_steps * (self._total_steps or _UNKNOWN_STEPS), 6))

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the warm-up, or an empty dictionary without a warm-up."""
        return {"steps": dict(self._steps), "total_steps": self._total_steps} if self._warmup_steps else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a saved warm-up."""
        if self._warmup_steps:
            self._steps = Counter(state["steps"])
            self._is_resumed = bool(state["total_steps"])
            self._total_steps = state["total_steps"] or self._total_steps


def _raised(target: float, stage: int, progress: float) -> float:
    # In a warm-up the density falls in stages of equal ratio, as in the code of Deep Gradient Compression.
    least = falling_density(target, progress)
    return least if stage >= _STAGES else max(least, same_everywhere(target ** ((stage + 1) / (_STAGES + 1))))


def falling_density(target: float, progress: float) -> float:
    """Return a density that falls from 1 to the target, in steps of equal ratio.

    Args:
        target: density at the end of the fall.
        progress: finished fraction of the fall, 0 to 1.

    >>> [round(falling_density(0.01, progress), 3) for progress in (0.0, 0.5, 0.99, 1.0)]
    [1.0, 0.112, 0.012, 0.01]
    """
    if progress >= 1 or target >= 1:
        return target
    stairs = max(1, math.ceil(math.log(1 / target) / math.log(_STAIR)))
    return same_everywhere(target ** (int(progress * stairs) / stairs))


class Part(NamedTuple):
    """Parameters of a bucket that are sent in one wire format. A merged part has one selection for all parameters."""

    wire: WireFormat
    members: Sequence[LocalGradient]  # gradients of the parameters
    selection: Sequence[Selection]  # one selection per parameter; if merged, one of all concatenated parameters
    asked: int  # number of elements that the densities of the parameters ask for
    tensors: list[Tensor]  # gradient plus residual of each parameter
    laid: Sequence[Tensor] = ()  # the concatenated tensors, and a buffer for the mean; empty if not merged

    @property
    def names(self) -> list[str]:
        """Names of the parameters."""
        return [local.name for local in self.members]

    def exchange(self, communicator: Communicator, used: Optional[Tensor]) -> ExchangeResult:
        """Send the selected elements, and return the mean of each parameter.

        Args:
            communicator: communicator of the ranks that exchange selections.
            used: uint8 flags of the parameters that this rank has used; only with the last message of a step.
        """
        communicator.recorder.see_selection(self.selection, self.asked)
        result = communicator.run(self.wire.exchange(self.selection, self.laid[:1] or self.tensors, used))
        if self.laid:
            with communicator.recorder.span("encode"):
                result = self._split(result)
        if (samples := communicator.recorder.samples) is not None:
            samples.add_sent(self.names, self._sent() if self.laid else self.selection)
        return result

    def _split(self, result: ExchangeResult) -> ExchangeResult:
        """Split the result of a merged part by parameter. All elements of an unused parameter count as unsent."""
        numels = list(map(Tensor.numel, self.tensors))
        flat, mean = self.laid
        scatter([mean], result.means)
        overwrite([flat], result.kept)
        pieces = zip(flat.split(numels), self.tensors, self.members)
        kept = [tensor if local.is_used is False else piece for piece, tensor, local in pieces]
        return result._replace(means=whole(mean.split(numels)), kept=whole(kept))

    def _sent(self) -> Sequence[Selection]:
        """Split the selection of a part that merges several parameters. The host waits for the device."""
        values, indices, _, filled = self.selection[0]
        if indices is None:
            return whole(self.tensors)
        numels = tuple(map(Tensor.numel, self.tensors))
        return FlatSelection(values, indices, numels, counts_of(indices, numels), filled)


class BucketSelector:
    """Select the elements of a bucket. A parameter is sent dense at density 1, or if a dense message is far shorter."""

    checks_on_device = False  # whether to check GPU selections, which synchronizes; True in lightning_sparse.testing

    def __init__(self, compressor: Compressor, wires: Wires) -> None:
        self._compressor = compressor
        self._wires = wires
        self._formats = wires.formats
        self._format_for = cache(wires.format_for)
        # Two buffers per merged part, of this step and of the last. On a CPU, new large blocks cost page faults.
        self._buffers: dict[Any, list[Tensor]] = {}
        self._old_buffers: dict[Any, list[Tensor]] = {}

    def select(
        self,
        bucket: Sequence[LocalGradient],
        accumulated: Sequence[Tensor],
        densities: Sequence[float],
        dense: AbstractSet[str] = frozenset(),
    ) -> list[Part]:
        """Select the elements of ``accumulated`` to send. Dense parts come last.

        Args:
            bucket: gradients. With ``selects_across_bucket``, no element of an unused parameter is sent.
            accumulated: flat gradients plus residuals; not changed.
            densities: fraction of elements to send, by parameter.
            dense: names of parameters to send dense, because Adam's second moment is not estimated yet.
        """
        ways = [
            self._wires.unquantized if local.name in dense else self._way_of_dense(tensor.numel(), density)
            for local, tensor, density in zip(bucket, accumulated, densities)
        ]
        counts = [
            tensor.numel() if way is not None else element_count(tensor.numel(), density)
            for way, tensor, density in zip(ways, accumulated, densities)
        ]
        few = [position for position, way in enumerate(ways) if way is None]
        parts: list[Part] = []
        chosen: Sequence[Selection] = []
        some, summed = [bucket[each] for each in few], [accumulated[each] for each in few]
        if self._compressor.selects_across_bucket and len(few) > 1:
            parts.append(self._select_across(some, summed, [densities[each] for each in few]))
        elif few:
            chosen = self._ask(some, summed, [counts[each] for each in few])
            for position, way in zip(few, self._ways_of(chosen)):
                ways[position] = way
        for wire in self._formats:
            positions = [position for position, way in enumerate(ways) if way is wire]
            if not positions:
                continue
            tensors = [accumulated[each] for each in positions]
            selection = chosen
            if positions != few:  # otherwise, ``chosen`` has exactly these selections
                of_few = {} if set(few).isdisjoint(positions) else dict(zip(few, chosen))
                selection = [of_few.get(each) or Selection(accumulated[each], None, counts[each]) for each in positions]
            members = [bucket[each] for each in positions]
            parts.append(Part(wire, members, grouped(selection), sum(counts[each] for each in positions), tensors))
        return parts

    def release(self) -> None:
        """End the step. The next step reuses the buffers of this step. Older buffers are freed."""
        self._old_buffers, self._buffers = self._buffers, {}

    def _ask(
        self, members: Sequence[LocalGradient], tensors: Sequence[Tensor], counts: Sequence[int]
    ) -> Sequence[Selection]:
        """Run the compressor. Raise ``ValueError`` for an invalid selection, which would fail or hang later."""
        names = [local.name for local in members]
        selections = self._compressor.select(names, tensors, counts)
        is_listed = not isinstance(selections, FlatSelection)  # a FlatSelection is valid by construction
        if self.checks_on_device or (is_listed and tensors[0].device.type == "cpu"):
            self._check(names, tensors, counts, selections)
        return selections

    def _check(
        self, names: Sequence[str], tensors: Sequence[Tensor], counts: Sequence[int], selections: Sequence[Selection]
    ) -> None:
        name, size_of = type(self._compressor).__name__, self._compressor.selection_size
        if len(selections) != len(tensors):
            raise ValueError(f"{name}.select returned {len(selections)} selections for {len(tensors)} tensors")
        for of, tensor, count, selection in zip(names, tensors, counts, selections):
            size = size_of(tensor.numel(), count) if self._compressor.wire_format == "gather" else None
            if rule := broken_rule(selection, tensor.numel(), size):
                raise ValueError(f"{name}.select returned, for {of!r} of {tensor.numel()} elements, a selection {rule}")

    def _way_of_dense(self, numel: int, density: float) -> Optional[WireFormat]:
        if self._compressor.dense_wire_format is None:
            return None
        if density >= 1:
            return self._wires.dense
        is_alone = not self._compressor.selects_across_bucket
        is_shorter = is_alone and self._format_for(numel, element_count(numel, density)) is self._wires.dense
        return self._wires.dense if is_shorter else None

    def _ways_of(self, selections: Sequence[Selection]) -> list[WireFormat]:
        if isinstance(selections, FlatSelection):
            return list(map(self._way_of_some, selections.numels, selections.counts))
        return [
            self._wires.dense if each.indices is None else self._way_of_some(each.numel, each.indices.shape[-1])
            for each in selections
        ]

    def _way_of_some(self, numel: int, count: int) -> WireFormat:
        wire = self._format_for(numel, count)
        # A sparse selection is never sent dense, because the unselected elements must stay in the residual.
        return self._wires.sparse if wire is self._wires.dense else wire

    def _select_across(
        self, members: Sequence[LocalGradient], tensors: list[Tensor], densities: Sequence[float]
    ) -> Part:
        numels = list(map(Tensor.numel, tensors))
        key = (*numels, tensors[0].dtype, *(local.name for local in members))
        buffers = self._old_buffers.get(key) or [tensors[0].new_empty(sum(numels)) for _ in range(2)]
        self._buffers[key] = buffers
        flat, mean = buffers
        torch.cat(tensors, out=flat)
        for piece, local in zip(flat.split(numels), members):
            if local.is_used is False:  # zeros, so that no element of an unused parameter's residual is selected
                piece.zero_()
        count = _merged_count(tensors, densities)
        selection = grouped(self._ask(members, [flat], [count]))
        return Part(self._ways_of(selection)[0], members, selection, count, tensors, (flat, mean))


def _merged_count(tensors: Sequence[Tensor], densities: Sequence[float]) -> int:
    # As in the paper of OMGS, sizes are added before the multiplication by density. Only the sum is rounded.
    numels: defaultdict[float, int] = defaultdict(int)
    for tensor, density in zip(tensors, densities):
        numels[density] += tensor.numel()
    return max(1, round(sum(density * numel for density, numel in numels.items())))
