"""Two networks that are trained against each other, in a loop of one's own."""

from torch import nn


class Adversaries(nn.Module):
    def __init__(self):
        super().__init__()
        self.maker, self.critic = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, rows, number):
        made = self.maker(rows)
        return (self.critic(made) - (1 - number)).square().mean() + number * (self.critic(rows) - 1).square().mean()
