"""Sums over the steps of a training."""

import math
from typing import Any

import pytest

from lightning_sparse.engine.observe.facts import StepFacts
from lightning_sparse.engine.observe.totals import Totals


class Event:
    """A device's event, at a time that it may not have come to."""

    def __init__(self, seconds: float, has_passed: bool = False) -> None:
        self.seconds = seconds
        self.has_passed = has_passed

    def query(self) -> bool:
        """Tell whether it has passed."""
        return self.has_passed

    def synchronize(self) -> None:
        """Wait for it."""
        self.has_passed = True

    def elapsed_time(self, end: "Event") -> float:
        """Return the milliseconds to another one, both of which have passed."""
        assert self.has_passed
        assert end.has_passed
        return 1e3 * (end.seconds - self.seconds)


def step(backward_end: Any, end: Any) -> StepFacts:
    """Return a step that was exposed between two moments."""
    facts = StepFacts(ranks=4)
    facts.elements, facts.wire_bytes = 100, 60.0
    facts.marks.backward_end, facts.marks.end = backward_end, end
    return facts


def test_nobody_waits_for_a_device_before_somebody_asks() -> None:
    totals = Totals()
    steps = [(Event(float(number)), Event(number + 0.25)) for number in range(5)]
    for number, (backward_end, end) in enumerate(steps):
        totals.add(step(backward_end, end))
        assert not end.has_passed
        if number == 2:
            for event in (*steps[0], *steps[1]):
                event.has_passed = True
    assert len(totals._unread) == 3
    totals.end_step()
    backward_end.has_passed = True  # comes before the end, for which one waits
    steps[2][0].has_passed = steps[3][0].has_passed = True
    assert totals.as_stats(has_levels=False)["exposed_share"] * totals._seconds == pytest.approx(5 * 0.25)


def test_sums_are_those_of_all_steps_and_what_ddp_would_have_sent() -> None:
    totals = Totals()
    totals.add(step(1.0, 1.5))
    facts = step(2.0, 2.25)
    facts.covered_steps = 3
    totals.add(facts)
    totals.add_plain(50.0, node_ranks=2)
    stats = totals.as_stats(has_levels=False)
    dense = 2 * 3 / 4 * 400 * (1 + 3) + 50
    assert stats == {
        "total_wire_bytes": 170.0,
        "total_dense_bytes": dense,
        "total_compression_ratio": dense / 170,
    }
    assert totals.as_stats(has_levels=True)["total_link_bytes"] == 145.0


def test_time_of_plain_steps_and_pauses_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 10.0, 12.0, 15.0, 100.0, 102.0])
    monkeypatch.setattr("lightning_sparse.engine.observe.totals.perf_counter", lambda: next(now))
    totals = Totals()
    assert math.isnan({"exposed_share": math.nan, **totals.as_stats(has_levels=False)}["exposed_share"])
    totals.resume()
    totals.add(step(1.0, 1.5))
    totals.end_step()  # 2 s
    totals.add_plain(50.0)
    totals.end_step()  # 3 s, left to DDP
    totals.resume()  # after 85 s of validation
    totals.add(step(2.0, 2.5))
    totals.end_step()  # 2 s
    stats = totals.as_stats(has_levels=False)
    assert stats["total_steps"] == 3
    assert stats["exposed_share"] == (0.5 + 0.5) / (2 + 2)
    assert totals.as_stats(has_levels=False, waited_seconds=0.4)["exposed_share"] == 0.1
