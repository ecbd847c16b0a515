"""Whose a name is: what is kept by name stays with its parameter, whatever that is called by now."""

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from torch import Tensor
from torch.nn import Module

Kept = TypeVar("Kept")


class Moves(NamedTuple):
    """What has become of names since somebody looked last."""

    renamed: Mapping[str, str]  # the present names of parameters, by those before
    replaced: frozenset[str]  # names of parameters that the model has no more, and that others have now

    def followed(self, kept: Mapping[str, Kept]) -> dict[str, Kept]:
        """Return what is kept, under the present names, without that of parameters whose names others have."""
        return {self.renamed.get(name, name): each for name, each in kept.items() if name not in self.replaced}


class FollowedNames:
    """The names under which something is kept of a model's parameters.

    What the model has no more keeps its name until another parameter has it: a layer may be put back.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self.of: dict[Tensor, str] = {}
        self.follow()

    def follow(self) -> Moves:
        """Take up the names that the model's parameters have now."""
        before = self.of
        present: dict[Tensor, str] = {each: name for name, each in self._module.named_parameters()}
        taken = set(present.values())
        self.of = {**{each: name for each, name in before.items() if name not in taken}, **present}
        return Moves(
            {name: present[each] for each, name in before.items() if present.get(each, name) != name},
            frozenset(name for each, name in before.items() if each not in present and name in taken),
        )

    def has_new(self) -> bool:
        """Tell whether the model has parameters of which nothing is kept."""
        return any(each not in self.of for each in self._module.parameters())
