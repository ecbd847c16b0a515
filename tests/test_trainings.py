"""Random trainings: ranks train one model, and changes without effect give identical bits.

A failure prints the drawn :class:`~tests.helpers.random_trainings.Training`. ``make test`` draws a few trainings per
commit, ``make test-all`` also a fixed hundred, ``LIGHTNING_SPARSE_FAULTS=1`` a thousand, and
``LIGHTNING_SPARSE_DRAWS=200:300`` the trainings with these numbers.
"""

import math
import os
import subprocess
import tempfile
from functools import partial
from pathlib import Path

import pytest

from lightning_sparse import AdamCorrection
from lightning_sparse.testing.pool import RemoteError
from lightning_sparse.testing.tensors import differences
from tests.helpers.random_loops import LOOPS, in_a_loop, train_everywhere
from tests.helpers.random_trainings import (
    MAY_NOT_MATTER,
    PARTS,
    STRATEGIES,
    Training,
    drawn,
    go_on,
    train,
)
from tests.helpers.tiers import exhaustive

_OF_A_COMMIT = 6
_LOOPS_OF_A_COMMIT = 4
_SECONDS = 60.0  # timeout of a few trainings that take a second together
_PATIENCE = 10.0  # timeout after the first answer
_AVERAGED = ("mean", "mask", "running_mean", "running_var")  # buffers that the ranks average
# Buffers that differ between ranks, as with DDP between two forwards.
_OWN = ("count", "num_batches_tracked", "n_averaged")
# Reordered sums of a few numbers over 18 steps.
_TOLERANCES = {"adamw": 1e-4, "rmsprop": 1e-4}
_TOLERANCE = 1e-5
_NARROW_TOLERANCE = 0.1  # rounding of bfloat16


def first_of_the_commit():
    """Return the first draw of the current commit, within the range of ``LIGHTNING_SPARSE_FAULTS``."""
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    commit = int(asked.stdout, 16) if asked.returncode == 0 else 0
    return 100 + _OF_A_COMMIT * (commit % (1000 // _OF_A_COMMIT))


def draws(of_a_commit=_OF_A_COMMIT):
    """Return the numbers of the trainings to draw. ``make test`` runs only the first few."""
    asked = os.environ.get("LIGHTNING_SPARSE_DRAWS", "100:1100" if os.environ.get("LIGHTNING_SPARSE_FAULTS") else "")
    if asked:
        return range(*map(int, asked.split(":")))
    first = first_of_the_commit()
    few = range(first, first + of_a_commit)
    return [*few, *exhaustive(seed for seed in range(8 * of_a_commit) if seed not in few)]


def unlike(training, outcomes):
    """Yield differences between ranks, non-finite values, and wrong validations."""
    for name, values in outcomes[0].end.items():
        if name != "mask" and not all(map(math.isfinite, values)):
            yield f"{name} is not finite"
        if name == "dead" and any(values[4:]):
            yield "what has a gradient of zero for good has moved"
    left_out = _OWN if training.drifts else _OWN + _AVERAGED
    # The average of a callback follows this rank's model.
    shows_own = training.drifts and "average at validation" in training.may_not_matter
    places = {
        "batch": [[] if training.drifts else outcome.batches for outcome in outcomes],
        "validation": [[] if shows_own else outcome.validated for outcome in outcomes],
        "save": [[outcome.saved] for outcome in outcomes],
        "end": [[outcome.end] for outcome in outcomes],
    }
    for place, states_of in places.items():
        for number, states in enumerate(zip(*states_of, strict=True), 1):
            first, *others = (
                {
                    name: values
                    for name, values in state.items()
                    # With local steps, ranks average a teacher and buffers only when a round ends early.
                    if name.rpartition(".")[2] not in left_out
                    and not (training.local and place != "end" and name.startswith(("teacher", "averaged")))
                    and not (training.local and place == "save" and name.rpartition(".")[2] in _AVERAGED)
                }
                for state in states
            )
            apart = {place.partition(":")[0] for other in others for place in differences(first, other)}
            if apart:
                yield f"{place} {number}: ranks are not one model: {', '.join(sorted(apart))}"
                break
    if any(outcome.failures for outcome in outcomes):
        yield "what was validated was not the average that a callback had put there"


def other_bits(one, other):
    """Yield the first bitwise difference of two trainings."""
    yield from first_difference(one, other, differences)
    if found := differences([one.end, one.optimizers], [other.end, other.optimizers]):
        yield f"the end has other numbers: {found[0]}, and {len(found) - 1} more"


def far(training, one, other):
    """Yield the first batch after which two trainings exceed the tolerance."""
    tolerance = _NARROW_TOLERANCE if "bf16" in training.precision else _TOLERANCES.get(training.optimizer, _TOLERANCE)

    def distances(ours, theirs):
        largest = {name: max(map(_distance, values, theirs[name]), default=0.0) for name, values in ours.items()}
        return [f"{name} by {each:.2g}" for name, each in largest.items() if not each <= tolerance]

    return first_difference(one, other, distances)


def _distance(one, other):
    return 0.0 if one == other else abs(one - other)


def first_difference(one, other, differing):
    """Yield the first batch after which two trainings differ. The second may have started later."""
    skipped = len(one.batches) - len(other.batches)
    for number, (ours, theirs) in enumerate(zip(one.batches[skipped:], other.batches, strict=True), skipped + 1):
        if found := differing(ours, theirs):
            yield f"batch {number} has other numbers: {found[0]}, and {len(found) - 1} more"
            return


def findings(training, ranks):
    for name, each in training.variants().items():
        if name in ranks[0]:
            yield from (f"{name}: {found}" for found in unlike(each, [outcomes[name] for outcomes in ranks]))
            # A resumed fit is compared with the first fit, and may have no batch left.
            asks = name != "resumed"
            if asks and any(_stood_still(outcomes[name]) for outcomes in ranks):
                yield f"{name}: nothing was trained"
    for rank, outcomes in enumerate(ranks):
        where = f"on rank {rank}"
        if "all" in outcomes and training.strategy != "auto":
            yield from (f"all {where}: {found}" for found in other_bits(outcomes["plain"], outcomes["all"]))
        if "resumed" in outcomes:
            saved = outcomes.get("all", outcomes["plain"])
            compare = partial(far, training) if training.rounds_anew else other_bits
            yield from (f"resumed {where}: {found}" for found in compare(saved, outcomes["resumed"]))
        if "ddp" in outcomes:
            yield from (f"whole {where}: {found}" for found in far(training, outcomes["whole"], outcomes["ddp"]))


def _stood_still(outcome):
    trained = [name for name in outcome.start if name.rpartition(".")[2] in ("weight", "bias", "scale")]
    return bool(trained) and all(outcome.start[name] == outcome.end[name] for name in trained)


def moved(training, before, outcomes):
    for rank, outcome in enumerate(outcomes):
        # Within a round, the file has the shared model, not the local models.
        saved = {} if training.drifts else before.saved
        for name in saved.keys() & outcome.start.keys():
            if name.rpartition(".")[2] not in _OWN and saved[name] != outcome.start[name]:
                yield f"moved: rank {rank} does not start with what was saved of {name}"
    yield from (f"moved: {found}" for found in unlike(training, outcomes))


def failures_of(pools, training, folder):
    try:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            ranks = pools[training.ranks].run(train, training, place, timeout=_SECONDS, patience=_PATIENCE)
            found, first = list(findings(training, ranks)), "all" if "all" in ranks[0] else "plain"
            if training.moves and ranks[0][first].saved:
                before, other = ranks[0][first], pools[training.moves]
                arguments = (go_on, training.moved, place, first, before.saved)
                found += moved(training.moved, before, other.run(*arguments, timeout=_SECONDS, patience=_PATIENCE))
            return found
    except RemoteError as error:
        return [str(error)]


def failures_of_loop(loop, pools, training, folder):
    try:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            arguments = (train_everywhere, training, place, loop)
            ranks = pools[training.ranks].run(*arguments, timeout=_SECONDS, patience=_PATIENCE)
    except RemoteError as error:
        return [str(error)]
    found = []
    for rank, outcomes in enumerate(ranks):
        pairs = {"loop": outcomes["trainer"]._replace(optimizers=[]), "resumed": outcomes["loop"]}
        for name in pairs.keys() & outcomes.keys():
            found += [f"{name} on rank {rank}: {each}" for each in other_bits(pairs[name], outcomes[name])]
    return found


@pytest.mark.parametrize("seed", draws())
def test_whatever_is_drawn(pools, tmp_path, seed):
    training = drawn(seed)
    failures = failures_of(pools, training, tmp_path)
    assert not failures, "\n".join([repr(training), *failures])


def test_gradients_that_a_toggled_optimizer_left_from_its_last_step_are_no_means_of_the_step(pools, tmp_path):
    training = Training(
        correction=AdamCorrection(warmup_steps=2, density_decay_steps=0, second_moment_interval=3),
        seed=457,
        optimizer="adamw",
        optimizers=2,
        by_hand="toggled by turns",
        backwards=2,
        saves=("batch", 3),
    )
    assert not failures_of(pools, training, tmp_path)


@pytest.mark.parametrize("seed", draws(_LOOPS_OF_A_COMMIT))
def test_a_loop_of_ones_own_ends_with_the_trainers_bits(pools, tmp_path, seed):
    training = in_a_loop(drawn(seed))
    # Fabric's modules convert their outputs under autocast.
    takes_fabric = training.precision != "bf16-mixed"
    loops = [loop for loop in LOOPS if loop != "fabric" or takes_fabric]
    assert not failures_of_loop(loops[seed % len(loops)], pools, training, tmp_path), repr(training)


def test_draws_have_everything_in_them():
    trainings = [drawn(seed) for seed in range(100)]
    assert {training.strategy for training in trainings} == set(STRATEGIES)
    assert {part for training in trainings for part in training.parts} == set(PARTS)
    assert {name for training in trainings for name in training.may_not_matter} == set(MAY_NOT_MATTER)
