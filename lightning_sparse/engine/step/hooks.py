"""Hooks around a backward and around an optimizer's step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

graph_number = torch._C._current_graph_task_id  # of backwards, one inside another; later ones have larger ones


def is_in_backward() -> bool:
    """Tell whether this is called from a backward, such as by a checkpoint that goes forward once more."""
    return graph_number() > -1


def after_closure(act: Callable[[Optimizer], None]) -> Callable[..., Any]:
    """Return a hook before steps that acts as soon as an optimizer's gradients are there: after a closure, if any."""

    def hook(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_named = "closure" in kwargs
        closure = kwargs["closure"] if is_named else args[1] if len(args) > 1 else None
        if closure is None:
            act(optimizer)
            return None

        def close() -> Any:
            loss = closure()
            act(optimizer)
            return loss

        return (args, {**kwargs, "closure": close}) if is_named else ((args[0], close, *args[2:]), kwargs)

    return hook


def register_grad_hook(parameter: Tensor, act: Callable[[Tensor], None]) -> Any:
    """Register what is called when a gradient has been added to, also where it is frozen for now."""
    is_trained = parameter.requires_grad
    try:
        return parameter.requires_grad_().register_post_accumulate_grad_hook(act)
    finally:
        parameter.requires_grad_(is_trained)
