"""The edges of exclusive selection: small models, no gradient, broken gradients, another density, a saved state."""

import io
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sparse.compressors import ExDyna, MiCRO
from lightning_sparse.compressors.exclusive.partitions import (
    Partitions,
    balanced_cuts,
    even_cuts,
    published_edges,
    shifted_cuts,
    spread_edges,
)
from lightning_sparse.compressors.exclusive.threshold import THRESHOLD_RULES, Pursuit
from tests.compressors.simulation import Simulation

BUILDS = {
    f"{method.__name__} {mode}": lambda method=method, mode=mode: method(mode)
    for method in (ExDyna, MiCRO)
    for mode in ("default", "paper")
}
each_build = pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
each_default = pytest.mark.parametrize("build", [ExDyna, MiCRO])


def gradients_of(simulation: Simulation, step: int, scale: float = 1.0) -> list[Tensor]:
    """Draw normal gradients that depend on rank and step."""
    generator = torch.Generator().manual_seed(step)
    return [scale * torch.randn(simulation.numel, generator=generator) for _ in simulation.compressors]


def states_of(simulation: Simulation) -> list[dict[str, Any]]:
    """Return the states of all ranks, tensors as lists so that they can be compared."""
    states = [compressor.state_dict() for compressor in simulation.compressors]
    return [{key: getattr(value, "tolist", lambda v=value: v)() for key, value in state.items()} for state in states]


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("numels", [(1,), (2, 1), (1, 1, 1, 1, 1), (7, 30, 3), (997, 64), (33_000, 3)], ids=str)
@each_build
def test_ranks_share_a_model_of_any_size(build: Any, numels: tuple[int, ...], ranks: int) -> None:
    simulation = Simulation(build, {str(place): numel for place, numel in enumerate(numels)}, ranks, density=0.01)
    for step in range(20):
        chosen = simulation.step(gradients_of(simulation, step))
        assert torch.cat(chosen).unique().numel() == sum(map(len, chosen)) <= simulation.numel
        ranges = sorted(c._partitions.owned(rank, step + 1) for rank, c in enumerate(simulation.compressors))
        assert [first for first, _ in ranges] == [0, *(last for _, last in ranges[:-1])]
        assert ranges[-1][1] == simulation.numel
    states = states_of(simulation)
    assert states == [states[0]] * ranks


@each_default
def test_the_first_step_selects_what_is_wanted_however_many_tensors_there_are(build: Any) -> None:
    simulation = Simulation(build, {str(place): 11 for place in range(300)}, ranks=3, density=0.01)
    assert sum(map(len, simulation.step(gradients_of(simulation, 0)))) == 33
    tiny = Simulation(build, {"weight": 100}, ranks=4, density=0.001)
    assert sum(map(len, tiny.step(gradients_of(tiny, 0)))) == 4


@each_build
def test_density_one_selects_everything_at_every_step(build: Any) -> None:
    simulation = Simulation(build, {"one": 1, "prime": 997}, ranks=3, density=1.0)
    for step in range(5):
        chosen = simulation.step([torch.zeros(998) for _ in range(3)])
        assert sorted(torch.cat(chosen).tolist()) == list(range(998)), step


@each_build
def test_zero_gradients_neither_select_everything_nor_end_the_search(build: Any) -> None:
    simulation = Simulation(build, {"weight": 4000}, ranks=2, density=0.01)
    for start in (0, 100):
        for step in range(60):
            # What waits is still sent, and is not followed closely; with the zeros it would be 4000.
            assert sum(map(len, simulation.step([torch.zeros(4000)] * 2))) < 400, step
        later = [sum(map(len, simulation.step(gradients_of(simulation, start + step)))) for step in range(40)]
        assert all(later[20:])


@each_default
def test_fewer_nonzero_elements_than_wanted_are_all_sent(build: Any) -> None:
    simulation = Simulation(build, {"weight": 4000}, ranks=2, density=0.01)
    gradient = torch.zeros(4000)
    gradient[::400] = 1.0
    for _ in range(3):
        union = set(torch.cat(simulation.step([gradient, gradient])).tolist())
        assert len(union) == 40
        assert union >= set(range(0, 4000, 400))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@each_build
def test_whoever_has_a_value_that_is_not_finite_sends_it(build: Any, value: float) -> None:
    simulation = Simulation(build, {"small": 40, "large": 4000}, ranks=3, density=0.01)
    for step in range(4):
        simulation.step(gradients_of(simulation, step))
        before, residuals = states_of(simulation), [residual.clone() for residual in simulation.residuals]
        for rank, position in ((0, 3), (1, 41), (2, 2000), (0, 4039)):
            gradients = gradients_of(simulation, 50 + rank)
            gradients[rank][position] = value
            assert position in simulation.step(gradients)[rank]
            assert states_of(simulation) == before
            assert all(map(torch.equal, simulation.residuals, residuals))


@each_build
def test_a_sum_of_squares_that_overflows_is_no_alarm(build: Any) -> None:
    simulation = Simulation(build, {"weight": 4000}, ranks=2, density=0.01)
    simulation.step(gradients_of(simulation, 0, scale=1e25))
    assert {state["step"] for state in states_of(simulation)} == {1}


@each_default
def test_the_density_may_change_from_step_to_step(build: Any) -> None:
    simulation = Simulation(build, {"weight": 20_000}, ranks=2, density=1.0)
    for phase, density in enumerate((1.0, 0.25, 0.06, 0.015)):
        simulation.density = density
        steps = [simulation.step(gradients_of(simulation, 100 * phase + step)) for step in range(50)]
        mean = sum(len(positions) for chosen in steps[-20:] for positions in chosen) / 20 / 20_000
        assert mean == pytest.approx(density, rel=0.2)


@each_build
def test_a_saved_state_goes_on_as_if_nothing_had_happened(build: Any) -> None:
    simulation = Simulation(build, {"weight": 4000, "bias": 10}, ranks=3, density=0.02)
    for step in range(25):
        simulation.step(gradients_of(simulation, step))
    saved = io.BytesIO()
    torch.save([compressor.state_dict() for compressor in simulation.compressors], saved)
    residuals = list(simulation.residuals)
    went_on = [simulation.step(gradients_of(simulation, step)) for step in range(25, 45)]
    saved.seek(0)
    simulation.begin()
    simulation.residuals = residuals
    for compressor, state in zip(simulation.compressors, torch.load(saved, weights_only=True)):
        compressor.load_state_dict(state)
    for step, expected in zip(range(25, 45), went_on):
        assert all(map(torch.equal, simulation.step(gradients_of(simulation, step)), expected))


@each_build
def test_a_state_for_other_ranks_keeps_the_threshold_and_cuts_anew(build: Any) -> None:
    simulations = [Simulation(build, {"weight": 4000}, ranks, density=0.02) for ranks in (2, 3)]
    for step in range(40):
        simulations[0].step(gradients_of(simulations[0], step))
    state = simulations[0].compressors[0].state_dict()
    for compressor in simulations[1].compressors:
        compressor.load_state_dict(state)
    assert {state["threshold"] for state in states_of(simulations[1])} == {state["threshold"]}
    chosen = simulations[1].step(gradients_of(simulations[1], 99))
    assert torch.cat(chosen).unique().numel() == sum(map(len, chosen))


def test_mistakes_are_told_with_their_cure() -> None:
    with pytest.raises(ValueError, match=r"mode='papper' is unknown; choose one of: default, paper .*'paper'"):
        ExDyna(mode="papper")
    with pytest.raises(
        ValueError, match=r"MiCRO keeps step, threshold, gain, error, cuts, but was given .* loads; load it into"
    ):
        MiCRO().load_state_dict(ExDyna().state_dict())
    old = {name: value for name, value in MiCRO().state_dict().items() if name not in ("gain", "error")}
    MiCRO().load_state_dict(old)
    with pytest.raises(
        ValueError, match=r"ExDyna keeps step, threshold, gain, error, cuts, loads, but was given .* nothing"
    ):
        ExDyna().load_state_dict({})


def test_blocks_are_even_or_as_published() -> None:
    edges = spread_edges(1_000_003, ranks=4)
    assert len(edges) == 1025
    assert {last - first for first, last in pairwise(edges)} <= {976, 977}
    published = published_edges(1_000_003, ranks=4)
    assert published[:3] == (0, 960, 1920)
    assert len(published) == 1025
    assert published[-2:] == (1023 * 960, 1_000_003)
    assert spread_edges(3, ranks=5) == published_edges(3, ranks=5) == (0, 0, 1, 1, 2, 3)


def test_published_cuts_move_one_block_between_uneven_neighbours() -> None:
    partitions = Partitions(edges=tuple(range(0, 17 * 32, 32)), cuts=even_cuts(16, 4))
    loads = [5] * 4 + [1] * 4 + [3] * 8
    assert shifted_cuts(partitions, loads) == (0, 3, 8, 12, 16)
    assert shifted_cuts(partitions, loads[::-1]) == (0, 4, 8, 13, 16)
    assert shifted_cuts(partitions, [0] * 16) == partitions.cuts
    at_floor = partitions._replace(cuts=(0, 1, 8, 12, 16))
    assert shifted_cuts(at_floor, [50] + [1] * 15) == at_floor.cuts


def test_cuts_leave_a_block_for_everyone_wherever_the_load_is() -> None:
    for loads in ([1.0, 0, 0, 0, 0], [0, 0, 0, 0, 1.0], [0, 1.0, 0, 0, 1.0]):
        cuts = balanced_cuts(torch.tensor(loads, dtype=torch.float64), ranks=4)
        assert all(first < last for first, last in pairwise(cuts))
        assert (cuts[0], cuts[-1]) == (0, 5)


def test_published_steps_with_the_dead_branch_mended() -> None:
    start, follow = THRESHOLD_RULES["paper"]
    assert start(100) == 0.05
    followed = [follow(1.0, Pursuit(), selected, 1000) for selected in (1101, 1001, 1000, 910, 909, 0)]
    assert [each.threshold for each in followed] == [1.005, 1.00125, 0.9987, 0.9987, 0.995, 0.995]


def test_the_default_threshold_moves_by_logarithms_and_is_measured_when_far_off() -> None:
    start, follow = THRESHOLD_RULES["default"]
    assert start(100) is None
    near = follow(1.0, Pursuit(), 150, 100)
    assert near.threshold == pytest.approx(1.5**0.05)
    for selected in (200, 50, 0):
        far = follow(1.0, near, selected, 100)
        assert far.threshold is None
        # Of the step after a measurement, which finds what that has left, nothing is concluded.
        assert follow(1.0, far, 0, 100).threshold == pytest.approx(math.exp(-0.1))
    assert follow(1.0, near, 0, 4).threshold == pytest.approx(math.exp(-0.1))


@each_default
def test_what_is_sent_does_not_swing_where_gradients_hardly_change(build: Any) -> None:
    simulation = Simulation(build, {"weight": 20_000}, ranks=2, density=0.005)
    scale, drift = (torch.randn(20_000, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    steps = [
        simulation.step([scale.exp() * (drift + 0.05 * noise) for noise in gradients_of(simulation, step)])
        for step in range(250)
    ]
    sent = torch.tensor([float(sum(map(len, chosen))) for chosen in steps[100:]]) / 100
    # With one gain, and measurements in a row: a mean of 1.5, and from a fifth to four times what is wanted.
    assert sent.mean() == pytest.approx(1.0, rel=0.3)
    assert sent.std() < 0.3
    assert 0.4 < sent.min() < sent.max() < 2.2
