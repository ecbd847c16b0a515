"""Our compressors pass all checks of the conformance kit, and a compressor with a fault fails a single check."""

from contextlib import ExitStack

import pytest
import torch

from lightning_sparse.engine.step.selecting import BucketSelector
from lightning_sparse.engine.step.topology import LocalGradient
from lightning_sparse.engine.wire import build_wires
from lightning_sparse.testing import InvariantError, check_compressor, checks_for
from lightning_sparse.testing.invariants import assert_mass_is_conserved, balance
from lightning_sparse.testing.tensors import assert_same
from lightning_sparse.testing.wrapping import settings_of
from tests.compressors import lawless
from tests.helpers.devices import DEVICE, moved
from tests.helpers.sparse_ddp import (
    COMPRESSOR_NAMES,
    DIFFERENT_NAMES,
    SCHEDULE_NAMES,
    Edges,
    batch,
    parameters_of,
    sgd_steps,
    sparse_ddp,
    subject_of,
    train_branches,
)

CHECKS = [check for name in COMPRESSOR_NAMES for check in checks_for(name)]


@pytest.mark.sampled
@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_invariant(pools, check):
    check(pools[3])


def train_observed(rank, settings, is_observed):
    torch.manual_seed(0)
    with sparse_ddp(Edges(), **settings) as (ddp, engine):
        for _ in sgd_steps(ddp, engine, (ddp(batch(rank, step)) for step in range(3)), lr=0.01, momentum=0.9):
            if is_observed:
                engine.compression_stats()
        return parameters_of(ddp)


@pytest.mark.sampled
@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
@pytest.mark.parametrize("compressor", COMPRESSOR_NAMES)
def test_observer_changes_nothing(pair, compressor, schedule):
    settings = settings_of(compressor, schedule=schedule)
    assert_same(*(pair.run(train_observed, settings, is_observed) for is_observed in (True, False)))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("schedule", "wire", "ranks"), [("merged", "float32", 2), ("layerwise", "bfloat16", 3), ("single", "4bit", 2)]
)
@pytest.mark.parametrize("compressor", COMPRESSOR_NAMES)
def test_unused_parameters_are_left_alone(pools, compressor, schedule, wire, ranks):
    """A parameter that any rank uses has a gradient on all ranks. Other parameters have none. No residual is lost."""
    books = pools[ranks].run(train_branches, settings_of(compressor, schedule=schedule, wire=wire))
    if subject_of(compressor).feedback.keeps_residual:
        assert_mass_is_conserved(books)
    later = {"shared": True, "never": False}
    for book in books:
        for entry, expected in zip(book, ({**later, "sometimes": True, "never": True}, later, later)):
            for name, is_written in expected.items():
                gradient = entry["applied"][name]
                assert bool(gradient.any()) is is_written, f"{name}: {gradient}"
    one, *others = (book[1]["applied"]["sometimes"] for book in books)
    assert one.any(), "a parameter used on rank 0 has no gradient there"
    if not subject_of(compressor).replicas_diverge:
        assert all(one.equal(other) for other in others), "the gradient of a parameter differs between ranks"


def firsts(compressor):
    return {check.holds.__name__: check for check in reversed(checks_for(compressor))}


TOGETHER = {
    "mass_is_conserved",
    "replicas_and_schedules_agree",
    "nonfinite_gradients_change_no_state",
    "zero_stays_zero",
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("compressor", "broken"),
    [
        (lawless.HidesNaN, "nonfinite_gradients_change_no_state"),
        (lawless.HidesLastNaN, "nonfinite_gradients_change_no_state"),
        (lawless.LosesMass, "mass_is_conserved"),
        (lawless.LooksAround, "replicas_and_schedules_agree"),
        (lawless.MovesZeros, "zero_stays_zero"),
    ],
)
def test_a_broken_compressor_fails_the_invariant_that_it_breaks_and_no_other(forked, compressor, broken):
    checks = firsts(compressor)
    for name in TOGETHER - {broken}:
        checks[name](forked[3])
    with pytest.raises(InvariantError, match=broken):
        checks[broken](forked[3])


@pytest.mark.exhaustive
def test_all_checks_run_by_one_call_that_has_a_time_limit():
    check_compressor("dense")
    with pytest.raises(InvariantError, match=r"mass_is_conserved.*no answer within"):
        check_compressor("topk", timeout=0.01)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda indices: indices.flip(0), "not distinct and ascending"),
        (lambda indices: indices.clamp_min(int(indices[1])), "not distinct and ascending"),
        (lambda indices: indices + 10**6, "out of range"),
        (lambda indices: indices[:-1], "selection_size"),
        (lambda indices: indices.int(), "int64"),
    ],
)
def test_indices_that_break_the_contract_are_named_with_the_class_and_the_rule(change, rule):
    compressor = lawless.Returns(change)
    selector = BucketSelector(compressor, build_wires("gather", "reduce", torch.float32, 0, 2))
    with pytest.raises(ValueError, match=f"^Returns.select returned, for 'weight' .*.*{rule}"):
        selector.select([LocalGradient("weight", torch.empty(0), True)], [torch.randn(100)], [0.1])


def test_a_selection_is_wanted_of_each_parameter():
    selector = BucketSelector(lawless.ForgetsTheLast(), build_wires("gather", "reduce", torch.float32, 0, 2))
    bucket = [LocalGradient(name, torch.empty(0), True) for name in ("weight", "bias")]
    with pytest.raises(ValueError, match=r"ForgetsTheLast\.select returned 1 selections for 2"):
        selector.select(bucket, [torch.randn(100)] * 2, [0.1] * 2)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_top_k_on_a_lossless_wire_loses_not_one_bit(pools, ranks, schedule):
    books = pools[ranks].run(balance, {"compressor": "topk", "density": 0.05, "schedule": schedule}, 4)
    # Division on the exchange's device: a GPU multiplies by the inverse, with another last bit.
    for entries in zip(*moved(books, DEVICE)):
        for name in entries[0]["gradient"]:
            total = torch.zeros_like(entries[0]["gradient"][name])
            for entry in entries:
                accumulated = entry["before"][name] + entry["gradient"][name]
                was_sent = entry["after"][name] != accumulated
                assert not entry["after"][name][was_sent].any()
                total += torch.where(was_sent, accumulated, 0.0) / ranks
            assert torch.equal(total, entries[0]["applied"][name])


def balance_in(rank, settings, dtype):
    with ExitStack() as later:
        later.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(dtype)
        return balance(rank, settings, 3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("compressor", DIFFERENT_NAMES)
def test_the_default_dtype_is_exchanged(pair, compressor):
    for book in pair.run(balance_in, settings_of(compressor), torch.float64):
        for name, gradient in (item for entry in book for item in entry["applied"].items()):
            assert gradient.dtype is torch.float64, f"{name}: dtype is {gradient.dtype}"
            assert gradient.isfinite().all(), f"{name}: not finite, {gradient}"
