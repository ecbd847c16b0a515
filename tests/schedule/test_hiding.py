"""What can be sent for nothing, against the definition."""

import random

import pytest

from lightning_sparse.schedule.cost.model import CostModel
from lightning_sparse.schedule.hidden_density import hidden_densities
from lightning_sparse.schedule.merge.exact import earliest_stops
from lightning_sparse.schedule.merge.simulator import simulate
from lightning_sparse.schedule.step_profile import Profile


def made_up(seed, has_dense):
    chance = random.Random(seed)
    tensors = chance.randint(1, 12)
    elements, counts, ready = [0], [0], [0.0]
    for _ in range(tensors):
        size = chance.choice([10, 100, 1000, 5000])
        elements.append(elements[-1] + size)
        counts.append(counts[-1] + max(1, size // 100))
        ready.append(ready[-1] + chance.choice([0.0, 1e-3, 5e-3, 2e-2]))
    select = CostModel(chance.choice([0.0, 1e-4]), chance.choice([0.0, 1e-7]))
    exchange = CostModel(chance.choice([1e-4, 2e-3]), chance.choice([1e-7, 1e-5, 1e-4]))
    dense = CostModel(2 * exchange.startup, exchange.per_unit / 2) if has_dense else None
    profile = Profile(tuple(elements), tuple(counts), tuple(ready), select, exchange, 0.0, dense)
    return profile, earliest_stops(
        profile.ready, lambda start, stop: profile.select_seconds(start, stop) + profile.exchange_seconds(start, stop)
    )


@pytest.mark.parametrize("has_dense", [False, True])
def test_each_group_sends_the_most_that_is_over_before_the_next_is_ready(has_dense):
    raised = whole = 0
    for seed in range(300):
        profile, stops = made_up(seed, has_dense)
        free = 0.0
        for group, density in enumerate(hidden_densities(profile, stops)):
            start, stop = ([0, *stops][group], stops[group])
            numel = profile.elements[stop] - profile.elements[start]
            fewest = profile.counts[stop] - profile.counts[start]
            begin = max(free, profile.ready[stop])
            deadline = profile.ready[stops[group + 1]] if group + 1 < len(stops) else 0.0
            hiding = [
                count
                for count in range(fewest, numel + 1)
                if profile.group_seconds(start, stop, count) <= 0.8 * (deadline - begin) + 1e-12
            ]
            faster_whole = profile.dense is not None and profile.group_seconds(
                start, stop, numel
            ) <= profile.group_seconds(start, stop, fewest)
            expected = numel if faster_whole else max(hiding, default=fewest)
            assert abs(round(density * numel) - expected) <= 1, (seed, group)
            raised += fewest < expected < numel
            whole += expected == numel
            free = begin + profile.group_seconds(start, stop, round(density * numel))
    assert raised > 20
    assert not has_dense or whole > 20


def test_nothing_that_is_sent_for_nothing_makes_the_step_longer():
    for seed in range(300):
        profile, stops = made_up(seed, has_dense=True)
        free = 0.0
        for start, stop, density in zip([0, *stops], stops, hidden_densities(profile, stops)):
            counts = round(density * (profile.elements[stop] - profile.elements[start]))
            free = max(free, profile.ready[stop]) + profile.group_seconds(start, stop, counts)
        assert free == pytest.approx(simulate(profile, stops, "worker").total, abs=1e-9)
