"""A system's own pipeline in one process, with nobody at the other end: every rank hands in what this one does."""

from collections.abc import Sequence
from typing import Optional, Union

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.base import ModelLayout
from lightning_sparse.compressors.selection import SelectionSize
from lightning_sparse.engine.collectives import Communicator
from lightning_sparse.engine.observe import Recorder
from lightning_sparse.engine.settings import Settings
from lightning_sparse.engine.step.step import Pipeline
from lightning_sparse.engine.step.topology import FlatTopology
from lightning_sparse.engine.wire import Wires
from lightning_sparse.engine.wire.base import Transfer, WireFormat


class EchoCommunicator(Communicator):
    """Collectives in which every rank hands in what this one does, at once; no process group."""

    def __init__(
        self, ranks: int, device: torch.device, recorder: Optional[Recorder] = None, is_inside_node: bool = False
    ) -> None:
        self.group = None
        self.recorder = Recorder(device, ranks) if recorder is None else recorder
        self._is_inside_node = is_inside_node
        self._timeout = None
        self.device = device
        self.rank = 0
        self.world_size = ranks

    @override
    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.repeat(self.world_size, 1)

    @override
    def all_to_all(self, tensor: Tensor) -> Tensor:
        return tensor[0].repeat(self.world_size, 1)

    @override
    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.mul_(self.world_size)


def echo_pipeline(
    settings: Settings, sizes: Sequence[int], levels: Union[int, FlatTopology], device: torch.device
) -> Pipeline:
    """Build a system's pipeline over :class:`EchoCommunicator`, for parameters ``"0"``, ``"1"``, ... of some sizes.

    ``levels`` may be a number of ranks, all on one level.
    """
    if isinstance(levels, int):
        levels = FlatTopology(EchoCommunicator(levels, device))
    compressor, ranks = settings.compressor, levels.inter.world_size
    shares = tuple(map(levels.share_numel, sizes))
    compressor.begin(ModelLayout(tuple(map(str, range(len(sizes)))), shares, 0, ranks, device))
    compressor.begin_step(settings.density)
    return Pipeline(
        compressor,
        settings.memory_for({torch.float32}, levels),
        settings.wires_for(0, ranks),
        levels,
        density_of=lambda name: compressor.densities.get(name, settings.density),
    )


def transfers_of(wires: Wires, sizes: Sequence[SelectionSize], flags: int = 0) -> list[Transfer]:
    """Return the collectives and bytes for a bucket, with ``flags`` bytes of usage flags in the last message."""
    ways: dict[WireFormat, list[SelectionSize]] = {wire: [] for wire in wires.formats}
    for size in sizes:
        wire = wires.dense if size.is_dense else wires.format_for(size.numel, size.selected)
        is_sent_dense = wire is wires.dense and wire is not wires.sparse
        ways[wire].append(SelectionSize(size.numel, size.numel, is_dense=True) if is_sent_dense else size)
    parts = [(wire, part) for wire, part in ways.items() if part]
    flags_of = [0] * (len(parts) - 1) + [flags]
    return [transfer for (wire, part), count in zip(parts, flags_of) for transfer in wire.transfers(part, count)]
