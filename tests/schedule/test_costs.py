import random

import pytest

from lightning_sparse.schedule.costs import (
    BucketCosts,
    BucketSample,
    BucketShape,
    Line,
    costs_of,
    fit,
    hidden_densities,
)


def made_up(seed):
    chance = random.Random(seed)
    buckets, ready = [], 0.0
    for _ in range(chance.randint(1, 6)):
        elements = chance.choice([10, 100, 1000, 5000])
        ready += chance.choice([0.0, 1e-3, 5e-3, 2e-2])
        buckets.append(BucketShape(elements, max(1, elements // 100), ready))
    select = Line(chance.choice([0.0, 1e-4]), chance.choice([0.0, 1e-7]))
    exchange = Line(chance.choice([1e-4, 2e-3]), chance.choice([1e-7, 1e-5, 1e-4]))
    return BucketCosts(select, exchange), buckets


def seconds_of(costs, bucket, count):
    return costs.select(bucket.elements) + costs.exchange(count)


def test_each_group_sends_the_most_that_is_over_before_the_next_is_ready():
    raised = whole = 0
    for seed in range(300):
        costs, buckets = made_up(seed)
        free = 0.0
        for place, (bucket, density) in enumerate(zip(buckets, hidden_densities(costs, buckets))):
            begin = max(free, bucket.ready)
            room = 0.8 * (buckets[place + 1].ready - begin) if place + 1 < len(buckets) else 0.0
            counts = range(bucket.counts, bucket.elements + 1)
            hiding = [count for count in counts if seconds_of(costs, bucket, count) <= room + 1e-12]
            expected = max(hiding, default=bucket.counts)
            assert abs(round(density * bucket.elements) - expected) <= 1, (seed, place)
            raised += bucket.counts < expected < bucket.elements
            whole += expected == bucket.elements
            free = begin + seconds_of(costs, bucket, round(density * bucket.elements))
    assert raised > 20
    assert whole > 20


def test_nothing_that_is_sent_for_nothing_makes_the_step_longer():
    for seed in range(300):
        costs, buckets = made_up(seed)
        free = least = 0.0
        for bucket, density in zip(buckets, hidden_densities(costs, buckets)):
            free = max(free, bucket.ready) + seconds_of(costs, bucket, round(density * bucket.elements))
            least = max(least, bucket.ready) + seconds_of(costs, bucket, bucket.counts)
        assert free <= least + 1e-9


TRUE = Line(1e-3, 8e-9)
SIZES = [2**power for power in range(16, 27)]


@pytest.mark.parametrize(("noise", "outliers", "error"), [(0.0, 0.0, 1e-9), (0.1, 0.0, 0.15), (0.05, 0.15, 0.15)])
def test_a_line_is_found_again_on_a_busy_machine(noise, outliers, error):
    for seed in range(20):
        chance = random.Random(seed)
        samples = []
        for size in SIZES * 6:
            spoilt = chance.choice((3, 10, 0.05)) if chance.random() < outliers else 1
            samples.append((size, TRUE(size) * chance.lognormvariate(0, noise) * spoilt))
        found = fit(samples)
        assert all(found(size) == pytest.approx(TRUE(size), rel=error) for size in (1e6, 1e7, 6e7)), seed


def test_what_does_not_rise_is_flat_and_sizes_alike_tell_nothing():
    assert fit([(10, 3.0), (20, 2.0), (40, 1.0)]) == Line(2.0, 0.0)
    assert fit([(10, 3.0), (10, 2.0), (11, 1.0)]) is None
    assert fit([]) is None


def test_costs_are_lines_through_groups():
    buckets = [BucketSample(size, size // 10, 1e-8 * size, 1e-3 + 1e-6 * (size // 10)) for size in (100, 500, 1000)]
    costs = costs_of(buckets)
    assert costs.select(400) == pytest.approx(4e-6)
    assert costs.exchange(40) == pytest.approx(1.04e-3)
    assert costs_of(buckets[:1]) is None
