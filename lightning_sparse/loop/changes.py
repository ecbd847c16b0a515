"""A model that changes: other parameters to train, or other optimizers, than those that are exchanged so far."""

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from operator import gt
from typing import Optional

from torch import Tensor
from torch.nn import Module, Parameter

from lightning_sparse.engine.collectives import gather_apart
from lightning_sparse.engine.memory.residual import Renaming
from lightning_sparse.loop.optimizers import listed

_ALIKE = (
    "What is trained has to change on all ranks before the same training_step: do not let it depend on the rank, on its"
    " own data or on its clock"
)


class TrainedParameters:
    """The parameters of a model that are exchanged: those that can be trained, and those that were ``exchanged`` once.

    Attributes:
        parameters: that are exchanged, by name.
        names: of all that the model has, by parameter.
    """

    def __init__(self, module: Module, exchanged: Collection[Tensor] = ()) -> None:
        self._module = module
        self.names: dict[Tensor, str] = {each: name for name, each in module.named_parameters()}
        before = set(exchanged)
        self.parameters = {name: each for each, name in self.names.items() if each.requires_grad or each in before}
        self._buffers = {name for name, _ in module.named_buffers()}
        self._are_exchanged = [name in self.parameters for name in self.names.values()]
        self._handled: list[int] = []  # identities of the parameters that optimizers train

    def have_changed(self, handled: Sequence[Tensor]) -> bool:
        """Return whether others are trained now; on a few hundred parameters it takes some ten microseconds.

        New ones of the model count from when optimizers have others than before: without one they are not trained.
        """
        present = list(map(id, handled))
        if present != self._handled:
            if self.has_others():
                return not self._are_replaced
            self._handled = present
        are_trained = [each.requires_grad for each in self.names]
        return any(map(gt, are_trained, self._are_exchanged))

    def has_others(self) -> bool:
        """Return whether the model has other parameters than before."""
        return set(map(id, self._module.parameters())) != set(map(id, self.names))

    @property
    def _are_replaced(self) -> bool:
        """Whether plain tensors stand in the model while ``torch.func.functional_call`` goes forward."""
        return not all(isinstance(each, Parameter) for each in self._module.parameters())

    def known_in(self, present: "TrainedParameters") -> set[str]:
        """Return the names that what is here has in a later state of the model; buffers stay under theirs."""
        return {present.names[each] for each in self.names if each in present.names} | self._buffers

    def lacks_any(self, handled: Sequence[Tensor]) -> bool:
        """Return whether any of some parameters has a gradient of the model that is not exchanged."""
        others = set(self._module.parameters()).difference(self.parameters.values())
        return any(each in others and each.requires_grad and each.grad is not None for each in handled)

    def renaming_to(self, present: "TrainedParameters") -> Renaming:
        """Return the names that these parameters have in a later state of the model."""
        return {name: present.names.get(each) for each, name in self.names.items()}

    def changes_to(self, present: "TrainedParameters") -> str:
        """Return in words what is exchanged in a later state of the model and not now, and the other way round."""
        sides = {"new or unfrozen": (present, self), "gone": (self, present)}
        found = {change: _without(one.parameters, other.parameters) for change, (one, other) in sides.items()}
        return "; ".join(f"{change}: {listed(names)}" for change, names in found.items() if names)


def check_alike(changes: str, rank: int, timeout: Optional[timedelta]) -> None:
    """Raise, on every rank, unless all ranks call with the same changes within the timeout."""
    try:
        everywhere = gather_apart(changes, timeout)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {rank}: {changes}; but not every other rank came to say so within the timeout. {_ALIKE}."
            f" The backend said: {error}"
        ) from error
    if len(set(everywhere)) > 1:
        said = ". ".join(f"Rank {each}: {told or 'nothing'}" for each, told in enumerate(everywhere))
        raise RuntimeError(f"ranks are about to train different parameters. {said}. {_ALIKE}")


def _without(ones: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> list[str]:
    known = set(others.values())  # under whatever name
    return [name for name, parameter in ones.items() if parameter not in known]
