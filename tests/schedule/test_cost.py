"""Fits recover what the timings were made from, on a busy machine too."""

import math
import random
from statistics import median

import pytest

from lightning_sparse.schedule.cost.model import EXCHANGE_SHAPES, SELECTION_SHAPES, CostModel, fit

SIZES = [2**power for power in range(8, 27)]
ASKED = [300, 1e4, 1e5, 1e6, 1e7, 6e7]
LINE = CostModel(startup=1e-3, per_unit=8e-9)
CONCAVE = CostModel(startup=4e-4, per_unit=2.5e-8, bend=1 << 20, per_unit_beyond=8e-9)
CONVEX = CostModel(startup=2e-4, per_unit=4e-9, bend=1 << 18, per_unit_beyond=1.6e-8)
LOG = CostModel(startup=2e-5, per_unit_log=2e-10)
MODELS = {"line": LINE, "concave": CONCAVE, "convex": CONVEX, "log": LOG}


def timings(model, noise=0.0, outliers=0.0, seed=0, repeats=5):
    """Time as a busy machine would: some noise on everything, and some timings far too long or far too short."""
    rng = random.Random(seed)
    samples = []
    for size in SIZES * repeats:
        spoilt = rng.choice((3, 10, 30, 0.05)) if rng.random() < outliers else 1
        samples.append((float(size), model(size) * rng.lognormvariate(0, noise) * spoilt))
    return samples


def shapes_for(name):
    return SELECTION_SHAPES if name == "log" else EXCHANGE_SHAPES


def worst_error(found, truth):
    return max(abs(found(size) / truth(size) - 1) for size in ASKED)


@pytest.mark.parametrize("name", MODELS)
def test_recovers_a_model_from_clean_timings(name):
    found = fit(timings(MODELS[name], repeats=1), shapes_for(name))
    assert found == pytest.approx(MODELS[name], rel=1e-6, abs=1e-15)


@pytest.mark.parametrize("name", MODELS)
def test_recovers_a_model_from_timings_with_noise_and_outliers(name):
    fits = [fit(timings(MODELS[name], noise=0.1, outliers=0.1, seed=seed), shapes_for(name)) for seed in range(15)]
    assert median(worst_error(found, MODELS[name]) for found in fits) < 0.12


def test_outliers_change_little_without_repetitions_too():
    fits = [fit(timings(LINE, noise=0.05, outliers=0.1, seed=seed, repeats=1), ("line",)) for seed in range(15)]
    assert median(worst_error(found, LINE) for found in fits) < 0.1
    assert max(worst_error(found, LINE) for found in fits) < 0.4


def test_no_model_falls_with_the_size_or_below_zero():
    rng = random.Random(0)
    for _ in range(25):
        samples = [(float(rng.choice(SIZES)), rng.expovariate(1)) for _ in range(40)]
        for shapes in (EXCHANGE_SHAPES, SELECTION_SHAPES, ("bent",), ("log",)):
            model = fit(samples, shapes)
            seconds = [model(size) for size in (0, 1, 2, *SIZES, 1e9, 1e12)]
            assert seconds == sorted(seconds)
            assert seconds[0] >= 0


def test_the_bend_is_taken_only_where_the_timings_ask_for_it():
    bends = [fit(timings(LINE, noise=0.05, seed=seed)).bend for seed in range(20)]
    assert bends.count(math.inf) >= 15
    assert all(fit(timings(CONCAVE, noise=0.05, seed=seed)).bend < math.inf for seed in range(20))


def test_thousands_of_sizes_are_pooled():
    rng = random.Random(2)
    sizes = [10 ** rng.uniform(2, 8) for _ in range(4000)]
    found = fit([(size, CONCAVE(size) * rng.lognormvariate(0, 0.1)) for size in sizes])
    assert worst_error(found, CONCAVE) < 0.15


@pytest.mark.parametrize(
    ("samples", "shapes"),
    [
        ([], EXCHANGE_SHAPES),
        ([(1, 0.1), (1, 0.2), (2, 0.3)], EXCHANGE_SHAPES),
        ([(1, 0.1), (2, -0.2), (3, 0.3)], EXCHANGE_SHAPES),
        ([(1, 0.1), (math.inf, 0.1), (3, 0.3)], EXCHANGE_SHAPES),
        ([(1, 0.0), (2, 0.0), (3, 0.0)], EXCHANGE_SHAPES),
        (timings(LINE), ("curve",)),
        ([(1, 1), (2, 2), (3, 3), (4, 4)], ("bent",)),
    ],
    ids=["none", "two sizes", "below zero", "infinite", "no time", "unknown shape", "too few for a bend"],
)
def test_nonsense_is_refused(samples, shapes):
    with pytest.raises(ValueError, match=r"samples|shape|sizes"):
        fit(samples, shapes)
