import math
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_sparse.engine.observe import Recorder, StepRecord, Totals, mean_stats
from tests.helpers.sparse_ddp import DENSITY, DIFFERENT_NAMES, Edges, backpropagate, batch, sparse_ddp


def reachable_bytes(thing):
    """Return the bytes of all tensors with more than one element that an object references."""
    if isinstance(thing, Tensor):
        return thing.nbytes if thing.numel() > 1 else 0
    if isinstance(thing, dict):
        thing = list(thing.values())
    parts = thing if isinstance(thing, (list, tuple)) else vars(thing).values() if hasattr(thing, "__dict__") else ()
    return sum(map(reachable_bytes, parts))


def held_of_a_step(rank, compressor):
    torch.manual_seed(0)
    with sparse_ddp(Edges(), compressor, DENSITY[compressor]) as (ddp, engine):
        engine.begin_backward()
        backpropagate(ddp, engine, ddp(batch(rank, 0)))
        return reachable_bytes(engine.recorder.last)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("compressor", DIFFERENT_NAMES)
def test_what_is_held_of_a_step_does_not_grow_with_ranks(pair, compressor):
    assert pair.run(held_of_a_step, compressor) == [0, 0]


class Event:
    """A device event that may be incomplete."""

    def __init__(self, seconds, has_passed=False):
        self.seconds = seconds
        self.has_passed = has_passed

    def synchronize(self):
        self.has_passed = True

    def elapsed_time(self, end):
        assert self.has_passed
        assert end.has_passed
        return 1e3 * (end.seconds - self.seconds)


def step(backward_end, end):
    record = StepRecord(world_size=4)
    record.elements, record.wire_bytes = 100, 60.0
    record.exposed = [(backward_end, end)]
    return record


def test_sums_are_those_of_all_steps_and_what_ddp_would_have_sent():
    totals = Totals()
    totals.add(step(1.0, 1.5))
    record = step(2.0, 2.25)
    record.covered_steps = 3
    totals.add(record)
    totals.add(StepRecord.of_dense(100, 400, world_size=4, local_world_size=2))
    plain, stats = 2 * 3 / 4 * 400, totals.as_stats(False, math.nan)
    dense = plain * (1 + 3 + 1)
    assert stats == {
        "total_wire_bytes": 120 + plain,
        "total_dense_bytes": dense,
        "total_compression_ratio": dense / (120 + plain),
    }
    assert totals.as_stats(True, math.nan)["total_inter_node_bytes"] == 120 + plain / 2


def test_the_share_is_of_the_median_step_so_that_plain_steps_and_validations_do_not_count(monkeypatch):
    now = iter([0.0, 2.0, 5.0, 7.0, 99.0])
    monkeypatch.setattr("lightning_sparse.engine.observe.perf_counter", lambda: next(now))
    totals = Totals()
    assert "exposed_share" not in totals.as_stats(False, 0.5)
    totals.end_step(is_dense=False)  # 2 s
    totals.end_step(is_dense=True)  # 3 s in DDP
    totals.end_step(is_dense=False)  # 2 s
    totals.end_step(is_dense=False)  # 92 s with a validation
    stats = totals.as_stats(False, 0.5)
    assert stats["total_steps"] == 4
    assert stats["exposed_share"] == 0.5 / 2
    assert math.isnan(totals.as_stats(False, math.nan)["exposed_share"])
    assert totals.as_stats(False, 3.0)["exposed_share"] == 1


def test_a_wait_after_a_step_counts_once():
    recorder = Recorder(torch.device("cpu"), world_size=4)
    marks = [Event(each) for each in (1.0, 1.5, 2.0, 2.25)]
    with mock.patch.object(recorder.clock, "mark", iter(marks).__next__):
        recorder.end_backward()
        recorder.end_exchange()
        with recorder.waiting():
            pass
    for mark in marks:
        mark.has_passed = True
    assert mean_stats(recorder.last_step, has_levels=False)["exposed_seconds"] == 0.75


def test_of_steps_of_plain_ddp_bytes_are_known_and_times_are_not():
    plain, ours = StepRecord.of_dense(100, 400, world_size=4, local_world_size=1), step(1.0, 1.5)
    stats = mean_stats([plain], has_levels=False)
    assert stats["density"] == stats["compression_ratio"] == 1.0
    assert stats["wire_bytes"] == stats["dense_bytes"] == 600.0
    assert all(math.isnan(stats[name]) for name in ("select_seconds", "exchange_seconds", "exposed_seconds"))
    ours.step = 1
    both = mean_stats([plain, ours], has_levels=False)
    assert (both["wire_bytes"], both["density"], both["exposed_seconds"]) == (330.0, 0.5, 0.5)
