"""Muon for matrices and AdamW for all else, as one optimizer: Lightning's automatic optimization takes one."""

from collections.abc import Callable, Iterable
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from typing_extensions import override


class MuonAdamW(Optimizer):
    """Step matrices with :class:`torch.optim.Muon`, and all else with :class:`torch.optim.AdamW`, at one learning rate.

    Muon's updates are scaled to the size of AdamW's (``adjust_lr_fn="match_rms_adamw"``), so that one rate and one
    schedule serve both. It needs torch 2.9.

    Args:
        params: parameters; Muon takes those of two dimensions.
        lr: learning rate of both.
        betas: of AdamW.
        momentum: of Muon.
        weight_decay: of both.
        elementwise: those of ``params`` that AdamW takes although they have two dimensions: embeddings and the head.

    Example::

        >>> layer = nn.Linear(3, 2)
        >>> [len(group["params"]) for group in MuonAdamW(layer.parameters()).param_groups]
        [1, 1]
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        elementwise: Iterable[Tensor] = (),
    ) -> None:
        others = set(elementwise)
        matrices, rest = list[nn.Parameter](), list[nn.Parameter]()
        for parameter in params:
            (matrices if parameter.dim() == 2 and parameter not in others else rest).append(parameter)
        self._parts: list[Optimizer] = []
        if matrices:
            self._parts.append(torch.optim.Muon(matrices, lr, weight_decay, momentum, adjust_lr_fn="match_rms_adamw"))
        if rest:
            self._parts.append(AdamW(rest, lr, betas, weight_decay=weight_decay))
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        for part in self._parts:
            self.defaults |= part.defaults

    @override
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Make a step, after evaluating ``closure`` if there is one; return what it returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part, group in zip(self._parts, self.param_groups):  # a checkpoint replaces groups and state
            part.param_groups, part.state = [group], self.state
            part.step()
        return loss


def embeddings_and_head(network: nn.Module) -> list[Tensor]:
    """Return the weights of a network's embeddings and of its last linear layer, which are no matrices to Muon."""
    linear = [module.weight for module in network.modules() if isinstance(module, nn.Linear)]
    return [*(module.weight for module in network.modules() if isinstance(module, nn.Embedding)), *linear[-1:]]
