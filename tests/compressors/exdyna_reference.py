"""Plain implementation of ExDyna and MiCRO: a flat vector and a loop over workers.

Written from the papers and this package's documented deviations, without shared code.
"""

import bisect
import math
from collections import Counter
from itertools import pairwise

import torch

from tests.helpers.devices import DEVICE


class Reference:
    """``ranks`` workers with residuals on the tested device, because division differs between devices."""

    def __init__(self, method, numels, ranks, density):
        self.method, self.numels, self.ranks = method, numels, ranks
        self.numel = sum(numels)
        self.wanted = max(ranks, round(density * self.numel))
        self.step_count = 0
        self.theta = None
        self.gain, self.last_error = 0.05, None
        self.residuals = [torch.zeros(self.numel, device=DEVICE) for _ in range(ranks)]
        self._cut_first()

    def _cut_first(self):
        if self.method == "exdyna":
            blocks = max(self.ranks, min(1024, self.numel // 32))
            self.edges = [math.floor(block * self.numel / blocks) for block in range(blocks + 1)]
        else:
            blocks, self.edges = self.ranks, [0]
            for block in range(blocks):
                self.edges.append(self.edges[-1] + self.numel // blocks + (block < self.numel % blocks))
        self.owner_blocks = [blocks // self.ranks + (rank < blocks % self.ranks) for rank in range(self.ranks)]
        self.loads = [0.0] * blocks

    def partition(self, index):
        first = sum(self.owner_blocks[:index])
        return self.edges[first], self.edges[first + self.owner_blocks[index]]

    def step(self, gradients):
        accumulated = [residual + gradient for residual, gradient in zip(self.residuals, gradients)]
        chosen, counted = [], Counter()
        for rank in range(self.ranks):
            start, end = self.partition((self.step_count + rank) % self.ranks)
            if self.theta is None:
                chosen.append(self._first_choice(accumulated[rank], start, end, counted))
            else:
                reaching = accumulated[rank][start:end].abs() >= self.theta
                chosen.append([start + position for position in reaching.nonzero().flatten().tolist()])
        union = torch.tensor(sorted({position for positions in chosen for position in positions}))
        union = union.to(DEVICE, torch.int64)
        mean = torch.zeros(self.numel, device=DEVICE)
        for vector in accumulated:
            mean[union] += vector[union] / self.ranks
            vector[union] = 0.0
        self.residuals = accumulated
        self._learn(union.tolist(), counted)
        return chosen, mean

    def _first_choice(self, vector, start, end, counted):
        chosen, tensor_start = [], 0
        for numel in self.numels:
            low, high = max(start, tensor_start), min(end, tensor_start + numel)
            tensor_start += numel
            if low < high:
                quota = math.floor(self.wanted * high / self.numel) - math.floor(self.wanted * low / self.numel)
                chosen += (vector[low:high].abs().topk(quota).indices + low).tolist()
        for value in vector[start:end].abs().tolist():
            exponent = math.floor(math.log2(value)) if value else -200
            counted[exponent, math.floor((value / 2.0**exponent - 1) * 8)] += 1
        return sorted(chosen)

    def _learn(self, union, counted):
        ratio = len(union) / self.wanted
        if self.theta is None:
            above = 0
            for (exponent, eighth), count in sorted(counted.items(), reverse=True):
                if above + count >= self.wanted:
                    bottom, top = math.log(above + count), math.log(above or 0.5)
                    share = (bottom - math.log(self.wanted)) / (bottom - top)
                    lower, upper = 2.0**exponent * (1 + eighth / 8), 2.0**exponent * (1 + (eighth + 1) / 8)
                    self.theta = math.exp(math.log(lower) + share * (math.log(upper) - math.log(lower)))
                    self.last_error = None
                    break
                above += count
        else:
            error = math.log(ratio) if union else math.log(0.5 / self.wanted)
            sides = sorted([error, self.last_error or 0.0])
            sigma = 1 / math.sqrt(self.wanted)
            if sides[0] < -2 * sigma and sides[1] > 2 * sigma:
                self.gain = max(self.gain / 2, 0.05 / 100)
            else:
                self.gain = min(1.05 * self.gain, 0.05)
            is_chance = abs(len(union) - self.wanted) < 4 * math.sqrt(self.wanted)
            if 0.5 < ratio < 2 or is_chance or self.last_error is None:
                self.theta = math.exp(math.log(self.theta) + max(-0.1, min(0.1, self.gain * error)))
                self.last_error = error
            else:
                self.theta = None
        if self.method == "exdyna":
            self._balance(union)
        self.step_count += 1

    def _balance(self, union):
        held = Counter(bisect.bisect_right(self.edges, position) - 1 for position in union)
        self.loads = [0.95 * load + 0.05 * held[block] for block, load in enumerate(self.loads)]
        if (self.step_count + 1) % 16:
            return
        blocks, cuts = len(self.loads), [0]
        sums = [sum(self.loads[:block]) for block in range(blocks + 1)]
        for rank in range(1, self.ranks):
            target = sums[-1] * rank / self.ranks
            nearest = min(range(blocks + 1), key=lambda block: (abs(sums[block] - target), -block))
            cuts.append(max(nearest, cuts[-1] + 1))
        cuts.append(blocks)
        self.owner_blocks = [after - before for before, after in pairwise(cuts)]
