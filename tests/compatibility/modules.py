from functools import partial

import torch
import torch.distributed as dist
from pytorch_lightning.plugins import LayerSync
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers.trainers import Rows, Small

COMPILER = "aot_eager"  # backend without a C++ compiler
adam = partial(torch.optim.Adam, lr=1e-3)
adamw = partial(torch.optim.AdamW, lr=1e-3)


class Plain(Small):
    learning_rate = 0.1

    def __init__(self, optimizer=None):
        super().__init__()
        self.optimizer = optimizer

    def build(self, module):
        if self.optimizer is not None:
            return self.optimizer(module.parameters())
        return torch.optim.SGD(module.parameters(), lr=self.learning_rate, momentum=0.9)

    def configure_optimizers(self):
        return self.build(self)

    def train_dataloader(self):
        return DataLoader(Rows(64), batch_size=4)

    def predict_dataloader(self):
        return self.val_dataloader()

    def predict_step(self, batch):
        return self.network(batch)


class ByHand(Plain):
    def __init__(self, *args):
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch, batch_index):
        self._step(self.optimizers()[batch_index % 2], (self.network(batch) - batch).square().mean())

    def _step(self, optimizer, loss):
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self):
        return [self.build(self.network[layer]) for layer in (0, 2)]


class Adversaries(ByHand):
    learning_rate = 0.01

    def __init__(self, *args):
        super().__init__(*args)
        self.critic = nn.Linear(32, 1)

    def training_step(self, batch, batch_index):
        generator, critic = self.optimizers()
        self.toggle_optimizer(generator)
        self._step(generator, (self.critic(self.network(batch)) - 1).square().mean())
        self.untoggle_optimizer(generator)
        self.toggle_optimizer(critic)
        made, real = self.critic(self.network(batch).detach()), self.critic(batch)
        self._step(critic, made.square().mean() + (real - 1).square().mean())
        self.untoggle_optimizer(critic)

    def configure_optimizers(self):
        return [self.build(self.network), self.build(self.critic)]


class PatientAdversaries(Adversaries):
    def training_step(self, batch, batch_index):
        is_last = batch_index % 2 == 1
        for number, optimizer in enumerate(self.optimizers()):
            with optimizer.toggle_model(sync_grad=is_last):
                made = self.network(batch)
                fooled = (self.critic(made if number == 0 else made.detach()) - 1 + number).square().mean()
                self.manual_backward(fooled + number * (self.critic(batch) - 1).square().mean())
            if is_last:
                optimizer.step()
                optimizer.zero_grad()


class Silent(Plain):
    """A training step without logging, because Lightning's ``log`` cannot be compiled."""

    def training_step(self, batch, batch_index):
        return (self.network(batch) - batch).square().mean()


class PartlyCompiled(Plain):
    def __init__(self, *args):
        super().__init__(*args)
        self.network = torch.compile(self.network, backend=COMPILER)


class Unused(Plain):
    def __init__(self, *args):
        super().__init__(*args)
        self.never = nn.Linear(32, 32)
        self.seldom = nn.Linear(32, 32)

    def training_step(self, batch, batch_index):
        given = self.seldom(batch) if self.global_rank == 0 and batch_index % 2 else batch
        return super().training_step(given, batch_index)


class Normalized(Plain):
    def __init__(self, *args):
        super().__init__(*args)
        self.network[0] = nn.Linear(32, 64, bias=False)  # normalization removes a bias, so it would not be trained
        self.network.insert(1, nn.BatchNorm1d(64))


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, *gradients):
        return SumOverRanks.forward(ctx, gradients[0])


class NormTogether(nn.BatchNorm1d):
    def forward(self, given):
        if not self.training:
            return super().forward(given)
        sums = SumOverRanks.apply(torch.stack([given.sum(0), given.square().sum(0)]))
        mean, mean_square = sums / (len(given) * dist.get_world_size())
        variance = mean_square - mean.square()
        self.running_mean.lerp_(mean.detach(), self.momentum)
        self.running_var.lerp_(variance.detach(), self.momentum)
        return (given - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias


class NormSync(LayerSync):
    def apply(self, model):
        model.network[1] = NormTogether(64).to(model.device)
        return model

    def revert(self, model):
        return model
