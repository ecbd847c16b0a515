"""Compressors that each break one invariant, for the conformance kit to find."""

import torch

from lightning_sparse import Selection
from lightning_sparse.compressors import TopK


class HidesNaN(TopK):
    """Sends the largest finite magnitudes, and so tells nobody of those that are not finite."""

    def select(self, names, accumulated, counts):
        finite = [tensor.nan_to_num(0.0, 0.0, 0.0) for tensor in accumulated]
        return super().select(names, finite, counts)


class HidesLastNaN(TopK):
    """Sends a last element that is not finite as if it were zero."""

    def select(self, names, accumulated, counts):
        finite = [torch.cat([tensor[:-1], tensor[-1:].nan_to_num(0.0, 0.0, 0.0)]) for tensor in accumulated]
        return super().select(names, finite, counts)


class LosesMass(TopK):
    """Sends a little less than was there, and keeps nothing of the difference."""

    def select(self, names, accumulated, counts):
        selections = super().select(names, accumulated, counts)
        return [selection._replace(values=0.99 * selection.values) for selection in selections]


class MovesZeros(TopK):
    """Sends a little where there is nothing, which the residual then takes back."""

    def select(self, names, accumulated, counts):
        selections = super().select(names, accumulated, counts)
        return [each._replace(values=each.values.where(each.values != 0, 1e-3)) for each in selections]


class LooksAround(TopK):
    """Scales its choice by what else is in the group, without declaring it."""

    def select(self, names, accumulated, counts):
        offset = max(tensor.numel() for tensor in accumulated)
        return [self._strided(tensor, count, offset) for tensor, count in zip(accumulated, counts)]

    def _strided(self, tensor, count, offset):
        indices = (torch.arange(count, device=tensor.device) * (tensor.numel() // count) + offset) % tensor.numel()
        if not tensor.isfinite().all():
            indices[0] = tensor.isfinite().logical_not().nonzero()[0, 0]
        indices = indices.unique()
        missing = count - indices.numel()
        if missing:
            others = torch.ones(tensor.numel(), dtype=torch.bool, device=tensor.device).index_fill_(0, indices, False)
            indices = torch.cat([indices, others.nonzero().squeeze(1)[:missing]]).sort().values
        return Selection(tensor[indices], indices, tensor.numel())


class Returns(TopK):
    """Returns other indices than those of the largest magnitudes."""

    def __init__(self, change):
        self._change = change

    def select(self, names, accumulated, counts):
        indices = [self._change(each.indices) for each in super().select(names, accumulated, counts)]
        pairs = zip(accumulated, indices)
        return [Selection(tensor.take(each.long() % len(tensor)), each, len(tensor)) for tensor, each in pairs]
