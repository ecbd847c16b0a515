import time
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch

from lightning_sparse.compressors import TopK
from lightning_sparse.engine.observe import BucketRecord, Span, StepRecord
from lightning_sparse.engine.planner import StepPlanner, averaged
from lightning_sparse.engine.step.selecting import Densities
from lightning_sparse.schedule import Merged, plan_buckets
from tests.helpers.examples import load
from tests.schedule.problems import Problem, slow_total


def echo(ranks=1):
    return load("echo").EchoCommunicator(ranks, torch.device("cpu"))


def step(ready, tensors=2):
    record = StepRecord()
    record.backward_start, record.backward_end, record.end = 0.0, 2.0, 3.0
    record.ready = {f"weight {number}": ready for number in range(tensors)}
    bucket = BucketRecord(tuple(record.ready))
    bucket.spans = [Span("select", 2.0, 2.1), Span("exchange", 2.1, 2.5)]
    record.buckets = [bucket]
    return record


def times_of(sample):
    buckets = [seconds for bucket in sample.buckets for seconds in (bucket.select_seconds, bucket.exchange_seconds)]
    return [*sample.ready, *buckets, sample.exposed_seconds, sample.total_seconds]


@pytest.mark.clock
def test_the_numbers_of_many_ranks_are_averaged_in_little_time():
    ranks, tensors, steps = 512, 1000, 30
    seen = [step(1.0, tensors)] * steps
    start = time.perf_counter()
    samples = averaged(echo(ranks), seen)
    assert time.perf_counter() - start < 1.0
    for sample, alone in zip(samples, averaged(echo(), seen), strict=True):
        assert times_of(sample) == pytest.approx(times_of(alone))


SIZES = [20_000, 2_000, 20_000, 20_000, 2_000, 500, 20_000, 50_000, 500]  # equal parts are not the best buckets
BACKWARD = 5e-3  # seconds per tensor


def select(elements):
    return 2e-4 + 1e-7 * elements


def exchange(sent):
    return 5e-3 + 4e-6 * sent


def step_of(schedule, numels, density):
    """Return a step with the buckets of a schedule and the costs above."""
    record = StepRecord()
    record.ready = dict(zip(numels, accumulate([BACKWARD] * len(numels))))
    record.backward_start, record.backward_end = 0.0, max(record.ready.values())
    names, free = [], 0.0
    for name in numels:
        names.append(name)
        if schedule.closes_bucket(name, sum(numels[each] for each in names)) or name == list(numels)[-1]:
            bucket = BucketRecord(tuple(names))
            bucket.elements = sum(numels[each] for each in names)
            bucket.counts = int(density * bucket.elements)
            selected = max(free, record.ready[name]) + select(bucket.elements)
            free = selected + exchange(bucket.counts)
            begun = selected - select(bucket.elements)
            bucket.spans = [Span("select", begun, selected), Span("exchange", selected, free)]
            record.buckets.append(bucket)
            names = []
    record.end = free
    return record


def test_the_plan_is_the_optimum_by_the_costs_that_were_seen():
    density, numels = 0.1, {f"weight {number}": size for number, size in enumerate(SIZES)}
    schedule, lines = Merged(), []
    densities, recorder = Densities(TopK(), density), SimpleNamespace(watches_gradients=False)
    planner = StepPlanner(schedule, echo(2), recorder, numels, densities, False, lambda: False, lines.append)
    for _ in range(100):
        planner.see_exchange(step_of(schedule, numels, density))
    problem = Problem(SIZES, [BACKWARD] * len(SIZES), select, lambda elements: exchange(density * elements))
    buckets = plan_buckets(*problem)
    assert planner.plan.buckets == tuple(tuple(f"weight {place}" for place in bucket) for bucket in buckets)
    assert planner.plan.seconds == pytest.approx(slow_total(buckets, problem))
    assert dict(planner.plan.tried)[1] == pytest.approx(slow_total([range(len(SIZES))], problem))
    assert len(lines) == 1
