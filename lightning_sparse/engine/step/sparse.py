"""The backward of a sparse step, which sends the selected elements and stores the rest as residuals."""

import threading
from collections.abc import Sequence, Set
from functools import partial
from typing import Optional

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.engine.memory.residual import LARGE, widened
from lightning_sparse.engine.step.backward import (
    SMALL,
    Backward,
    Package,
    ParamEntry,
    ParamOrder,
    ReducerContext,
    is_replaceable,
)
from lightning_sparse.engine.step.reduced import add_mean
from lightning_sparse.engine.step.step import BucketResult, LocalGradient
from lightning_sparse.functional.elements import laid_as, local_tensor


class SparseBackward(Backward):
    """Reduction that sends the elements that a compressor selects of each bucket. Commit stores the rest."""

    def __init__(self, route: ReducerContext, order: ParamOrder, used: Set[ParamEntry]) -> None:
        super().__init__(route, order, used)
        self._known = dict(route.packages)
        route.packages.clear()
        self._packed: list[tuple[list[Tensor], list[Tensor]]] = []  # (gradients, views in a flat buffer to copy back)
        # Buckets that wait for the norm of all gradients.
        self._held: list[tuple[Sequence[ParamEntry], Sequence[LocalGradient], Optional[Tensor]]] = []
        overlaps = route.overlaps_backward and not route.pipeline.memory.clips_gradients
        self._has_buckets = overlaps or route.pipeline.compressor.selects_across_bucket
        self._exchanged: list[BucketResult] = []
        self._means = route.reduced.take_means()  # means of earlier exchanges in this step, equal on all ranks
        self._continues_step = False
        if route.overlaps_backward and route.pipeline.memory.corrects_adam:
            route.worker.submit(route.pipeline.refresh)

    @override
    def _goes_with(self, dtype: torch.dtype) -> bool:
        return widened(dtype) is widened(self._bucket[0].parameter.dtype)

    @override
    def _closes(self, member: ParamEntry) -> bool:
        # Without overlap, one message holds all gradients. A selection across a bucket always needs the schedule's
        # buckets, because the timing must not change numbers.
        return self._has_buckets and self._context.schedule.closes_bucket(member.name, self._bucket_numel)

    @override
    def _submit(self, members: Sequence[ParamEntry], bucket: Sequence[LocalGradient], flags: Optional[Tensor]) -> None:
        pipeline, worker = self._context.pipeline, self._context.worker
        self._held.append((members, bucket, flags))
        if pipeline.memory.clips_gradients:
            if flags is None:
                return
            pairs = [pair for members, bucket, _ in self._held for pair in zip(members, bucket)]
            together = [local for _, local in sorted(pairs, key=lambda pair: pair[0].position)]
            worker.submit(partial(pipeline.measure_norms, together))
        for _, bucket, flags in self._held:
            worker.submit(partial(self._exchange, bucket, flags))
        self._held = []

    def _exchange(self, bucket: Sequence[LocalGradient], flags: Optional[Tensor]) -> None:
        self._exchanged += self._context.pipeline.exchange(bucket, flags)

    @override
    def _gradients_of(self, members: Sequence[ParamEntry]) -> list[LocalGradient]:
        # With the format "reduce" each message is one flat tensor anyway.
        packs = self._context.pipeline.compressor.wire_format != "reduce"
        small = [each for each in members if each.numel < SMALL and self._is_used(each)] if packs else []
        if len(small) < 2 or len({each.parameter.dtype for each in small}) > 1:
            return super()._gradients_of(members)
        sources = [laid_as(self._held_gradient(each.parameter), each.parameter) for each in small]
        names = tuple([each.name for each in small])
        package = self._context.packages[names] = self._known.get(names) or Package.of(small, sources[0])
        self._packed.append((sources, package.views))
        self._context.worker.submit(partial(torch._foreach_copy_, package.views, sources))
        return [package.gradients.get(each.name) or self._local_of(each) for each in members]

    @override
    def _local_of(self, member: ParamEntry) -> LocalGradient:
        local, parameter = super()._local_of(member), member.parameter
        can_trade = member.numel >= LARGE and not self._context.is_sharded
        return local._replace(parameter=parameter) if can_trade and is_replaceable(local.gradient, parameter) else local

    @override
    def _end(self) -> threading.Event:
        recorder, begun = self._context.pipeline.recorder, self._context.reduced.begun
        recorder.end_backward()
        # The agreed order; missing gradients count as ready at the end of backward.
        end = self._mark()
        recorder.current.ready = {each.name: self.marks.get(each, end) for each in self._order.travelling}
        self._continues_step = bool(begun) and any(each.parameter in begun for each in self._order.members)
        return super()._end()

    @override
    def _commit(self) -> None:
        pipeline, exchanged = self._context.pipeline, self._exchanged
        if self._continues_step and exchanged:
            means = (self._means.get(each.parameter) for each in self._order.members)
            pipeline.check_arrived([local_tensor(each) for each in means if each is not None])
        pipeline.commit(exchanged, self._order.places)
        for gradients, views in self._packed:
            torch._foreach_copy_(gradients, views)
        pipeline.close_record()
        self._used_by_any = exchanged[-1].result.used if exchanged else None

    @override
    def _write_missing(self, unused: Set[Tensor]) -> None:
        super()._write_missing(unused)
        for parameter, mean in self._means.items():
            add_mean(parameter, mean)
        self._context.reduced.note([each.parameter for each in self._order.members], unused)
        if unused:
            self._context.pipeline.memory.on_unused(
                each.name for each in self._order.members if each.parameter in unused
            )
