"""Bytes and seconds of a step by formula, for every strategy: from what wires announce and what collectives take."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Optional

from lightning_sparse.compressors import COMPRESSORS, element_count
from lightning_sparse.compressors.selection import SelectionSize
from lightning_sparse.engine.settings import Settings
from lightning_sparse.engine.wire.base import Transfer
from lightning_sparse.schedule.network import Network, sent_bytes
from lightning_sparse.strategy.names import AUTO, SHARDED, systems

BACKWARD = 2 / 3  # of a step without exchange: twice forward's operations
_GROUPS = [1, 2, 4, 8, 16]  # of equal parts, which ``schedule="merged"`` tries
_BUCKET_BYTES = 25 << 20  # DDP's
FP32_BYTES = 4  # of an element, in DDP's messages and inside a node
_ADAM_STEPS = 1000  # after as many, Adam's second moment learns as often as is counted here; less often later on


class Candidate(NamedTuple):
    """One way to train."""

    name: str  # of a strategy, or DDP with its hook
    density: Optional[float] = None  # fraction of elements sent; none for a method without
    settings: Optional[Settings] = None  # plain DDP
    value_bytes: int = FP32_BYTES  # of an element that plain DDP sends


class Forecast(NamedTuple):
    """A step, the work of selecting and encoding left out."""

    name: str
    density: Optional[float]
    step_seconds: float
    speedup: float  # the first row's step time over this one
    exposed_seconds: float  # of the exchange, that backward does not hide
    sent_bytes: float  # that leave each worker in a step; with two levels, those for other nodes
    local_steps: int  # between two exchanges, over which times and bytes are averaged


class Cost(NamedTuple):
    """Seconds of some collectives, and the bytes that leave each worker; with two levels, those for other nodes."""

    seconds: float
    nbytes: float


def candidates(densities: Sequence[float], is_sharded: bool = False) -> Iterator[Candidate]:
    """Yield all ways: DDP, DDP in bf16, and the strategies but ``sparse_auto``; of shards, HSDP and ours."""
    yield Candidate("hsdp" if is_sharded else "ddp")
    if not is_sharded:
        yield Candidate("ddp + bf16 hook", value_bytes=2)
    for system in [SHARDED] if is_sharded else systems():
        given = system.arguments
        compressor, wire, rounds = given["compressor"], given.get("wire", "float32"), given.get("local_steps")
        has_choice = rounds is None and COMPRESSORS[compressor].default_density is not None
        for density in densities if has_choice else [given.get("density")]:
            if system != AUTO:  # it takes whichever of the others is faster
                more: Any = {"wire": wire, "local_steps": 1 if rounds is None else rounds}
                more |= {"warmup_epochs": 0, "overlaps_backward": not is_sharded}
                yield Candidate(system.name, density, Settings.of(compressor, density, **more))


def forecast(elements: int, compute_seconds: float, network: Network, ways: Iterable[Candidate]) -> list[Forecast]:
    """Work out a step of every candidate, in which backward makes gradients ready evenly.

    A second of compute, and two seconds of exchange in one message, of which it hides nothing:

    >>> network = Network(bandwidth=16_000, latency=0.0, workers=2)
    >>> forecast(1000, 1.0, network, [Candidate("ddp")])[0].step_seconds
    3.0
    """
    rows = [_forecast(elements, compute_seconds, network, each) for each in ways]
    return [row._replace(speedup=rows[0].step_seconds / row.step_seconds) for row in rows]


def _forecast(elements: int, compute_seconds: float, network: Network, way: Candidate) -> Forecast:
    settings, steps, counts = way.settings, 1, _GROUPS
    if settings is None:
        counts = [-(-FP32_BYTES * elements // _BUCKET_BYTES)]
    else:
        steps = 1 if settings.local_steps is None else int(settings.local_steps.every)
        clips = settings.compressor.feedback.clip_norm is not None
        if steps > 1 or clips or not settings.overlaps_backward:  # nothing travels before backward has ended
            counts = [1]
    costs = {count: _cost(way, -(-elements // count), network) for count in counts}
    backward = BACKWARD * compute_seconds
    exposed = {count: _exposed(count, cost.seconds, backward) for count, cost in costs.items()}
    count, end = min(counts, key=exposed.__getitem__), _cost(way, elements, network, is_end=True)
    seconds, nbytes = exposed[count] + end.seconds, count * costs[count].nbytes + end.nbytes
    step = compute_seconds + seconds / steps
    return Forecast(way.name, way.density, step, 1.0, seconds / steps, nbytes / steps, steps)


def _exposed(count: int, seconds: float, backward: float) -> float:
    """Return what stands out behind backward of so many equal messages, which are ready one by one."""
    return max(seconds, count * seconds - (count - 1) / count * backward)


def _cost(way: Candidate, elements: int, network: Network, is_end: bool = False) -> Cost:
    """Return the cost of a group of so many elements, or of what follows when all groups have arrived."""
    shared_by, peers = (1, network) if way.settings is None else levels(way.settings, network)
    share = -(-elements // shared_by)
    if way.settings is None:
        often = [] if is_end else [(Transfer("all_reduce", way.value_bytes * elements), 1.0)]
    elif is_end:
        often = step_transfers(way.settings, share)
    else:
        often = [(each, 1.0) for each in transfers(way.settings, [share], peers.workers)]
    seconds = sum(peers.seconds(*transfer) * times for transfer, times in often)
    if shared_by > 1:  # gradients are added up inside a node, and at the end their means are gathered there
        intra = ("all_gather", FP32_BYTES * share) if is_end else ("all_to_all", FP32_BYTES * elements)
        seconds += network.intra.seconds(*intra)
    return Cost(seconds, sum(sent_bytes(*transfer, peers.workers) * times for transfer, times in often))


def levels(settings: Settings, network: Network) -> tuple[int, Network]:
    """Return how many workers of a node share an exchange, 1 for one level, and the network of that exchange."""
    if settings.can_have_levels and network.workers > network.node_ranks > 1:
        return network.node_ranks, network.between
    return 1, network


def transfers(settings: Settings, sizes: Sequence[int], workers: int, flags: int = 0) -> list[Transfer]:
    """Return what each worker hands to collectives for a group of tensors of some sizes; a step's last has flags."""
    compressor, density = settings.compressor, settings.density
    wires = settings.wires_for(0, workers)
    if compressor.dense_wire_format is not None and density >= 1:
        return wires.transfers([SelectionSize(size, size, is_dense=True) for size in sizes], flags)
    if compressor.selects_across_group:
        sizes = [sum(sizes)]
    return wires.transfers([compressor.selection_size(size, element_count(size, density)) for size in sizes], flags)


def step_transfers(settings: Settings, elements: int) -> list[tuple[Transfer, float]]:
    """Return what travels when all groups have arrived, with Adam or AdamW, and how often in a step on average."""
    compressor = settings.compressor
    found = []
    if compressor.agreement_nbytes:
        found.append((Transfer("all_gather", compressor.agreement_nbytes), 1.0))
    if compressor.replicas_diverge and compressor.param_sync_every is not None:
        # Parameters are averaged in fp32, and nothing hides it.
        found.append((Transfer("all_reduce", FP32_BYTES * elements), 1 / compressor.param_sync_every))
    if settings.can_correct_adam:
        # Mean gradients, of 16 bits, at intervals of a tenth of the steps made.
        found.append((Transfer("all_reduce", 2 * elements), 10 / _ADAM_STEPS))
    return found
