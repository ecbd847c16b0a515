"""One optimizer step: compensate, select, encode, exchange, decode, and finally commit.

At a density below 1, a rank exchanges a parameter's gradient ``g``, with the residual ``e``, in four stages:

1. **Compensate**: ``g`` is divided by the loss scale. Then the memory computes ``v = e + g``. ``e`` does not change.
2. **Select**: the compressor selects the elements of ``v`` to send.
3. **Encode, exchange, decode**: a wire format encodes the selection into payloads, and a collective sends each payload.
   Decoding returns the mean over ranks, and this rank's error from rounding to the wire dtype. Two flags show whether
   all values are finite, and whether any rank used the parameter.
4. **Commit**, after all buckets of the step have arrived: the new residual is ``v``, with the rounding error at sent
   indices. The mean over ranks is written to the gradient, with zeros at indices that no rank sent.

**State between steps**: residuals, velocities and compressor states change only in commit. Adam's second moments change
before the first bucket, and are equal on all ranks, as are a compressor's thresholds. Residuals and velocities differ
between ranks. If any value of a step is not finite, commit changes no state. The mean of a parameter with a non-finite
value is non-finite, as with DDP. With a loss scale, all means are then non-finite, so the scaler skips the step. If no
rank used a parameter, the residual and the gradient of the parameter do not change.

**Dense parameters**: at density 1, or if a selection would need far more bytes, all elements of ``v`` are sent in a
separate message. This requires a compressor with a ``dense_wire_format``.

**Momentum correction** replaces ``g`` by a velocity in stage 1. Masking resets velocities of sent elements in stage 4.

**Adam and AdamW** (:mod:`~lightning_sparse.engine.adam`), if corrected:

- The first steps are dense, and the optimizer runs unchanged, until the second moment is estimated.
- In all later steps, stage 1 replaces ``g`` by Adam's update
  (:func:`~lightning_sparse.functional.adam.accumulate_updates`), and the residual accumulates updates. The density
  falls over several steps from 1 to the target.
- The first corrected step moves the first moment into the residual, even if the step is not finite. Later, the first
  moment holds the mean update from an exchange to the optimizer's step, and otherwise zero.
- At the start of every step, ranks average a few parameters' gradients of the previous step, in 16 bits. The means
  update the second moments of these parameters. The messages are sent during backward.
- Stage 4 converts the mean update to an equivalent gradient, for code that reads gradients before the optimizer step.
  This package applies the update and weight decay in place of the optimizer.

With two levels (:class:`~lightning_sparse.engine.step.topology.HierarchicalTopology`), the ranks of a node average
gradients and divide the mean into shares, one per rank. ``g`` is then this rank's share. Ranks with the same share on
different nodes exchange selections. Commit ends with an all-gather of the shares inside the node.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, Optional, cast

import torch
from torch import Tensor

from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.selection import Selection
from lightning_sparse.engine.memory import Hyperparameters, Memory
from lightning_sparse.engine.step.selecting import BucketSelector, Part
from lightning_sparse.engine.step.topology import FlatTopology, LocalGradient
from lightning_sparse.engine.wire import Wires
from lightning_sparse.engine.wire.base import ExchangeResult, Payload
from lightning_sparse.functional.elements import round_to, runs
from lightning_sparse.functional.reductions import fingerprint, norms_of

_APART = (
    "gradients changed differently on different ranks between two exchanges of one optimizer step (zero_grad, a scale,"
    " or a backward in on_after_backward). Replicas would no longer be equal. Change gradients on all ranks, or after"
    " the optimizer step. Call backward on the output of the model, or once on a sum of losses."
)


class StepContext(NamedTuple):
    """Properties of the current step that the caller passes to the pipeline."""

    loss_scale: Optional[Tensor] = None  # scale of the loss, one element; residuals are stored unscaled
    hyperparameters: Mapping[str, Hyperparameters] = {}  # settings by parameter name; empty without an optimizer
    moments: Mapping[str, Any] = {}  # Adam's state by name of each parameter that is corrected in this step
    dense: AbstractSet[str] = frozenset()  # names of parameters that are sent dense until Adam is corrected
    warm_up_progress: float = 1.0  # completed fraction of Adam's warm-up, from 0 to 1


EMPTY_CONTEXT = StepContext()
_NO_PLACES: Mapping[str, int] = {}
# Parameters of a bucket that were sent in one wire format. Commit writes the means to ``part.tensors`` and gradients.
BucketResult = tuple[Part, ExchangeResult]


class Pipeline:
    """Run buckets through compressor, memory, wire and collectives: first :meth:`exchange`, then :meth:`commit`."""

    def __init__(
        self,
        compressor: Compressor,
        memory: Memory,
        wires: Wires,
        levels: FlatTopology,
        density_of: Callable[[str], float],
    ) -> None:
        self.compressor = compressor
        self.memory = memory
        self.levels = levels
        self.recorder = levels.inter.recorder
        self.density_of = density_of
        self.context = EMPTY_CONTEXT  # replaced before each step
        self.selector = BucketSelector(compressor, wires)

    def refresh(self) -> None:
        """Before the first bucket of a backward, update Adam's second moments."""
        self.memory.refresh(self.context.moments)

    def exchange(self, bucket: Sequence[LocalGradient], used: Optional[Tensor] = None) -> list[BucketResult]:
        """Add residuals to a bucket, send the selected elements, and receive the selections of other ranks.

        The gradients have undefined values until :meth:`commit` writes the means.

        Args:
            bucket: gradients with the same widened dtype.
            used: uint8 flags of the parameters that this rank has used in the step; only with the last bucket.
        """
        names = [local.name for local in bucket]
        with self.recorder.bucket(names):
            bucket, scale = self.levels.shares(bucket), self.context.loss_scale
            gradients = [local.gradient for local in bucket]
            if (samples := self.recorder.samples) is not None:
                samples.add_gradients(names, gradients, scale)
            if self.memory.clips_gradients:  # The bucket has all gradients of the step.
                norm = self.levels.total_norm(norms_of(gradients))
                self.memory.set_norm(norm if scale is None else norm / scale)
            with self.recorder.span("select"):
                if scale is not None:
                    torch._foreach_div_(gradients, scale)
                accumulated = self.memory.compensate(names, gradients, self.context.hyperparameters)
                densities = list(map(self.density_of, names))
                parts = self.selector.select(bucket, accumulated, densities, self.context.dense)
            flags = [None] * (len(parts) - 1) + [None if used is None else self.levels.any_of(used)]
            return [(part, part.exchange(self.levels.inter, own)) for part, own in zip(parts, flags)]

    def check_alike(self, means: Sequence[Tensor]) -> None:
        """Raise an error on all ranks if the means of earlier exchanges of this step differ. Waits for the device."""
        if self.compressor.replicas_diverge:
            return
        start = torch.zeros((), dtype=torch.int64, device=self.levels.inter.device)
        prints = torch.stack([start, *map(fingerprint, means)]).add_(1)  # 1 distinguishes a zero from no gradient
        held = fingerprint(prints).view(1)
        everywhere = self.levels.same_shard.call(Payload("all_gather", held))
        if bool((everywhere != held).any()):
            raise RuntimeError(_APART)

    def commit(self, step: Sequence[BucketResult], places: Mapping[str, int] = _NO_PLACES) -> None:
        """End the step: store unsent elements if all values are finite, and write the means to the gradients.

        Args:
            step: results of all buckets of the step.
            places: index of each parameter's usage flag, by name.
        """
        checked = [result.finite for _, result in step]
        if not checked:  # This rank exchanges nothing, but other ranks of a sharded replica may.
            checked = [torch.ones((), dtype=torch.bool, device=self.levels.inter.device)]
        finite = torch.stack(checked).all()
        finite = self.levels.all_of(finite)  # Other ranks of the node checked other parts of gradients.
        self.memory.on_finite(finite)
        # After a non-finite value, an infinite scale makes all gradients non-finite, so the scaler skips the step.
        scale = self.context.loss_scale
        scale = None if scale is None else scale / finite.to(scale.device, scale.dtype, non_blocking=True)
        self._finish_step(step, finite)
        with self.recorder.span("commit"):
            for part, result in step:
                flags = _used_anywhere(part, step[-1][1].used, places)
                accepted = finite if flags is None else flags & finite
                self.memory.update_residual(part.names, part.tensors, result.kept, accepted)
                self._write_back(part, result.means, scale)
        self.levels.write_back()
        self.selector.release()

    def close_record(self) -> None:
        """Close the record of the exchange, and pass the record to the planner."""
        record = self.recorder.end_exchange()
        # Sampling follows the end of the record, so that the time of sampling does not count.
        if (samples := self.recorder.samples) is not None:
            kept = self.memory.state_dict()
            samples.add_kept({**kept.get("residual", {}), **kept.get("update", {})}, self.memory.update_norms())
            self.recorder.last_samples = samples
        if self.recorder.on_record is not None:
            self.recorder.on_record(record)

    def _write_back(self, part: Part, means: Sequence[Selection], scale: Optional[Tensor]) -> None:
        tensors = part.tensors  # the means overwrite the sums of gradient and residual
        self.memory.write_means(part.names, tensors, means)
        if scale is not None:
            torch._foreach_mul_(tensors, scale)
        _round_into([(each.gradient, wide) for each, wide in zip(part.members, tensors) if wide is not each.gradient])

    def _finish_step(self, step: Sequence[BucketResult], finite: Tensor) -> None:
        if type(self.compressor).finish_step is Compressor.finish_step:
            return  # Most compressors have no finish_step. A mean per parameter would cost time.
        means = {
            name: mean
            for part, result in step
            for name, mean in zip(part.names, result.means)
            if name not in self.context.dense
        }
        if not means:
            return
        before, finish = list(means.values()), cast(Callable[..., object], self.compressor.finish_step)
        after = finish(list(means), before, finite, self._gather)
        if after is not None and after is not before:
            raise TypeError(f"{type(self.compressor).__name__}.finish_step returned other means; change means in place")

    def _gather(self, tensor: Tensor) -> Tensor:
        return self.levels.inter.call(Payload("all_gather", tensor))


def _used_anywhere(part: Part, used: Optional[Tensor], places: Mapping[str, int]) -> Optional[Tensor]:
    if used is None or all(local.is_used for local in part.members):
        return None
    return torch.stack([used[places[name]] for name in part.names])


def _round_into(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for dtype in dict.fromkeys(narrow.dtype for narrow, _ in pairs):
        alike = [pair for pair in pairs if pair[0].dtype is dtype]
        for first, stop, flat in runs([wide for _, wide in alike]):
            narrow = [each for each, _ in alike[first:stop]]
            rounded = round_to(flat, dtype)
            torch._foreach_copy_(narrow, list(rounded.split(list(map(Tensor.numel, narrow)))))
