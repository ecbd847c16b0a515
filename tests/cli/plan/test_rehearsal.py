"""What is concluded from rehearsals; how long they take is the machine's affair."""

import pytest
import torch

from lightning_sparse.cli.plan.rehearsal import EchoCollectives, fitted_sizes, measure_selection

SIZES = fitted_sizes(torch.device("cpu"))


def rehearsed(sizes, ranks):
    group = 1e-3 + 1e-4 * (len(sizes) - 1) + sum(sizes) * (2e-9 + 5e-10 * (ranks - 1))
    return group, 1e-5 + sum(sizes) * 1e-9


def bounded(sizes, ranks):
    """The same, where more than 8 ranks cost no more."""
    return rehearsed(sizes, min(ranks, 8))


@pytest.mark.parametrize(("machine", "asked"), [(rehearsed, (1, 2, 64)), (bounded, (4, 8, 16, 1024))])
def test_a_cost_is_found_again(machine, asked):
    cost = measure_selection(machine, [3_000_000], SIZES)
    for ranks in asked:
        group, finish = machine([5_000_000], ranks)
        assert cost.group.at_workers(ranks)(5_000_000) == pytest.approx(group, rel=1e-3)
        assert cost.finish.at_workers(ranks)(5_000_000) == pytest.approx(finish, rel=1e-3)


def test_a_model_of_many_tensors_pays_for_each():
    sizes = [100, 50_000] * 60
    cost = measure_selection(rehearsed, sizes, SIZES)
    assert cost.group.at_workers(4)(sum(sizes)) == pytest.approx(rehearsed(sizes, 4)[0], rel=0.01)


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_echo_has_the_shapes_of_the_real_ones(ranks):
    echo = EchoCollectives(ranks, torch.device("cpu"))
    assert echo.all_gather(torch.arange(4.0)).tolist() == [[0.0, 1.0, 2.0, 3.0]] * ranks
    shards, out = torch.arange(2.0 * ranks).view(ranks, 2), torch.empty(ranks, 2)
    assert echo.all_to_all(shards).tolist() == [[0.0, 1.0]] * ranks
    assert echo.all_to_all(shards, out) is out
    assert echo.all_reduce(torch.ones(2)).tolist() == [ranks] * 2
