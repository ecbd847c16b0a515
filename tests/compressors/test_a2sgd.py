import pytest
import torch
from torch import nn

from lightning_sparse.compressors import A2SGD
from tests.helpers.devices import DEVICE
from tests.helpers.sparse_ddp import Edges, backpropagate, batch, sgd_steps, sparse_ddp


def flat_parameters(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train(rank, steps):
    torch.manual_seed(0)
    with sparse_ddp(Edges(), A2SGD(param_sync_every=None)) as (ddp, engine):
        losses = (ddp(batch(rank, step)) for step in range(steps))
        return torch.stack([flat_parameters(ddp) for _ in sgd_steps(ddp, engine, losses, lr=0.01, momentum=0.9)])


def slow_histories(ranks, steps):
    models, optimizers = [], []
    for _ in range(ranks):
        torch.manual_seed(0)
        models.append(Edges().to(DEVICE))
        optimizers.append(torch.optim.SGD(models[-1].parameters(), lr=0.01, momentum=0.9))
    histories = [[] for _ in range(ranks)]
    for step in range(steps):
        gradients, up, down = [], [], []
        for rank, model in enumerate(models):
            model.zero_grad()
            model(batch(rank, step)).backward()
            flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).double()
            gradients.append(flat)
            up.append(flat[flat > 0].mean())
            down.append(-flat[flat < 0].mean())
        for rank, (model, flat) in enumerate(zip(models, gradients)):
            is_up, is_down = flat > 0, flat < 0
            flat[is_up] += sum(up) / ranks - up[rank]
            flat[is_down] -= sum(down) / ranks - down[rank]
            parameters = list(model.parameters())
            for parameter, piece in zip(parameters, flat.split([parameter.numel() for parameter in parameters])):
                parameter.grad.copy_(piece.view_as(parameter))
            optimizers[rank].step()
            histories[rank].append(flat_parameters(model))
    return [torch.stack(history).cpu() for history in histories]


@pytest.mark.parametrize("ranks", [2, 3])
def test_it_trains_as_its_formula_says(pools, ranks):
    answers = pools[ranks].run(train, 20)
    for ours, theirs in zip(answers, slow_histories(ranks, 20)):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


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
    "equal": ([[1, -7, 3, 0, 1e-3]] * 2, [[1, -7, 3, 0, 1e-3]] * 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("gradients", "applied"), BY_HAND.values(), ids=BY_HAND)
def test_means_are_of_the_whole_model_and_zeros_stay(pair, gradients, applied, dtype):
    assert pair.run(exchange, gradients, dtype) == torch.tensor(applied, dtype=dtype).tolist()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_on_one_rank_is_not_finite_on_any(pair, poison):
    for applied in pair.run(exchange, [[0, 0, 0, 0, 0], [1, 1, poison, 1, 1]]):
        assert not torch.tensor(applied).isfinite().any()


@pytest.mark.parametrize("every", [0, -1, 2.5, "50"])
def test_bad_arguments_are_refused_with_a_cure(every):
    with pytest.raises(ValueError, match=r"param_sync_every=.* at least 1"):
        A2SGD(param_sync_every=every)
