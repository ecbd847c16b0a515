"""Compressors that each violate one invariant of the conformance kit."""

import torch

from lightning_sparse import Selection
from lightning_sparse.compressors import TopK


class HidesNaN(TopK):
    def select(self, names, accumulated, counts):
        finite = [tensor.nan_to_num(0.0, 0.0, 0.0) for tensor in accumulated]
        return super().select(names, finite, counts)


class HidesLastNaN(TopK):
    def select(self, names, accumulated, counts):
        finite = [torch.cat([tensor[:-1], tensor[-1:].nan_to_num(0.0, 0.0, 0.0)]) for tensor in accumulated]
        return super().select(names, finite, counts)


class LosesMass(TopK):
    """Sends slightly too little without a residual for the difference."""

    def select(self, names, accumulated, counts):
        selections = super().select(names, accumulated, counts)
        return [selection._replace(values=0.99 * selection.values) for selection in selections]


class MovesZeros(TopK):
    """Sends small values for zeros, and the residual takes the values back."""

    def select(self, names, accumulated, counts):
        selections = super().select(names, accumulated, counts)
        return [each._replace(values=each.values.where(each.values != 0, 1e-3)) for each in selections]


class LooksAround(TopK):
    """Scales its selection by the rest of the bucket without a declaration."""

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


class ForgetsTheLast(TopK):
    def select(self, names, accumulated, counts):
        return list(super().select(names, accumulated, counts))[:-1]


class Returns(TopK):
    """Returns wrong indices."""

    def __init__(self, change):
        self._change = change

    def select(self, names, accumulated, counts):
        indices = [self._change(each.indices) for each in super().select(names, accumulated, counts)]
        pairs = zip(accumulated, indices)
        return [Selection(tensor.take(each.long() % len(tensor)), each, len(tensor)) for tensor, each in pairs]
