"""Whether compression pays, from made-up measurements."""

import random

import pytest

from lightning_sparse.strategy.backend_choice import compare, wanted_gain


def turns(ours, theirs, noise, count, seed=0):
    """Make up turns of six steps each, whose seconds are off by normal noise, a fraction of them."""
    draw = random.Random(seed)

    def steps(seconds):
        return [seconds * (1 + draw.gauss(0.0, noise)) for _ in range(6)]

    return [(steps(ours), steps(theirs)) for _ in range(count)]


def test_little_is_not_worth_a_thousandth_of_the_gradient():
    quiet = turns(0.965, 1.0, noise=0.001, count=2)
    comparison = compare(quiet, density=0.001)
    assert comparison.is_clear
    assert not comparison.pays
    assert compare(quiet, density=1.0).pays
    assert compare(turns(0.8, 1.0, noise=0.001, count=2), density=0.001).pays


def test_what_a_density_has_to_save_grows_as_less_is_sent():
    wanted = [wanted_gain(density) for density in (1.0, 0.1, 0.01, 0.001, 0.0)]
    assert wanted == sorted(wanted)
    assert wanted[0] > 0


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_noise_alone_is_seldom_taken_for_a_gain(noise):
    wrong = sum(compare(turns(1.0, 1.0, noise, count, seed), 0.1).pays for seed in range(200) for count in (2, 6))
    assert wrong <= 8  # of 400


def test_what_is_clear_despite_noise_is_found_and_more_turns_make_it_clearer():
    found = {
        count: sum(compare(turns(0.7, 1.0, 0.2, count, seed), 0.01).pays for seed in range(200)) for count in (2, 4, 6)
    }
    assert found[2] < found[4] < found[6]
    assert found[6] > 100


def test_a_turn_that_was_disturbed_decides_nothing():
    quiet = turns(0.7, 1.0, noise=0.01, count=5)
    for disturbed in (([5.0] * 6, [1.0] * 6), ([0.7] * 6, [9.0] * 6)):
        comparison = compare([*quiet, disturbed], density=0.01)
        assert comparison.pays
        assert comparison.gain == pytest.approx(0.3, rel=0.1)
    assert not compare([*turns(1.0, 1.0, 0.01, 5), ([1.0] * 6, [9.0] * 6)], density=0.01).pays
