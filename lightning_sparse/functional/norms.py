"""Norms of many tensors, and what a selection leaves of them."""

from collections.abc import Sequence

import torch
from torch import Tensor


def norm_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of tensors laid end to end, in fp32, ``[]``."""
    norm: Tensor = torch.stack(torch._foreach_norm(list(tensors))).float().norm()
    if norm.device.type == "cpu" and not norm.isinf():
        return norm
    # fp32 squares overflow above a norm of 1.8e19; on a device the host would have to wait to know.
    wide = torch.stack(torch._foreach_norm(list(tensors), 2, torch.float64)).norm()
    return torch.where(norm.isinf(), wide.float(), norm)


def layer_deltas(dense_means: Sequence[Tensor], applied: Sequence[Tensor], counts: Sequence[float]) -> Tensor:
    """Compute ``delta`` of the assumption of LAGS-SGD (arXiv 1911.08727) for every layer, fp32 ``[layers]``.

    ``delta = ||x - r||^2 / ((1 - k/d) ||x||^2)``, with ``x`` the mean over ranks of what had accumulated, ``r`` what
    was applied, ``k`` elements sent of ``d``; 0 for a layer that is zero or was sent whole. The paper draws the rest.
    """
    left = [dense_mean - mean for dense_mean, mean in zip(dense_means, applied)]
    left_out = torch.stack(torch._foreach_norm(left)).float().square()
    energy = torch.stack(torch._foreach_norm(list(dense_means))).float().square()
    fractions = [1 - count / mean.numel() for count, mean in zip(counts, applied)]
    random_left_out = energy * energy.new_tensor(fractions)
    return torch.where(random_left_out > 0, left_out / random_left_out, 0.0)
