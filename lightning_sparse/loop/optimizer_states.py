"""Optimizer states of this rank, saved with the residuals, because the model's file holds the states of one rank."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.functional.elements import as_dtensor, local_tensor

_GROUPS = "groups"  # key of the parameter groups; all other keys are indices of parameters
_OF_THE_MODEL = {"params", "param_names", "initial_lr"}  # group entries that torch sets, and not the optimizer


def states_of(optimizers: Sequence[Optimizer]) -> list[Any]:
    """Return this rank's optimizer states: states of parameters, and values that change in param groups."""
    states = []
    for each in optimizers:
        whole = each.state_dict()
        groups = [{name: group[name] for name in _learned_names(each, group)} for group in whole["param_groups"]]
        states.append({**_mapped(lambda tensor, _: local_tensor(tensor), whole["state"]), _GROUPS: groups})
    return states


def load_states(optimizers: Sequence[Optimizer], states: Sequence[Any]) -> None:
    """Load the optimizer states that :func:`states_of` returned."""
    for optimizer, state in zip(optimizers, states):
        present = optimizer.state_dict()
        of_parameters = {number: each for number, each in state.items() if number != _GROUPS}
        groups = [{**group, **own} for group, own in zip(present["param_groups"], state[_GROUPS])]
        state = _mapped(as_dtensor, of_parameters, present["state"])
        optimizer.load_state_dict({**present, "state": state, "param_groups": groups})


def _learned_names(optimizer: Optimizer, group: Mapping[str, Any]) -> set[str]:
    """Return names of group entries that an optimizer learns, such as Prodigy's distance. Ranks learn different values.

    Arguments of the constructor are not included, because users and schedulers set the values.
    """
    given = inspect.signature(type(optimizer).__init__).parameters
    return group.keys() - given.keys() - _OF_THE_MODEL


def _mapped(change: Callable[[Tensor, Any], Tensor], state: Any, like: Any = None) -> Any:
    """Replace each tensor in nested dictionaries by ``change(tensor, other)``, with ``other`` from ``like``."""
    if isinstance(state, Tensor):
        return change(state, like)
    if not isinstance(state, dict):
        return state
    others = like if isinstance(like, dict) else {}
    return {key: _mapped(change, each, others.get(key)) for key, each in state.items()}
