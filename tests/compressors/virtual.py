"""Compare the engine in real processes with a slow algorithm for N virtual workers."""

from types import MappingProxyType

import torch
from torch import Tensor, nn

from lightning_sparse.engine.memory import Hyperparameters
from lightning_sparse.engine.step.step import StepContext
from tests.helpers.devices import DEVICE, moved
from tests.helpers.sparse_ddp import backpropagate, batch, sparse_ddp

Tensors = dict[str, Tensor]
DENSITY = 0.05


def largest(tensor, density):
    return tensor.abs().argsort(descending=True)[: max(1, round(density * tensor.numel()))]


class VirtualTopK:
    """Top-k of each bucket for N workers, with residuals. Each parameter is a bucket unless ``buckets`` are given.

    ``densities`` has densities of parameters.
    """

    def __init__(self, buckets=(), densities=MappingProxyType({}), in_update_units=False):
        self.buckets, self.densities = buckets, densities
        self.in_update_units = in_update_units
        self.residuals = {}

    def __call__(self, gradients, rate):
        unit = rate if self.in_update_units else 1.0
        means = {name: torch.zeros_like(gradient) for name, gradient in gradients[0].items()}
        for rank, gradient in enumerate(gradients):
            for names in self.buckets or [[name] for name in gradient]:
                accumulated = [self.residuals.get((rank, name), 0.0) + unit * gradient[name] for name in names]
                flat = torch.cat(accumulated)
                positions = largest(flat, self.densities.get(names[0], DENSITY))
                sent = torch.zeros_like(flat)
                sent[positions] = flat[positions]
                pieces = sent.split([tensor.numel() for tensor in accumulated])
                for name, tensor, piece in zip(names, accumulated, pieces):
                    self.residuals[rank, name] = tensor - piece
                    means[name] += piece / unit / len(gradients)  # division before addition, in rank order
        return means


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 48)
        self.second = nn.Linear(48, 20)

    def forward(self, inputs):
        return (self.second(torch.tanh(self.first(inputs))) - inputs[:, :20]).square().mean()


def learning_rate(step):
    return 0.1 if step < 12 else 0.01


def train_engine(rank, settings, steps, momentum, nesterov):
    torch.manual_seed(0)
    history = []
    with sparse_ddp(Net(), **settings) as (ddp, engine):
        for step in range(steps):
            rate = learning_rate(step)
            names = [name for name, _ in ddp.module.named_parameters()]
            engine.begin_backward(StepContext(None, dict.fromkeys(names, Hyperparameters(rate, momentum, nesterov))))
            backpropagate(ddp, engine, ddp(batch(rank, step)))
            history.append(_apply(ddp.module, {n: p.grad.flatten() for n, p in ddp.module.named_parameters()}, rate))
    return history


def train_virtually(algorithm, ranks, steps):
    """Train N virtual workers on the tested device, because gradients differ between devices."""
    torch.manual_seed(0)
    net = Net().to(DEVICE)
    history = []
    for step in range(steps):
        gradients = []
        for rank in range(ranks):
            net.zero_grad()
            net(batch(rank, step)).backward()
            gradients.append({name: parameter.grad.flatten().clone() for name, parameter in net.named_parameters()})
        history.append(_apply(net, algorithm(gradients, learning_rate(step)), learning_rate(step)))
    return history


def _apply(net, means, rate):
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter -= rate * means[name].view_as(parameter)
    applied = {name: mean.clone() for name, mean in means.items()}
    return applied, {name: parameter.detach().clone() for name, parameter in net.named_parameters()}


def assert_same_as_virtual(pool, settings, algorithm, steps=20, momentum=0.0, nesterov=False, relative=None):
    expected = moved(train_virtually(algorithm, pool.ranks, steps), "cpu")
    tolerance = {} if relative is None else {"rtol": relative, "atol": 1e-6}
    for history in pool.run(train_engine, settings, steps, momentum, nesterov):
        for (applied, parameters), (expected_applied, expected_parameters) in zip(history, expected):
            for name, mean in expected_applied.items():
                assert torch.equal(applied[name] != 0, mean != 0), name
                torch.testing.assert_close(applied[name], mean, **tolerance)
                torch.testing.assert_close(parameters[name], expected_parameters[name], **tolerance)
