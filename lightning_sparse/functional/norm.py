"""The norm of many tensors, also where their squares do not fit into their type."""

from collections.abc import Sequence

import torch
from torch import Tensor


def norm_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of tensors laid end to end, in fp32, ``[]``.

    fp32 squares overflow above a norm of 1.8e19, and norms in fp16 above 65504: then it is taken again in float64. On a
    device always, since the host would have to wait to know.
    """
    norm: Tensor = torch.stack(torch._foreach_norm(list(tensors))).float().norm()
    if norm.device.type == "cpu" and not norm.isinf():
        return norm
    wide = torch.stack(torch._foreach_norm(list(tensors), 2, torch.float64)).norm()
    return torch.where(norm.isinf(), wide.float(), norm)
