import pytest
import torch
from torch import nn

from tests.helpers.devices import DEVICE
from tests.helpers.sparse_ddp import backpropagate, sparse_ddp


class GivenGradients(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.left = nn.Parameter(torch.zeros(3, dtype=dtype))
        self.right = nn.Parameter(torch.zeros(2, dtype=dtype))

    def forward(self, left, right):
        return (self.left * left).sum() + (self.right * right).sum()


def exchange(rank, gradients, dtype=torch.float32):
    left, right = torch.tensor(gradients[rank], dtype=dtype, device=DEVICE).split([3, 2])
    with sparse_ddp(GivenGradients(dtype), "a2sgd", schedule="layerwise") as (ddp, engine):
        for _ in range(2):  # the second step starts without sums of the first
            ddp.zero_grad()
            backpropagate(ddp, engine, ddp(left, right))
        return [*ddp.module.left.grad.tolist(), *ddp.module.right.grad.tolist()]


BY_HAND = {
    # means 2, 4 and 2, 2: together 2, 3
    "both signs": ([[1, 3, -4, 0, 0], [2, -1, -3, 0, 2]], [[1, 3, -3, 0, 0], [2, -2, -4, 0, 2]]),
    # means 2, 0 and 0, 4: together 1, 2
    "one sign each": ([[1, 2, 3, 0, 2], [0, -4, 0, 0, -4]], [[0, 1, 2, 0, 1], [0, -2, 0, 0, -2]]),
    # means 0, 0 and 6, 2: together 3, 1
    "nothing here": ([[0, 0, 0, 0, 0], [6, 0, -2, 0, 6]], [[0, 0, 0, 0, 0], [3, 0, -1, 0, 3]]),
    "nothing anywhere": ([[0, 0, 0, 0, 0]] * 2, [[0, 0, 0, 0, 0]] * 2),
    # means 1, 3, 5 and 6, 3, 0: together 3, 3
    "three ranks": (
        [[1, 1, -6, 0, 1], [2, -3, 4, 0, 0], [5, 0, 0, 5, 0]],
        [[3, 3, -3, 0, 3], [2, -3, 4, 0, 0], [3, 0, 0, 3, 0]],
    ),
    "equal": ([[1, -7, 3, 0, 1e-3]] * 2, [[1, -7, 3, 0, 1e-3]] * 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("gradients", "applied"), BY_HAND.values(), ids=BY_HAND)
def test_means_are_of_the_whole_model_and_zeros_stay(pools, gradients, applied, dtype):
    assert pools[len(gradients)].run(exchange, gradients, dtype) == torch.tensor(applied, dtype=dtype).tolist()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_on_one_rank_is_not_finite_on_any(pair, poison):
    for applied in pair.run(exchange, [[0, 0, 0, 0, 0], [1, 1, poison, 1, 1]]):
        assert not torch.tensor(applied).isfinite().any()
