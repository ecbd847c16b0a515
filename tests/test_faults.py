"""After a fault on one rank, the other ranks raise an error in time, and the job resumes from its checkpoint.

``make faults`` adds every rank as victim, three ranks, and cut links.
"""

import os
import re

import pytest

from lightning_sparse.engine.collectives import Communicator
from tests.helpers.devices import DEVICE
from tests.helpers.faults import (
    GROUP_TIMEOUT,
    POINTS,
    SELECTIONS,
    TIMEOUT,
    Point,
    fit_struck,
    fit_whole,
    processes,
    start_again,
)

IS_LONG = bool(os.environ.get("LIGHTNING_SPARSE_FAULTS"))
WORLDS = [(2, 0), (2, 1), (3, 1)] if IS_LONG else [(2, 1)]
each_world = pytest.mark.parametrize(
    ("ranks", "victim"), WORLDS, ids=[f"rank {rank} of {ranks}" for ranks, rank in WORLDS]
)
# A forked process cannot use a GPU, and the tests are independent of the device.
pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="processes are forked, which a GPU does not allow")


HISTORIES = {}  # cached fits without a fault


def assert_goes_on(forked, ranks, point, path):
    fit = (ranks, point.settings[0])
    if fit not in HISTORIES:
        HISTORIES[fit] = forked[ranks].run(fit_whole, point.settings[0])[0]
    for seen, found in forked[ranks].run(start_again, point, path, HISTORIES[fit]):
        assert seen == list(range(5, 13))
        assert found == []


@pytest.mark.sampled(3)
@each_world
@pytest.mark.parametrize("point", POINTS)
def test_a_rank_that_is_killed_ends_the_others_and_costs_only_what_came_after_the_checkpoint(
    forked, tmp_path, point, ranks, victim
):
    path = str(tmp_path / "last.ckpt")
    answers = forked[ranks].answers(fit_struck, POINTS[point], victim, "dies", path)
    assert answers[victim][0] == "the process died"
    for rank, (failure, answer) in enumerate(answers):
        if rank != victim:
            assert failure is None
            kind, message, seconds = answer
            assert kind != "nothing"
            # With three ranks, the first survivor's failure may reach the second.
            assert re.search(POINTS[point].message, message, re.DOTALL), message
            assert seconds < TIMEOUT + 20
    assert not [number for number, state, parent, _ in processes() if (state, parent) == ("Z", os.getpid())]
    assert_goes_on(forked, ranks, POINTS[point], path)


@pytest.mark.exhaustive
@each_world
@pytest.mark.parametrize("point", ["selection", "commit", "planning"] if IS_LONG else ["selection"])
def test_a_rank_that_stops_is_waited_for_no_longer_than_the_timeout(forked, tmp_path, point, ranks, victim):
    path = str(tmp_path / "last.ckpt")
    # Lightning's own collectives wait with the process group's timeout for a rank that stopped in commit.
    longest = TIMEOUT + (GROUP_TIMEOUT.total_seconds() if point == "commit" else 0)
    answers = forked[ranks].answers(fit_struck, POINTS[point], victim, "stops", path, patience=longest)
    for rank, (failure, answer) in enumerate(answers):
        if rank == victim:
            assert "no answer" in failure
        else:
            kind, message, seconds = answer
            assert kind == "ExchangeError"
            assert re.search(POINTS[point].message, message, re.DOTALL), message
            assert TIMEOUT - 1 < seconds < longest + 20
    assert_goes_on(forked, ranks, POINTS[point], path)


@each_world
@pytest.mark.parametrize("compressor", SELECTIONS if IS_LONG else ["topk"])
def test_a_rank_out_of_memory_in_selection_says_so_and_ends_the_others(forked, tmp_path, compressor, ranks, victim):
    path = str(tmp_path / "last.ckpt")
    point = Point(SELECTIONS[compressor], "select", 0, (compressor, "merged"))
    answers = forked[ranks].run(fit_struck, point, victim, "memory", path)
    for rank, (kind, message, seconds) in enumerate(answers):
        assert kind == ("OutOfMemoryError" if rank == victim else "ExchangeError")
        told = "Tried to allocate" if rank == victim else f"rank {victim} has failed with OutOfMemoryError: CUDA out of"
        assert told in message
        assert seconds < TIMEOUT + 20
    # Schedulers also restart with new processes.
    forked[ranks].stop()
    assert_goes_on(forked, ranks, point, path)


@pytest.mark.parametrize(("how", "error"), [("memory", "OutOfMemoryError"), ("assertion", "AcceleratorError")])
def test_what_a_ranks_own_device_raises_in_an_exchange_is_not_told_as_the_death_of_another(forked, how, error):
    point = Point(Communicator, "issue", 0)
    kinds = [kind for kind, _, _ in forked[2].run(fit_struck, point, 1, how, os.devnull + "-unused")]
    forked[2].stop()
    assert kinds == ["ExchangeError", error]
