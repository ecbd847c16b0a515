"""Hooks of backward passes and of optimizer steps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

graph_number = torch._C._current_graph_task_id  # grows with each backward; -1 outside of a backward


def is_in_backward() -> bool:
    """Return whether a backward is running, also for a forward that a checkpoint recomputes inside the backward."""
    return graph_number() > -1


def after_closure(act: Callable[[Optimizer], None]) -> Callable[..., Any]:
    """Return a step pre-hook that calls ``act`` when gradients are complete: after the step's closure, if any."""

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
    """Register a post-accumulate-grad hook, also on a frozen parameter."""
    is_trained = parameter.requires_grad
    try:
        return parameter.requires_grad_().register_post_accumulate_grad_hook(act)
    finally:
        parameter.requires_grad_(is_trained)
