"""What this rank has of optimizers' states, where the file of the model holds those of another rank."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.functional.elements import as_dtensor, local_tensor

_GROUPS = "groups"  # in the state of an optimizer beside the numbers of its parameters
_OF_THE_MODEL = {"params", "param_names", "initial_lr"}  # in a group, by torch


def states_of(optimizers: Sequence[Optimizer]) -> list[Any]:
    """Return what this rank holds of the states of optimizers: of each parameter, and of groups, in their order."""
    states = []
    for each in optimizers:
        whole = each.state_dict()
        groups = [{name: group[name] for name in _learned_names(each, group)} for group in whole["param_groups"]]
        states.append({**_mapped(lambda tensor, _: local_tensor(tensor), whole["state"]), _GROUPS: groups})
    return states


def load_states(optimizers: Sequence[Optimizer], states: Sequence[Any]) -> None:
    """Have optimizers go on from what :func:`states_of` returned."""
    for optimizer, state in zip(optimizers, states):
        present = optimizer.state_dict()
        of_parameters = {number: each for number, each in state.items() if number != _GROUPS}
        groups = [{**group, **own} for group, own in zip(present["param_groups"], state[_GROUPS])]
        state = _mapped(as_dtensor, of_parameters, present["state"])
        optimizer.load_state_dict({**present, "state": state, "param_groups": groups})


def _learned_names(optimizer: Optimizer, group: Mapping[str, Any]) -> set[str]:
    """Return what an optimizer keeps in a group for itself, such as the distance that Prodigy learns, of a rank's own.

    What users and schedulers set there, which a constructor names, is for the file of the model.
    """
    given = inspect.signature(type(optimizer).__init__).parameters
    return group.keys() - given.keys() - _OF_THE_MODEL


def _mapped(change: Callable[[Tensor, Any], Tensor], state: Any, like: Any = None) -> Any:
    """Return nested dictionaries with their tensors changed, each by what is in its place in others ``like`` them."""
    if isinstance(state, Tensor):
        return change(state, like)
    if not isinstance(state, dict):
        return state
    others = like if isinstance(like, dict) else {}
    return {key: _mapped(change, each, others.get(key)) for key, each in state.items()}
