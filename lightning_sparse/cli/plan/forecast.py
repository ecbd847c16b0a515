"""Step times of every way to train, over a network that may not be there."""

from collections.abc import Hashable, Iterator, Sequence
from itertools import chain, pairwise, repeat
from typing import NamedTuple, Optional

import torch

from lightning_sparse.cli.plan.profiler import BackwardProfile
from lightning_sparse.cli.plan.rehearsal import (
    SelectionCost,
    SettingsOf,
    fitted_sizes,
    measure_cast,
    measure_selection,
    rehearsal,
)
from lightning_sparse.compressors import COMPRESSORS, Compressor, element_count
from lightning_sparse.compressors.selection import SelectionSize
from lightning_sparse.engine.local_steps import fitting_steps
from lightning_sparse.engine.settings import Settings
from lightning_sparse.engine.wire.base import Transfer
from lightning_sparse.schedule.hiding import Line
from lightning_sparse.schedule.merging import Cost, predict
from lightning_sparse.schedule.network import Network, sent_bytes
from lightning_sparse.schedule.plan import first_groupings, stops_of
from lightning_sparse.strategy.names import AUTO, SHARDED, systems

DENSITIES = (0.1, 0.01, 0.001)
WORTH = 1.05  # speed-up from which on a change is worth its trouble; less is within the error of a prediction

# DDP's own: buckets are closed when they have reached these sizes, the first one early, so that something travels soon.
_FIRST_BUCKET_BYTES = 1 << 20
_BUCKET_BYTES = 25 << 20
_GRADIENT_BYTES = 4  # of an element, inside a node
_ADAM_STEPS = 1000  # after as many, Adam's second moment learns as often as is counted here; less often later on


class Candidate(NamedTuple):
    """One way to train, and what it costs this machine."""

    name: str
    system: Optional[SettingsOf] = None  # plain DDP
    cost: SelectionCost = SelectionCost()
    wire_bytes: Optional[int] = None  # of an element that DDP sends; none: as many as it has in memory


class SystemPrediction(NamedTuple):
    """Forecast of one way to train."""

    name: str  # of a strategy, or DDP with its hook
    density: Optional[float]  # fraction of elements sent; none for a method without
    step_seconds: float
    speedup: float  # DDP's step time over this one
    exposed_seconds: float  # of selection and exchange, that backward does not hide
    sent_bytes: float  # that leave each worker in a step; with two levels, those for other nodes
    messages: int  # groups in which the gradient travels
    replicas_diverge: bool = False
    local_steps: int = 1  # between two exchanges, over which times and bytes are averaged
    fitting_steps: int = 1  # that would keep exchanges at 5 % of the time; 1 where every step exchanges


def measure_candidates(
    profile: BackwardProfile, densities: Sequence[float] = DENSITIES, is_sharded: bool = False
) -> list[Candidate]:
    """Measure what every way costs this machine: DDP, DDP in bf16, and all systems; of shards, HSDP and ours."""
    device = torch.device(profile.device)
    half = min(2, profile.element_bytes)
    candidates = [Candidate("ddp"), Candidate("ddp + bf16 hook", None, measure_cast(device), half)]
    found = _systems(densities)
    if is_sharded:
        candidates, compressor = [Candidate("hsdp")], SHARDED.arguments["compressor"]
        found = ((SHARDED.name, SettingsOf(compressor, each, overlaps_backward=False)) for each in densities)
    costs: dict[Hashable, SelectionCost] = {}
    for name, system in found:
        work = _work_of(system)
        if work not in costs:
            costs[work] = measure_selection(rehearsal(system, device), profile.sizes, fitted_sizes(device))
        candidates.append(Candidate(name, system, costs[work]))
    return candidates


def _work_of(system: SettingsOf) -> Hashable:
    """Return what two systems have in common that do the same to the bit, such as LAGS and top-k."""
    compressor = system.build().compressor
    kind = type(compressor)
    is_stateless = kind.finish_step is Compressor.finish_step
    selects = (kind.select, compressor.selects_across_group, compressor.feedback)
    return system._replace(compressor=""), selects if is_stateless else system.compressor


def _systems(densities: Sequence[float]) -> Iterator[tuple[str, SettingsOf]]:
    for system in systems():
        given = {name: value for name, value in system.arguments.items() if name in SettingsOf._fields}
        if "local_steps" in given:
            yield system.name, SettingsOf(**{**given, "local_steps": given["local_steps"].every})
        elif system != AUTO:  # it takes whichever of the others is faster
            has_density = COMPRESSORS[given["compressor"]].default_density is not None
            for density in densities if has_density else (None,):
                yield system.name, SettingsOf(given["compressor"], density)


def predict_systems(
    profile: BackwardProfile, network: Network, candidates: Sequence[Candidate]
) -> list[SystemPrediction]:
    """Predict the step of every candidate by one simulator of backward, selection and one serial channel.

    Selection runs beside backward on a GPU; on a CPU it stops backward, whose cores it takes. Speed-ups are over the
    first candidate. A second of backward, and two seconds of exchange that it hides nothing of:

    >>> profile = BackwardProfile(("weight",), (1000,), (1.0,))
    >>> network = Network(bandwidth=16_000, latency=0.0, workers=2)
    >>> predict_systems(profile, network, [Candidate("ddp")])[0].step_seconds
    3.0
    """
    network.checked()
    rows = [_predict(profile, network, each) for each in candidates]
    return [row._replace(speedup=rows[0].step_seconds / row.step_seconds) for row in rows]


def best_of(rows: Sequence[SystemPrediction]) -> Optional[SystemPrediction]:
    """Return the first row within 5 % of the fastest of those whose replicas stay one; ``None`` if that is DDP."""
    safe = [row for row in rows if not row.replicas_diverge]
    fastest = min(row.step_seconds for row in safe)
    best = next(row for row in safe if row.step_seconds <= WORTH * fastest)
    return None if best is rows[0] else best


class _Work(NamedTuple):
    """What a step does beside the model's own; costs are of a group's elements."""

    groups: list[list[int]]
    select_cost: Cost
    exchange_cost: Cost
    sent_bytes: float
    finish_seconds: float = 0.0  # when all groups have arrived


def _predict(profile: BackwardProfile, network: Network, candidate: Candidate) -> SystemPrediction:
    system = candidate.system or SettingsOf("dense")
    settings = None if candidate.system is None else system.build()
    elements, steps = profile.elements, system.local_steps
    backward_seconds = list(profile.backward_seconds)
    if settings is None:
        work = _ddp_work(profile, network, candidate)
    else:
        is_late = settings.compressor.feedback.clip_norm is not None or not settings.overlaps_backward
        if is_late:  # nothing travels before backward has ended
            backward_seconds = [sum(backward_seconds), *(0.0 for _ in profile.sizes[1:])]
        work = _system_work(profile, network, candidate, settings, backward_seconds)
    if steps == 1:
        selection = "backward" if profile.device == "cpu" else "worker"
        costs = (work.select_cost, work.exchange_cost)
        total = predict(work.groups, profile.sizes, backward_seconds, *costs, selection)
        exchange = total + work.finish_seconds - sum(profile.backward_seconds)
    else:  # once in a round, and nothing hides it
        exchange = work.select_cost(elements) + work.exchange_cost(elements) + work.finish_seconds
    return SystemPrediction(
        name=candidate.name,
        density=system.density,
        step_seconds=profile.alone_seconds + exchange / steps,
        speedup=1.0,
        exposed_seconds=exchange / steps,
        sent_bytes=work.sent_bytes / steps,
        messages=len(work.groups),
        replicas_diverge=settings is not None and settings.replicas_diverge,
        local_steps=steps,
        fitting_steps=1 if steps == 1 else fitting_steps(profile.alone_seconds, exchange),
    )


def _ddp_work(profile: BackwardProfile, network: Network, candidate: Candidate) -> _Work:
    wire_bytes = candidate.wire_bytes or profile.element_bytes
    return _Work(
        ddp_groups(profile.sizes, profile.element_bytes),
        candidate.cost.group.alone.__call__,
        lambda elements: network.seconds("all_reduce", wire_bytes * elements),
        sent_bytes("all_reduce", wire_bytes * profile.elements, network.workers),
    )


def ddp_groups(sizes: Sequence[int], element_bytes: int) -> list[list[int]]:
    """Return the positions of the tensors of each of DDP's buckets."""
    least = chain([_FIRST_BUCKET_BYTES], repeat(_BUCKET_BYTES))
    return _positions(stops_of([size * element_bytes for size in sizes], least))


def _positions(stops: Sequence[int]) -> list[list[int]]:
    return [list(range(*edges)) for edges in pairwise((0, *stops))]


def _system_work(
    profile: BackwardProfile, network: Network, candidate: Candidate, settings: Settings, backward: Sequence[float]
) -> _Work:
    """Return what a system's step does; with two levels the workers of a node average first and share the rest."""
    shared_by, peers = levels(settings, network)
    share = profile.elements // shared_by
    of_share = candidate.cost.group.at_workers(peers.workers)
    exchange_cost = _exchange_cost(profile.sizes, network, settings)

    def select_cost(elements: float) -> float:
        return of_share(elements / shared_by)

    groups = [list(range(len(profile.sizes)))]
    if settings.local_steps is None:  # the groups that end a step first, of those that schedule="merged" tries
        tried = [_positions(each.stops) for each in first_groupings(profile.sizes)]
        groups = min(tried, key=lambda some: predict(some, profile.sizes, backward, select_cost, exchange_cost))
    afterwards = step_transfers(settings, share, profile.has_adam)
    finish_seconds = candidate.cost.finish.at_workers(peers.workers)(share)
    finish_seconds += sum(peers.seconds(*transfer) * often for transfer, often in afterwards)
    if shared_by > 1:
        finish_seconds += network.inside.seconds("all_gather", _GRADIENT_BYTES * share)
    sent = sum(sent_bytes(*transfer, peers.workers) * often for transfer, often in afterwards)
    for group in groups:
        # With the last message travels which parameters were used.
        flags = len(profile.sizes) if group is groups[-1] and settings.local_steps is None else 0
        for transfer in sent_by(settings, [profile.sizes[position] for position in group], network, flags):
            sent += sent_bytes(*transfer, peers.workers)
    return _Work(groups, select_cost, exchange_cost, sent, finish_seconds)


def levels(settings: Settings, network: Network) -> tuple[int, Network]:
    """Return how many workers of a node share an exchange, 1 for one level, and the network of that exchange."""
    if settings.can_have_levels and network.workers > network.node_ranks > 1:
        return network.node_ranks, network.between
    return 1, network


def sent_by(settings: Settings, sizes: Sequence[int], network: Network, flags: int = 0) -> list[Transfer]:
    """Return what each worker hands to collectives for a group of tensors; with two levels, to those between nodes."""
    shared_by, peers = levels(settings, network)
    return transfers(settings, [-(-size // shared_by) for size in sizes], peers.workers, flags)


def transfers(settings: Settings, sizes: Sequence[int], workers: int, flags: int = 0) -> list[Transfer]:
    """Return what each worker hands to collectives for a group of tensors of some sizes; a step's last has flags."""
    compressor, density = settings.compressor, settings.density
    wires = settings.wires_for(0, workers)
    if compressor.dense_wire_format is not None and density >= 1:
        return wires.transfers([SelectionSize(size, size, is_whole=True) for size in sizes], flags)
    if compressor.selects_across_group:
        sizes = [sum(sizes)]
    return wires.transfers([compressor.selection_size(size, element_count(size, density)) for size in sizes], flags)


def step_transfers(settings: Settings, elements: int, has_adam: bool = False) -> list[tuple[Transfer, float]]:
    """Return what travels when all groups have arrived, and how often in a step on average."""
    compressor = settings.compressor
    found = []
    if compressor.agreement_nbytes:
        found.append((Transfer("all_gather", compressor.agreement_nbytes), 1.0))
    if compressor.replicas_diverge and compressor.param_sync_every is not None:
        # Parameters are averaged in fp32, and nothing hides it.
        found.append((Transfer("all_reduce", 4 * elements), 1 / compressor.param_sync_every))
    if has_adam and settings.can_correct_adam:
        # Mean gradients, of 16 bits, at intervals of a tenth of the steps made.
        found.append((Transfer("all_reduce", 2 * elements), 10 / _ADAM_STEPS))
    return found


def _exchange_cost(sizes: Sequence[int], network: Network, settings: Settings) -> Cost:
    """Return a group's cost as a line: as many bytes an element as the whole model takes in one group."""
    shared_by, peers = levels(settings, network)
    legs = [(peers, transfer) for transfer in sent_by(settings, sizes, network)]
    if shared_by > 1:
        legs.append((network.inside, Transfer("all_to_all", _GRADIENT_BYTES * sum(sizes))))
    startup = sum(leg.seconds(transfer.collective, 0) for leg, transfer in legs)
    whole = sum(leg.seconds(*transfer) for leg, transfer in legs)
    return Line(startup, (whole - startup) / sum(sizes)).__call__
