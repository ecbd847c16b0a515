"""Virtual ranks in one process: compressors that exchange by indexing, without a wire."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from lightning_sparse.compressors import element_count
from lightning_sparse.compressors.base import ModelLayout
from lightning_sparse.compressors.selection import Selection
from tests.helpers.devices import DEVICE


class Simulation:
    """Virtual ranks with residuals, for compressors that exchange the union of all selections."""

    def __init__(self, build, numels, ranks, density):
        self.names = list(numels)
        self.numels = list(numels.values())
        self.density = density
        self.compressors = [build() for _ in range(ranks)]
        self.residuals = [torch.zeros(sum(self.numels), device=DEVICE) for _ in range(ranks)]
        self.begin()

    @property
    def numel(self):
        return sum(self.numels)

    def begin(self):
        for rank, compressor in enumerate(self.compressors):
            layout = ModelLayout(tuple(self.names), tuple(self.numels), rank, len(self.compressors), DEVICE)
            compressor.begin(layout)

    def step(self, gradients):
        accumulated = [residual + gradient.to(DEVICE) for residual, gradient in zip(self.residuals, gradients)]
        chosen = [self._select(compressor, flat) for compressor, flat in zip(self.compressors, accumulated)]
        union = torch.cat(chosen).unique()
        finite = torch.stack([flat[union].isfinite().all() for flat in accumulated]).all()
        self._finish(union, torch.stack([flat[union] for flat in accumulated]).mean(dim=0), finite)
        if finite:
            self.residuals = [flat.index_fill(0, union, 0.0) for flat in accumulated]
        return chosen

    def _select(self, compressor, flat):
        compressor.begin_step(self.density)
        counts = [
            element_count(n, compressor.densities.get(name, self.density)) for name, n in zip(self.names, self.numels)
        ]
        selections = compressor.select(self.names, flat.split(self.numels), counts)
        starts = torch.tensor([0, *self.numels]).cumsum(0).tolist()
        for selection, tensor in zip(selections, flat.split(self.numels)):
            assert torch.equal(selection.values.nan_to_num(), tensor[selection.indices].nan_to_num())
        return torch.cat([selection.indices + start for selection, start in zip(selections, starts)])

    def _finish(self, union, mean, finite):
        means, start = [], 0
        for numel in self.numels:
            inside = (union >= start) & (union < start + numel)
            means.append(Selection(mean[inside][None], (union[inside] - start)[None], numel))
            start += numel
        meeting = Meeting(len(self.compressors))

        def finish(rank, compressor):
            compressor.finish_step(self.names, means, finite, partial(meeting.all_gather, rank))

        with ThreadPoolExecutor(len(self.compressors)) as threads:
            list(threads.map(finish, range(len(self.compressors)), self.compressors))


class Meeting:
    """All-gather between threads, a thread per virtual rank. A missing rank raises an error."""

    def __init__(self, ranks):
        self._barrier = threading.Barrier(ranks, timeout=30)
        self._handed_in = [torch.empty(0)] * ranks

    def all_gather(self, rank, tensor):
        self._handed_in[rank] = tensor
        self._barrier.wait()
        gathered = torch.stack(self._handed_in)
        self._barrier.wait()  # no rank starts the next all-gather before all have read
        return gathered
