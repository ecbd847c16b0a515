"""One step: compensate, select, encode, exchange, decode; and at its end commit.

The way of one parameter's gradient ``g`` on one rank, with a residual ``e``, at a density below 1:

1. **Compensate**: the loss scale is divided out, and the memory makes ``v = e + g``, where ``g`` was. ``e`` does not
   change yet.
2. **Select**: the compressor chooses the elements of ``v`` that are sent.
3. **Encode, exchange, decode**: a wire format writes them into payloads, and a collective carries each. Read from what
   arrives are the means over ranks, whether all of it is finite, whether any rank used the parameter, and the error
   that rounding to the wire's type left here.
4. **Commit**, once all buckets of the step have arrived: the new residual is ``v``, with the rounding error in the
   places that were sent; the mean over ranks, zero where nobody sent, is written to the gradient.

**Kept between steps**, and changed by commit alone: residuals, and with momentum correction velocities, each rank's
own; the second moments of Adam and a compressor's thresholds, the same on all ranks. If anything that arrived is not
finite, on any rank, nothing that is kept changes, and the gradient says so to a gradient scaler, as with DDP. Where no
rank used a parameter, its residual stays, and DDP leaves its gradient alone.

**Sent whole**, as a part of their bucket by themselves and with their residual, are parameters whose density is 1, if
the compressor has a ``dense_wire_format``, and those that take far fewer bytes so.

**Momentum correction** puts a velocity in the place of ``g`` (1); with masking it starts anew where an element was
sent (4).

**Adam and AdamW** (:mod:`~lightning_sparse.engine.adam`), where they are corrected:

- first steps are whole, and the optimizer acts as ever, until its second moment is known; then the density falls;
- from then on the memory puts Adam's update ``g / (root of the second moment)`` in the place of ``g`` (1), so that the
  residual is one of updates; the first moment is moved into the residual once, and is zero from then on;
- every step begins with the mean, in 16 bits, of a few of the gradients themselves of the step before, from which their
  second moments learn; it travels during backward;
- the mean update is written as the gradient that it stands for (4), for whoever looks at gradients before the step; in
  the optimizer's place this package applies the update and weight decay.

With two levels (:class:`~lightning_sparse.engine.step.topology.HierarchicalTopology`) ``g`` is this rank's share of the
mean gradient of its node, the other ranks are those with the same share on the other nodes, and commit ends with
handing the shares to the whole node.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from itertools import groupby
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.selection import Selection, grouped
from lightning_sparse.engine.memory.residual import Clip, Hyperparameters, Memory
from lightning_sparse.engine.planner import Planner
from lightning_sparse.engine.step.selecting import BucketSelector, Part
from lightning_sparse.engine.step.topology import FlatTopology, LocalGradient
from lightning_sparse.engine.wire import Wires
from lightning_sparse.engine.wire.base import ExchangeResult, Payload
from lightning_sparse.functional.elements import round_to, runs
from lightning_sparse.functional.reductions import fingerprint, norms_of

__all__ = ["EMPTY_CONTEXT", "BucketResult", "LocalGradient", "Pipeline", "StepContext"]


_APART = (
    "between two exchanges of one optimizer step gradients were changed on some ranks, and not alike on the others, by"
    " zero_grad, a scale, or a backward that nobody was told of, such as in on_after_backward: what had arrived is no"
    " longer the same everywhere, and replicas would drift apart. Change gradients on all ranks, or after the"
    " optimizer's step, and go backward from what the model returned, or once from a sum of losses"
)
_ODD = 0x100000001B3  # gradients that change places count differently


class StepContext(NamedTuple):
    """Facts of the step in progress that come from outside the pipeline."""

    loss_scale: Optional[Tensor] = None  # of the loss, one element, other in each step: what is kept is kept without it
    hyperparameters: Mapping[str, Hyperparameters] = {}  # by parameter name; empty where no optimizer is known
    dense: AbstractSet[str] = frozenset()  # names sent whole: Adam's second moment of them is still to be learned
    warm_up_progress: float = 1.0  # how much of Adam's warm-up lies behind, from 0 to 1
    clips: Sequence[Clip] = ()  # of gradients that updates are made of; alike on all ranks


EMPTY_CONTEXT = StepContext()
_NO_PLACES: Mapping[str, int] = {}


class BucketResult(NamedTuple):
    """Parameters of a bucket that travelled together, and their means over ranks; not yet written back."""

    names: list[str]
    bucket: Sequence[LocalGradient]
    accumulated: list[Tensor]  # gradients plus residuals, flat, where gradients were or wider copies; then means
    result: ExchangeResult


class Pipeline:
    """Run buckets through compressor, memory, wire and collectives: a step in two halves."""

    def __init__(
        self,
        compressor: Compressor,
        memory: Memory,
        wires: Wires,
        levels: FlatTopology,
        density_of: Callable[[str], float],
        planner: Optional[Planner] = None,
    ) -> None:
        self.compressor = compressor
        self.memory = memory
        self.levels = levels
        self.recorder = levels.inter.recorder
        self.density_of = density_of
        self.context = EMPTY_CONTEXT
        self._planner = Planner() if planner is None else planner
        self._shares: dict[str, LocalGradient] = {}  # of a step whose norm is measured before any bucket is exchanged
        self.selector = BucketSelector(compressor, wires)
        self._has_refreshed = False  # in this step, what the memory learns

    def begin_step(self, context: StepContext) -> None:
        """Know what is known of the coming step."""
        self.context, self._has_refreshed = context, False
        self.memory.clip_to(context.clips)

    def refresh(self) -> None:
        """Have the memory learn, once in a step, before its first bucket."""
        if not self._has_refreshed:
            self._has_refreshed = True
            self.memory.refresh(self.context.hyperparameters, self.levels)

    def measure_norms(self, gradients: Sequence[LocalGradient]) -> None:
        """Tell the memory, which clips by them, norms of this rank's gradients, given in the order of definition."""
        self.refresh()
        names = [local.name for local in gradients]
        for _, alike in groupby(gradients, key=lambda local: local.gradient.dtype):
            self._shares.update((share.name, share) for share in self.levels.shares(list(alike)))
        with self.recorder.span("select"):
            norms = [self._norms_of(together) for together in self.memory.clipped_together(names)]
        each, total = self.levels.norms_together(norms)
        self.memory.take_norms(each, total if self.context.loss_scale is None else total / self.context.loss_scale)

    def _norms_of(self, names: Sequence[str]) -> Tensor:
        if not names:  # none of them has a gradient in this backward
            return torch.zeros(0, dtype=torch.float32, device=self.levels.inter.device)
        return norms_of([self._shares[name].gradient for name in names])

    def exchange(self, bucket: Sequence[LocalGradient], used: Optional[Tensor] = None) -> list[BucketResult]:
        """Add the residuals of a bucket, send what is selected of it, and receive what the other ranks selected.

        The gradients are working memory until :meth:`commit`. With a step's last bucket travels which parameters of the
        step this rank has ``used``, uint8.
        """
        names = [local.name for local in bucket]
        self.refresh()
        with self.recorder.bucket(names):
            are_known = names[0] in self._shares
            bucket = [self._shares.pop(name) for name in names] if are_known else self.levels.shares(bucket)
            gradients = [local.gradient for local in bucket]
            if (samples := self.recorder.samples) is not None:
                samples.add_gradients(names, gradients, self.context.loss_scale)
            with self.recorder.span("select"):
                are_used = self.levels.are_used(bucket) if self.compressor.selects_across_bucket else ()
                if self.context.loss_scale is not None:
                    torch._foreach_div_(gradients, self.context.loss_scale)
                accumulated = self.memory.compensate(names, gradients, self.context.hyperparameters)
                densities = list(map(self.density_of, names))
                *parts, last = self.selector.select(names, accumulated, densities, are_used, self.context.dense)
            used = None if used is None else self.levels.any_of(used)
            exchanged = [self._exchange_part(part, bucket) for part in parts]
            return [*exchanged, self._exchange_part(last, bucket, used)]

    def exchange_in_buckets(
        self, gradients: Sequence[LocalGradient], closes_bucket: Callable[[str, int], bool]
    ) -> list[BucketResult]:
        """Exchange gradients in buckets as a schedule closes them."""
        exchanged: list[BucketResult] = []
        bucket: list[LocalGradient] = []
        numel = 0
        for local in gradients:
            if bucket and bucket[0].gradient.dtype is not local.gradient.dtype:  # a message has values of one type
                exchanged += self.exchange(bucket)
                bucket, numel = [], 0
            bucket.append(local)
            numel += local.gradient.numel()
            if closes_bucket(local.name, numel):
                exchanged += self.exchange(bucket)
                bucket, numel = [], 0
        return exchanged + (self.exchange(bucket) if bucket else [])

    def _exchange_part(
        self, part: Part, bucket: Sequence[LocalGradient], used: Optional[Tensor] = None
    ) -> BucketResult:
        members = [bucket[each] for each in part.positions]
        names = [local.name for local in members]
        result = part.exchange(self.levels.inter, names, used)
        return BucketResult(names, members, part.tensors, result)

    def check_arrived(self, arrived: Sequence[Tensor]) -> None:
        """Raise on every rank, once the device is waited for, unless all hold the same of what has arrived."""
        if self.compressor.replicas_diverge:
            return
        held = torch.zeros(1, dtype=torch.int64, device=self.levels.inter.device)
        for tensor in arrived:
            held.mul_(_ODD).add_(fingerprint(tensor)).add_(1)  # also of zeros: a gradient of zero is one that is there
        everywhere = self.levels.same_shard.call(Payload("all_gather", held))
        if bool((everywhere != held).any()):
            raise RuntimeError(_APART)

    def commit(self, step: Sequence[BucketResult], places: Mapping[str, int] = _NO_PLACES) -> None:
        """Keep what was not sent, if all is finite, and write the means over ranks into the gradients of the step.

        What travelled with the last message, whether any rank used a parameter, is at these ``places``, by name.
        """
        if not step:
            return  # nothing is trained
        finite = torch.stack([exchanged.result.finite for exchanged in step]).all()
        finite = self.levels.all_of(finite)  # what is not finite is in one rank's share
        self.memory.on_finite(finite)
        # Of a step that is not kept nothing may be applied, by an optimizer whose own gradients are finite, either.
        scale = self.context.loss_scale
        scale = None if scale is None else scale / finite.to(scale.device, scale.dtype, non_blocking=True)
        means = self._finish_step(step, finite)
        used = [_used_anywhere(exchanged, step[-1].result.used, places) for exchanged in step]
        with self.recorder.span("commit"):
            for exchanged, mean, flags in zip(step, means, used):
                accepted = finite if flags is None else flags & finite
                self._keep(exchanged, accepted)
                self._write_back(exchanged, mean, scale)
        self.levels.write_back()
        self.selector.release()

    def close_record(self) -> None:
        """Close the record of the exchange, and have the planner look at it."""
        record = self.recorder.end_exchange()
        # Now, so that it does not count as time of the step.
        if (samples := self.recorder.samples) is not None:
            kept = self.memory.state_dict()
            samples.add_kept({**kept.get("residual", {}), **kept.get("update", {})}, self.memory.update_norms())
            self.recorder.last_samples = samples
        self._planner.see_exchange(record)

    def _keep(self, exchanged: BucketResult, accepted: Tensor) -> None:
        accumulated = exchanged.accumulated
        replaceable = [
            local.parameter is not None and tensor is local.gradient
            for local, tensor in zip(exchanged.bucket, accumulated)
        ]
        self.memory.keep(exchanged.names, accumulated, exchanged.result.kept, accepted, replaceable)

    def _write_back(self, exchanged: BucketResult, mean: Sequence[Selection], scale: Optional[Tensor]) -> None:
        """Write means into gradients, times the loss's scale, which is infinite where nothing was kept."""
        means = exchanged.accumulated  # in its memory from here on
        self.memory.write_means(exchanged.names, means, mean)
        if scale is not None:
            torch._foreach_mul_(means, scale)
        narrow: list[tuple[Tensor, Tensor]] = []  # gradients, and means that are wider
        for local, tensor in zip(exchanged.bucket, means):
            if local.parameter is not None and tensor.dtype is local.gradient.dtype:
                if tensor is not local.gradient:  # which is the residual now
                    assert local.parameter.grad is not None
                    local.parameter.grad.data = tensor.view_as(local.parameter)  # whoever holds it sees the mean
            elif tensor is not local.gradient:
                narrow.append((local.gradient, tensor))
        _round_into(narrow)

    def _finish_step(self, step: Sequence[BucketResult], finite: Tensor) -> list[Sequence[Selection]]:
        """Have the compressor finish the step, for all parameters but those of ``context.dense``."""
        means = [exchanged.result.means for exchanged in step]
        if type(self.compressor).finish_step is Compressor.finish_step:
            return means  # most methods have no state; then nobody has to look at single parameters
        asked = {
            name: mean
            for exchanged in step
            for name, mean in zip(exchanged.names, exchanged.result.means)
            if name not in self.context.dense
        }
        before = list(asked.values())
        after = self._call_finish_step(list(asked), before, finite) if asked else before
        if after is before:  # a method that changes no mean returns the list that it was given
            return means
        changed = dict(zip(asked, after))
        return [
            grouped([changed.get(name, mean) for name, mean in zip(exchanged.names, exchanged.result.means)])
            for exchanged in step
        ]

    def _call_finish_step(self, names: list[str], means: Sequence[Selection], finite: Tensor) -> Sequence[Selection]:
        encoding = ExitStack()

        def all_gather(tensor: Tensor) -> Tensor:
            encoding.close()  # a collective counts as the network's time, not as the compressor's
            gathered = self.levels.inter.call(Payload("all_gather", tensor))
            encoding.enter_context(self.recorder.span("encode"))
            return gathered

        with encoding:
            encoding.enter_context(self.recorder.span("encode"))
            return self.compressor.finish_step(names, means, finite, all_gather)


def _used_anywhere(exchanged: BucketResult, used: Optional[Tensor], places: Mapping[str, int]) -> Optional[Tensor]:
    """Return whether any rank used each of what travelled together, bool; ``None`` where this one used all."""
    if used is None or all(local.is_used for local in exchanged.bucket):
        return None
    return torch.stack([used[places[name]] for name in exchanged.names])


def _round_into(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write each second tensor into the first, whose type is narrower."""
    for dtype in dict.fromkeys(narrow.dtype for narrow, _ in pairs):
        alike = [pair for pair in pairs if pair[0].dtype is dtype]
        for first, stop, flat in runs([wide for _, wide in alike]):
            narrow = [each for each, _ in alike[first:stop]]
            rounded = round_to(flat, dtype)
            torch._foreach_copy_(narrow, list(rounded.split(list(map(Tensor.numel, narrow)))))
