"""Step times of every way to train, over a network that may not be there."""

from collections.abc import Sequence
from typing import NamedTuple, Optional

from lightning_sparse.cli.plan.backward_profile import BackwardProfile
from lightning_sparse.cli.plan.candidates import Candidate
from lightning_sparse.engine.local_steps import fitting_steps
from lightning_sparse.schedule.cost.network import Network, sent_bytes
from lightning_sparse.schedule.merge.simulator import predict

WORTH = 1.05  # speed-up over DDP from which on a change is worth its trouble; less is within the error of a prediction


class SystemPrediction(NamedTuple):
    """Forecast of one way to train.

    Attributes:
        name: strategy name, or DDP with its hook.
        density: fraction of elements sent; ``None`` for a method without.
        step_seconds: of a whole step.
        speedup: DDP's step time over this one.
        exposed_seconds: of selection and exchange, that backward does not hide.
        sent_bytes: that leave each worker in a step; with two levels, those for other nodes.
        messages: groups in which the gradient travels.
        replicas_diverge: whether ranks apply different updates.
        local_steps: steps between two exchanges, over which times and bytes are averaged.
        fitting_steps: how many ``local_steps="auto"`` would choose; 1 where gradients are exchanged in every step.
        complexity: see :class:`~lightning_sparse.cli.plan.Candidate`.
    """

    name: str
    density: Optional[float]
    step_seconds: float
    speedup: float
    exposed_seconds: float
    sent_bytes: float
    messages: int
    replicas_diverge: bool
    local_steps: int = 1
    fitting_steps: int = 1
    complexity: int = 0


def predict_systems(
    profile: BackwardProfile, network: Network, candidates: Sequence[Candidate]
) -> list[SystemPrediction]:
    """Predict the step of every candidate, from one simulator of backward, selection and one serial channel.

    Selection runs beside backward on a GPU; on a CPU it stops backward, whose cores it takes.

    Args:
        profile: of the model's step on one worker.
        network: between the workers.
        candidates: from :func:`~lightning_sparse.cli.plan.measure_candidates`; the first one is what the others are
            compared with.

    Raises:
        ValueError: for a profile or a network that makes no sense, a profile measured for another number of workers, or
            no candidates.

    Example: a second of backward, and two seconds of exchange that it hides nothing of::

        >>> from lightning_sparse.cli.plan.candidates import BucketedDDP
        >>> profile = BackwardProfile(("weight",), (1000,), (1.0,))
        >>> network = Network(bandwidth=16_000, latency=0.0, workers=2)
        >>> predict_systems(profile, network, [BucketedDDP("ddp", 4, 4)])[0].step_seconds
        3.0
    """
    profile = profile.checked().for_workers(network.checked().workers)
    if not candidates:
        raise ValueError(
            "candidates=[] must hold what to predict for; measure_candidates(profile) measures all systems"
        )
    rows = [_predict(profile, network, candidate) for candidate in candidates]
    return [row._replace(speedup=rows[0].step_seconds / row.step_seconds) for row in rows]


def best_of(rows: Sequence[SystemPrediction], spread_seconds: float = 0.0) -> Optional[SystemPrediction]:
    """Return the simplest of the rows that are about as fast as the fastest; ``None`` if that is the first, DDP.

    Of those that are as simple it is the one of the highest density, which delays the least, and of these the first.
    A method that lets replicas drift apart is not considered: what it saves in time it may cost in steps.

    Args:
        rows: from :func:`predict_systems`.
        spread_seconds: by how much steps differ from each other where they were measured.
    """
    best = min(alike(rows, spread_seconds), key=lambda row: (row.complexity, -(row.density or 1.0)))
    return None if best is rows[0] else best


def alike(rows: Sequence[SystemPrediction], spread_seconds: float = 0.0) -> list[SystemPrediction]:
    """Return the rows that are not to be told from the fastest: within 5 %, or the spread of a step if that is more."""
    safe = [row for row in rows if not row.replicas_diverge]
    fastest = min(row.step_seconds for row in safe)
    return [row for row in safe if row.step_seconds <= max(WORTH * fastest, fastest + spread_seconds)]


def _predict(profile: BackwardProfile, network: Network, candidate: Candidate) -> SystemPrediction:
    sizes, elements = profile.sizes, profile.elements
    backward_seconds = _ready_at_end(profile) if candidate.waits_for_backward else profile.backward_seconds
    shared_by, peers = candidate.node_ranks(network), candidate.peers(network)
    of_share = candidate.cost.group.at_workers(peers.workers)

    def select_cost(elements: float) -> float:
        return of_share(elements / shared_by)

    exchange_cost = candidate.exchange_cost(sizes, network)
    if candidate.local_steps > 1:
        return _predict_rounds(profile, network, candidate, select_cost(elements) + exchange_cost(elements))
    groups = candidate.groups(sizes, backward_seconds, select_cost, exchange_cost)
    selection = "backward" if profile.device == "cpu" else "worker"
    prediction = predict(groups, sizes, backward_seconds, select_cost, exchange_cost, selection)
    seconds = prediction.total + candidate.finish_seconds(elements, network)
    sent_in_groups = sum(
        sent_bytes(*transfer, peers.workers)
        for group in groups
        for transfer in candidate.sent([sizes[position] for position in group], network)
    )
    afterwards = candidate.step_transfers(elements // shared_by)
    sent_afterwards = sum(sent_bytes(*transfer, peers.workers) * share for transfer, share in afterwards)
    return SystemPrediction(
        name=candidate.name,
        density=candidate.density,
        step_seconds=profile.other_seconds + seconds,
        speedup=1.0,
        exposed_seconds=seconds - sum(profile.backward_seconds),
        sent_bytes=sent_in_groups + sent_afterwards,
        messages=len(groups),
        replicas_diverge=candidate.replicas_diverge,
        complexity=candidate.complexity,
    )


def _predict_rounds(
    profile: BackwardProfile, network: Network, candidate: Candidate, seconds: float
) -> SystemPrediction:
    """Predict the steps of rounds: exchanges that nothing hides take so many seconds, and come once in a round."""
    alone = profile.other_seconds + sum(profile.backward_seconds)
    exchange = seconds + candidate.finish_seconds(profile.elements, network)
    workers = candidate.peers(network).workers
    sent = sum(sent_bytes(*transfer, workers) for transfer in candidate.sent(profile.sizes, network))
    return SystemPrediction(
        name=candidate.name,
        density=candidate.density,
        step_seconds=alone + exchange / candidate.local_steps,
        speedup=1.0,
        exposed_seconds=exchange / candidate.local_steps,
        sent_bytes=sent / candidate.local_steps,
        messages=1,
        replicas_diverge=True,
        local_steps=candidate.local_steps,
        fitting_steps=fitting_steps(alone, exchange),
        complexity=candidate.complexity,
    )


def _ready_at_end(profile: BackwardProfile) -> list[float]:
    """Return times of backward as if everything became ready at its end."""
    return [sum(profile.backward_seconds), *(0.0 for _ in profile.sizes[1:])]
