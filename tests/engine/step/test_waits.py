"""No host wait for the device on the exchange worker, in backward or in an optimizer step, except declared waits.

The device is simulated (``tests/helpers/racing.py``). A wait is a read of a value or size, or a blocking copy.
"""

from collections import Counter
from functools import partial
from unittest import mock

import pytest
import torch

from lightning_sparse import AdamCorrection, LocalSteps
from lightning_sparse.compressors import LAGS, exdyna
from tests.helpers.racing import CUDA, SYSTEMS, Way, played, train

SETTLED, STEPS = 4, 6  # the first steps determine sizes, orders and thresholds, and may wait

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.AdamW, lr=0.001)
FUSED = partial(ADAM, fused=True)


def sgd_of_tensor(parameters):
    return torch.optim.SGD(parameters, lr=torch.full((), 0.1, device=CUDA))


def adam_of_tensor(parameters):
    return FUSED(parameters, lr=torch.full((), 0.001, device=CUDA))


def corrected(second_moment_interval=100, **settings):
    return {"optimizer_correction": AdamCorrection(2, 0, second_moment_interval), **settings}


OPTIMIZERS = {
    "SGD": ({}, SGD),
    "SGD, tensor": ({"compressor": "sdagc"}, sgd_of_tensor),  # follows the learning rate
    "AdamW": (corrected(), ADAM),
    "fused": (corrected(), FUSED),
    "AdamW, tensor": (corrected(), adam_of_tensor),
    # For a dense layer, the fused kernel counts the steps on the device.
    "fused, a layer whole": (corrected(compressor=LAGS({"last.weight": 1.0})), FUSED),
}
SITUATIONS = {
    "plain": {},
    "owners": {},
    "clipped": {"clips": True},
    "scaled": {"scales": True},
    "unused": {"skips": True},
    "two levels": {"local_world_size": 2},
    "bfloat16": {"dtype": torch.bfloat16},
    "several backwards": {"backwards": 2},
}
# Maximum waits per step, with the reason.
DECLARED = {
    # Whether another rank used an unused parameter decides whether a gradient exists.
    "unused": {"engine/step/backward.py:_unused_anywhere": 1},
    # The check that ranks hold equal means before more is added must raise its error in time.
    "several backwards": {"engine/step/step.py:check_alike": 1},
    # torch's fused optimizer skips a step in its kernel. The corrected step reads the flag on the host.
    ("fused", "scaled"): {"engine/adam/steps.py:_step": 1},
    ("AdamW, tensor", "scaled"): {"engine/adam/steps.py:_step": 1},
    ("fused, a layer whole", "scaled"): {"engine/adam/steps.py:_step": 1},
    # One wait per parameter group in the optimizer's step.
    "AdamW, tensor": {"engine/adam/steps.py:_apply": 1},
}


def waits_of(way, steps=STEPS):
    seen = []
    with played() as device:
        for _ in train(way, steps):
            seen.append(Counter(wait.where for wait in device.waits if wait.where))
            device.waits.clear()
    return seen[SETTLED:]


def declared_for(*keys):
    return sum((Counter(DECLARED.get(key, {})) for key in keys), Counter())


@pytest.mark.sampled
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_host_waits_whatever_the_optimizer_and_its_situation(optimizer, situation):
    given, build = OPTIMIZERS[optimizer]
    if situation == "owners" and "compressor" not in given:
        given = {**given, "exchange": "owners"}
    declared = declared_for(optimizer, situation, (optimizer, situation))
    for waits in waits_of(Way(given, build, **SITUATIONS[situation])):
        assert waits <= declared


@pytest.mark.sampled
@pytest.mark.parametrize("schedule", ["layerwise", "single"])
@pytest.mark.parametrize("system", [name for name in SYSTEMS if name not in ("exdyna", "micro")])
def test_no_host_waits_whatever_the_system(system, schedule):
    assert waits_of(Way({"schedule": schedule, **SYSTEMS[system]})) == [Counter()] * (STEPS - SETTLED)


# The number of elements above a threshold is unknown on the host: the size of a position message and of a union.
SIZED = Counter({"engine/wire/reduce.py:agree": 2, "functional/elements.py:counts_of": 1})
CHOOSING = Counter(
    {
        "compressors/exdyna.py:_first_not_finite": 1,
        "compressors/exdyna.py:finish_step": 1,
        "compressors/topk.py:indices_reaching": 1,
        "functional/elements.py:counts_of": 1,
    }
)
SITUATIONS_OF_SIZED = {name: each for name, each in SITUATIONS.items() if name != "owners"}


@pytest.mark.sampled
@pytest.mark.parametrize("situation", SITUATIONS_OF_SIZED)
@pytest.mark.parametrize("compressor", ["exdyna", "micro"])
def test_those_that_size_messages_by_what_was_selected_wait_for_that(compressor, situation):
    way = Way({"compressor": compressor, "schedule": "single"}, SGD, **SITUATIONS[situation])
    declared = declared_for(situation) + CHOOSING + SIZED
    with mock.patch.object(exdyna, "_FAR_OFF", 1e9):  # no new measurement of a threshold
        seen = waits_of(way, 7)
    for waits in seen:
        assert waits <= Counter({where: way.backwards * times for where, times in declared.items()})


def test_exdyna_waits_for_loads_where_it_cuts_anew_and_to_measure_a_threshold():
    others = {where for waits in waits_of(Way({"compressor": "exdyna", "schedule": "single"}), 20) for where in waits}
    measuring = {f"functional/reductions.py:magnitude_{each}" for each in ("histogram", "quantile")}
    assert others == {*SIZED, *measuring, *CHOOSING, "compressors/exdyna.py:_rebalance"}


WAITS = {  # second moments learn from mean gradients without a wait, and a round waits for an agreement of the ranks
    "second moments": (Way(corrected(second_moment_interval=2), ADAM, clips=True), {}),
    "rounds": (Way({"local_steps": LocalSteps(2)}), {"engine/local_steps.py:_meet": 1}),
}


@pytest.mark.parametrize(("way", "expected"), WAITS.values(), ids=WAITS)
def test_other_exchanges_wait_as_declared(way, expected):
    assert sum(waits_of(way), Counter()) == Counter(expected)
