"""A dress rehearsal in one process: a system's own pipeline on random gradients, with nobody at the other end."""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple, Optional

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.base import ModelLayout
from lightning_sparse.engine.collectives import Collectives
from lightning_sparse.engine.observe import Recorder
from lightning_sparse.engine.settings import Settings
from lightning_sparse.engine.step.levels import LocalGradient, OneLevel
from lightning_sparse.engine.step.step import Pipeline
from lightning_sparse.engine.step.worker import Channel
from lightning_sparse.schedule.hiding import Line, fit

_CPU_SIZES = (1 << 12, 1 << 15, 1 << 18, 1 << 20)
_DEVICE_SIZES = (1 << 14, 1 << 18, 1 << 21, 1 << 24)  # below a million elements a GPU's time is that of its launches
_SOME_RANKS, _MANY_RANKS = 8, 64  # up to which selections are gathered; at which they go through owners
_SHORT = 1024  # elements to which a model's tensors are cut to see what a tensor costs beside its elements
_WARM_UP = 2  # steps: memory is allocated in the first, ExDyna has its threshold from the second on
_STEPS = 4  # the fastest counts: whatever else the machine does only adds
_SECONDS = 0.2  # after which fewer steps are enough, on a machine that is slow or busy


StageSeconds = tuple[float, float]  # of one step of one group, in the stages of a SelectionCost


class StageCost(NamedTuple):
    """Seconds of one stage as a function of elements and of the number of workers."""

    alone: Line = Line()
    # Numbers of workers, rising, and the seconds more for each element, as their contributions have to be read. Lines
    # lie in between, and beyond the last number the last line goes on.
    more: tuple[tuple[int, float], ...] = ()

    def at_workers(self, workers: int) -> Line:
        """Return the cost for a number of workers, by the number of elements."""
        more = 0.0
        for (few, less), (many, most) in pairwise(((1, 0.0), *self.more)):
            if workers > few:
                more = less + (most - less) * (workers - few) / (many - few)
        return self.alone._replace(per_unit=self.alone.per_unit + max(0.0, more))


class SelectionCost(NamedTuple):
    """Cost of a system on the machine that runs it, its exchanges left out."""

    group: StageCost = StageCost()  # residual, selection, encoding and decoding, while the step goes on
    finish: StageCost = StageCost()  # when all groups have arrived: keeping what was not sent, writing the means


class SettingsOf(NamedTuple):
    """The settings of a system, to be built anew for each use, as a compressor holds state."""

    compressor: str
    density: Optional[float] = None  # of a method without
    wire: str = "float32"
    local_steps: int = 1
    overlaps_backward: bool = True

    def build(self) -> Settings:
        """Build them, without a warm-up of the density."""
        return Settings.of(
            self.compressor,
            self.density,
            wire=self.wire,
            warmup_epochs=0,
            overlaps_backward=self.overlaps_backward,
            local_steps=self.local_steps,
        )


class EchoCollectives(Collectives):
    """Collectives in which every rank hands in what this one does, at once; no process group."""

    def __init__(self, ranks: int, device: torch.device) -> None:
        self.group = None
        self.device = device
        self.rank = 0
        self.ranks = ranks

    @override
    def all_gather(self, tensor: Tensor, out: Optional[Tensor] = None) -> Tensor:
        return _returned(tensor.expand(self.ranks, -1), out)

    @override
    def all_to_all(self, tensor: Tensor, out: Optional[Tensor] = None) -> Tensor:
        return _returned(tensor[0].expand(self.ranks, -1), out)

    @override
    def all_reduce(self, tensor: Tensor, out: Optional[Tensor] = None) -> Tensor:
        return tensor.mul_(self.ranks)


def _returned(received: Tensor, out: Optional[Tensor]) -> Tensor:
    return received.clone(memory_format=torch.contiguous_format) if out is None else out.copy_(received.view_as(out))


def rehearsed_pipeline(settings: Settings, sizes: Sequence[int], ranks: int, device: torch.device) -> Pipeline:
    """Build a system's pipeline over :class:`EchoCollectives`, for parameters ``"0"``, ``"1"``, ... of some sizes."""
    compressor = settings.compressor
    compressor.begin(ModelLayout(tuple(map(str, range(len(sizes)))), tuple(sizes), 0, ranks, device))
    return Pipeline(
        compressor,
        settings.memory_for({torch.float32}, ranks),
        settings.wires_for(0, ranks),
        OneLevel(Channel(EchoCollectives(ranks, device), Recorder(device, ranks))),
        density_of=lambda name: compressor.density_of(name, settings.density),
    )


def fitted_sizes(device: torch.device) -> tuple[int, ...]:
    """Return the numbers of elements that a cost on a device is fitted to."""
    return _CPU_SIZES if device.type == "cpu" else _DEVICE_SIZES


def rehearsal(settings_of: SettingsOf, device: torch.device) -> Callable[[Sequence[int], int], StageSeconds]:
    """Return what runs a system on random normal gradients of some sizes, as one of so many ranks, and times it."""
    noise = torch.randn(2 * fitted_sizes(device)[-1], device=device)

    def rehearsed(sizes: Sequence[int], ranks: int) -> StageSeconds:
        pipeline = rehearsed_pipeline(settings_of.build(), sizes, ranks, device)
        gradients = [torch.empty(size, device=device) for size in sizes]
        runs: list[StageSeconds] = []
        begin = time.perf_counter()
        while len(runs) <= _WARM_UP or (len(runs) < _WARM_UP + _STEPS and time.perf_counter() - begin < _SECONDS):
            runs.append(_step(pipeline, gradients, noise))
        return min(run[0] for run in runs[_WARM_UP:]), min(run[1] for run in runs[_WARM_UP:])

    return rehearsed


def _step(pipeline: Pipeline, gradients: Sequence[Tensor], noise: Tensor) -> StageSeconds:
    for gradient in gradients:
        start = int(torch.randint(noise.numel() // 2, ()))  # no time goes into drawing it
        gradient.copy_(noise[start : start + gradient.numel()])
    group = [LocalGradient(str(position), gradient, None) for position, gradient in enumerate(gradients)]
    if pipeline.memory.clips_gradients:
        pipeline.measure_norms(group)
    begin = _now(noise.device)
    exchanged = pipeline.exchange(group)
    middle = _now(noise.device)
    pipeline.commit(exchanged)
    end = _now(noise.device)
    pipeline.recorder.end_step()
    return middle - begin, end - middle


def measure_selection(
    rehearsed: Callable[[Sequence[int], int], StageSeconds], sizes: Sequence[int], fitted: Sequence[int]
) -> SelectionCost:
    """Measure what a system costs this machine for tensors of some sizes: of many small ones an element costs more."""
    alone = {size: rehearsed((size,), 1) for size in fitted}
    shared = fitted[-2]  # elements of which the contributions of many ranks are read
    crowds = {ranks: rehearsed((shared,), ranks) for ranks in (_SOME_RANKS, _MANY_RANKS)}
    short_sizes = [min(size, _SHORT) for size in sizes]
    short = rehearsed(short_sizes, 1) if len(sizes) > 1 else None
    stages = []
    for stage in range(2):
        model = fit((size, times[stage]) for size, times in alone.items())
        assert model is not None, "sizes are far apart"
        more = tuple((ranks, max(0.0, crowd[stage] - alone[shared][stage]) / shared) for ranks, crowd in crowds.items())
        beside = 0.0 if short is None else max(0.0, short[stage] - model(sum(short_sizes)))
        stages.append(StageCost(model._replace(per_unit=model.per_unit + beside / sum(sizes)), more))
    return SelectionCost(*stages)


def measure_cast(device: torch.device) -> SelectionCost:
    """Measure what torch's bf16 hook does beside its all-reduce: there and back, and the division."""

    def seconds(size: int) -> float:
        gradient = torch.randn(size, device=device)
        runs = []
        for _ in range(_WARM_UP + _STEPS):
            begin = _now(device)
            gradient.copy_(gradient.to(torch.bfloat16).div_(2))
            runs.append(_now(device) - begin)
        return min(runs[_WARM_UP:])

    model = fit((size, seconds(size)) for size in fitted_sizes(device))
    assert model is not None, "sizes are far apart"
    return SelectionCost(StageCost(model))


def _now(device: torch.device) -> float:
    # What is measured here is the device's own time, so that it has to be waited for.
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
    return time.perf_counter()
