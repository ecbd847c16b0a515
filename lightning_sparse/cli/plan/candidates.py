"""The ways to train that are compared: DDP, DDP with 16-bit gradients, and every system of the table of names."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Optional

import torch
from typing_extensions import override

from lightning_sparse.cli.plan.backward_profile import BackwardProfile
from lightning_sparse.cli.plan.rehearsal import (
    Rehearsal,
    SelectionCost,
    SettingsOf,
    StageCost,
    fastest,
    fitted_sizes,
    measure_selection,
)
from lightning_sparse.compressors import COMPRESSORS, Compressor, Dense, element_count
from lightning_sparse.compressors.selection import SelectionSize
from lightning_sparse.engine.settings import Settings
from lightning_sparse.engine.wire import Transfer, build_wires
from lightning_sparse.schedule import plan_groups
from lightning_sparse.schedule.cost.model import CostModel, fit
from lightning_sparse.schedule.cost.network import Network
from lightning_sparse.schedule.merge.simulator import Cost
from lightning_sparse.schedule.step_profile import equal_parts
from lightning_sparse.strategy.names import AUTO, systems

DENSITIES = (0.1, 0.01, 0.001)
_FREE = StageCost(CostModel())
NOTHING = SelectionCost(_FREE, _FREE)

# DDP's own: buckets are closed when they have reached these sizes, the first one early, so that something travels soon.
_FIRST_BUCKET_BYTES = 1 << 20
_BUCKET_BYTES = 25 << 20
_MOST_CHUNKS = 100
_GRADIENT_BYTES = 4  # of an element, inside a node
_DEFAULTS = {"compressor": "", **SettingsOf._field_defaults}
_ADAM_STEPS = 1000  # after as many, Adam's second moment learns as often as is counted here; less often later on


class Candidate(ABC):
    """One way to train, and what it costs.

    Args:
        name: what the user writes, for people.
        cost: what it costs the machine, exchanges left out.

    Attributes:
        density: fraction of elements sent; ``None`` for a method without.
        replicas_diverge: whether ranks apply different updates.
        waits_for_backward: whether nothing travels before backward has ended.
        local_steps: steps between two exchanges.
        complexity: how much there is to understand and to choose: 0 for DDP, 1 for a shorter type on the wire or DDP on
            another engine, 2 for a compressor that sends the largest elements of each tensor, 3 for any other.
    """

    density: Optional[float] = None
    complexity = 0
    local_steps = 1
    replicas_diverge = False
    waits_for_backward = False

    def __init__(self, name: str, cost: SelectionCost = NOTHING) -> None:
        self.name = name
        self.cost = cost

    @abstractmethod
    def transfers(self, sizes: Sequence[int], workers: int) -> list[Transfer]:
        """Return what each worker hands to collectives for a group of tensors of some sizes."""

    @abstractmethod
    def groups(
        self, sizes: Sequence[int], backward_seconds: Sequence[float], select_cost: Cost, exchange_cost: Cost
    ) -> list[list[int]]:
        """Return the positions of each group's tensors; arguments as for :func:`~lightning_sparse.schedule.predict`."""

    def step_transfers(self, elements: int) -> list[tuple[Transfer, float]]:
        """Return what travels when all groups have arrived, and how often in a step on average."""
        return []

    def node_ranks(self, network: Network) -> int:
        """Return how many workers of a node average gradients first and share the rest of the work; 1 for one level."""
        return 1

    def peers(self, network: Network) -> Network:
        """Return the network between those who exchange what they have selected."""
        return network if self.node_ranks(network) == 1 else network.between

    def sent(self, sizes: Sequence[int], network: Network) -> list[Transfer]:
        """Return what each worker hands to collectives for a group; with two levels, to those between nodes."""
        shared_by = self.node_ranks(network)
        return self.transfers([-(-size // shared_by) for size in sizes], self.peers(network).workers)

    def exchange_cost(self, sizes: Sequence[int], network: Network) -> Cost:
        """Return what the exchange of a group takes, by its number of elements.

        It is a line: as many bytes an element as the whole model takes in one group.
        """
        legs = [(self.peers(network), transfer) for transfer in self.sent(sizes, network)]
        if self.node_ranks(network) > 1:
            legs.append((network.inside, Transfer("all_to_all", _GRADIENT_BYTES * sum(sizes))))
        startup = sum(leg.seconds(transfer.collective, 0) for leg, transfer in legs)
        whole = sum(leg.seconds(*transfer) for leg, transfer in legs)
        return CostModel(startup, (whole - startup) / sum(sizes)).__call__

    def finish_seconds(self, elements: int, network: Network) -> float:
        """Return what a step takes when all groups have arrived."""
        shared_by, peers = self.node_ranks(network), self.peers(network)
        share = elements // shared_by
        seconds = self.cost.finish.at_workers(peers.workers)(share)
        seconds += sum(peers.seconds(*transfer) * often for transfer, often in self.step_transfers(share))
        if shared_by > 1:
            seconds += network.inside.seconds("all_gather", _GRADIENT_BYTES * share)
        return seconds


class BucketedDDP(Candidate):
    """Plain DDP: buckets of 25 MB, all-reduced while backward goes on.

    Args:
        name: for people.
        element_bytes: of one element in memory; buckets are cut by it.
        wire_bytes: of one element that travels.
        cost: what it costs the machine, such as a change of type.
    """

    def __init__(self, name: str, element_bytes: int, wire_bytes: int, cost: SelectionCost = NOTHING) -> None:
        super().__init__(name, cost)
        self._element_bytes = element_bytes
        self._wire_bytes = wire_bytes
        self.complexity = int(wire_bytes < element_bytes)

    @override
    def transfers(self, sizes: Sequence[int], workers: int) -> list[Transfer]:
        return [Transfer("all_reduce", sum(sizes) * self._wire_bytes)]

    @override
    def groups(
        self, sizes: Sequence[int], backward_seconds: Sequence[float], select_cost: Cost, exchange_cost: Cost
    ) -> list[list[int]]:
        stops = [0]
        held = 0
        for position, size in enumerate(sizes):
            held += size * self._element_bytes
            if held >= (_FIRST_BUCKET_BYTES if len(stops) == 1 else _BUCKET_BYTES) or position == len(sizes) - 1:
                stops.append(position + 1)
                held = 0
        return [list(range(*edges)) for edges in pairwise(stops)]


class EngineSystem(Candidate):
    """A system on this package's engine, with the groups that end a step first.

    Args:
        name: what the user writes.
        settings_of: the system.
        cost: what it costs the machine.
        has_adam: whether the optimizer is one whose updates are made before selection.
    """

    def __init__(
        self, name: str, settings_of: SettingsOf, cost: SelectionCost = NOTHING, has_adam: bool = False
    ) -> None:
        super().__init__(name, cost)
        self._settings_of = settings_of
        self._has_adam = has_adam
        self.density = settings_of.density
        compressor = self._settings.compressor
        self.local_steps = settings_of.local_steps
        self.replicas_diverge = self._settings.replicas_diverge
        self.waits_for_backward = compressor.feedback.clip_norm is not None
        self.complexity = _complexity(compressor)

    @cached_property
    def _settings(self) -> Settings:
        return self._settings_of.build()

    @override
    def node_ranks(self, network: Network) -> int:
        has_levels = network.workers > network.node_ranks and self._settings.can_have_levels
        return network.node_ranks if has_levels else 1

    @override
    def transfers(self, sizes: Sequence[int], workers: int) -> list[Transfer]:
        settings, compressor, density = self._settings, self._settings.compressor, self._settings.density
        ways = (compressor.wire_format, compressor.dense_wire_format)
        wires = build_wires(*ways, settings.wire, 0, workers, settings.exchange, settings.wire_bits)
        if compressor.dense_wire_format is not None and density >= 1:
            return wires.transfers([SelectionSize(size, size, is_whole=True) for size in sizes])
        if compressor.selects_across_group:
            sizes = [sum(sizes)]
        return wires.transfers([compressor.selection_size(size, element_count(size, density)) for size in sizes])

    @override
    def step_transfers(self, elements: int) -> list[tuple[Transfer, float]]:
        compressor = self._settings.compressor
        transfers = []
        if compressor.agreement_nbytes:
            transfers.append((Transfer("all_gather", compressor.agreement_nbytes), 1.0))
        if compressor.replicas_diverge and compressor.param_sync_every is not None:
            # Parameters are averaged in fp32, and nothing hides it.
            transfers.append((Transfer("all_reduce", 4 * elements), 1 / compressor.param_sync_every))
        if self._has_adam and self._settings.can_correct_adam:
            # Mean gradients, of 16 bits, at intervals of a tenth of the steps made.
            transfers.append((Transfer("all_reduce", 2 * elements), 10 / _ADAM_STEPS))
        return transfers

    @override
    def groups(
        self, sizes: Sequence[int], backward_seconds: Sequence[float], select_cost: Cost, exchange_cost: Cost
    ) -> list[list[int]]:
        # Runs of neighbours, at most some hundred, so that a plan takes milliseconds whatever the model.
        edges = list(pairwise([0, *equal_parts(sizes, _MOST_CHUNKS)]))
        plan = plan_groups(
            [sum(sizes[start:stop]) for start, stop in edges],
            [sum(backward_seconds[start:stop]) for start, stop in edges],
            select_cost,
            exchange_cost,
        )
        return [list(range(edges[chunks[0]][0], edges[chunks[-1]][1])) for chunks in plan]


def measure_candidates(
    profile: BackwardProfile, densities: Sequence[float] = DENSITIES, device: Optional[torch.device] = None
) -> list[Candidate]:
    """Measure what every way to train costs this machine; a few seconds in all.

    Args:
        profile: of the model.
        densities: fractions of elements to try, for the systems that have one.
        device: where gradients are; ``None`` for where the profile was measured.

    Returns:
        DDP first, then DDP with bf16 gradients, then :func:`~lightning_sparse.strategy.names.systems` at each density.

    Raises:
        ValueError: for a profile that nothing can be predicted from, or a density out of range.
    """
    profile.checked()
    device = torch.device(profile.device) if device is None else device
    candidates: list[Candidate] = [
        BucketedDDP("ddp", profile.element_bytes, profile.element_bytes),
        BucketedDDP("ddp + bf16 hook", profile.element_bytes, min(2, profile.element_bytes), _cast_cost(device)),
    ]
    costs: dict[Hashable, SelectionCost] = {}
    for name, settings_of in _systems(densities):
        work = _work_of(settings_of)
        if work not in costs:
            costs[work] = measure_selection(Rehearsal(settings_of, device), profile.sizes, fitted_sizes(device))
        candidates.append(EngineSystem(name, settings_of, costs[work], profile.has_adam))
    return candidates


def _work_of(settings_of: SettingsOf) -> Hashable:
    """Return what two systems have in common that do the same to the bit, such as LAGS and top-k."""
    compressor = settings_of.build().compressor
    kind = type(compressor)
    is_stateless = kind.finish_step is Compressor.finish_step
    selects = (kind.select, compressor.selects_across_group, compressor.feedback)
    return settings_of._replace(compressor=""), selects if is_stateless else settings_of.compressor


def _complexity(compressor: Compressor) -> int:
    if isinstance(compressor, Dense):
        return 1
    return 2 if compressor.has_density_by_parameter and compressor.feedback.momentum is None else 3


def _systems(densities: Sequence[float]) -> Iterator[tuple[str, SettingsOf]]:
    for system in systems():
        if system == AUTO:
            continue  # it takes whichever of the others is faster
        given = system.arguments
        compressor = given["compressor"]
        if "local_steps" in given:
            yield system.name, SettingsOf(*(given.get(name, default) for name, default in _DEFAULTS.items()))
            continue
        has_density = COMPRESSORS[compressor].default_density is not None
        for density in densities if has_density else (None,):
            yield system.name, SettingsOf(compressor, density)


def _cast_cost(device: torch.device) -> SelectionCost:
    """Measure what torch's bf16 hook does beside its all-reduce: there and back, and the division."""

    def cast_seconds(size: int) -> float:
        gradient = torch.randn(size, device=device)
        return fastest(lambda: gradient.copy_(gradient.to(torch.bfloat16).div_(2)), device)

    samples = [(size, cast_seconds(size)) for size in fitted_sizes(device)]
    return SelectionCost(StageCost(fit(samples, ("line",))), NOTHING.finish)
