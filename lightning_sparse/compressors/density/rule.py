"""The contract of a rule, which decides HOW MUCH is sent of each parameter."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple


class RuleContext(NamedTuple):
    """Facts that rules may use before a step; equal on all ranks.

    Attributes:
        step: optimizer steps made so far.
        epoch: from 0.
        asked: by parameter name, the density that the user asked for, without any warm-up.
        present: by parameter name, the density of the step before.
        ceiling: the most that a rule can get.
    """

    step: int
    epoch: int
    asked: Mapping[str, float]
    present: Mapping[str, float]
    ceiling: float


class Measurement(NamedTuple):
    """Norms of a step by parameter name, as root mean squares over ranks; so equal on all of them.

    Attributes:
        gradient_norms: of the ranks' own gradients, before anything was added to them.
        residual_norms: of what they keep after the step.
        update_norms: of the ranks' own updates, of those parameters of which Adam's updates are kept, not gradients.
    """

    gradient_norms: Mapping[str, float]
    residual_norms: Mapping[str, float]
    update_norms: Mapping[str, float] = {}


class Rule(ABC):
    """Wish for densities, one parameter at a time.

    What it answers must follow from what it was given and nothing else: all ranks ask alike and must get the same.

    Attributes:
        measures: whether :meth:`observe` wants to be called.
        follows_steps: whether :meth:`minimum_densities` may answer something else after every step.
    """

    measures: ClassVar[bool] = False
    follows_steps: ClassVar[bool] = False

    @abstractmethod
    def minimum_densities(self, context: RuleContext) -> dict[str, float]:
        """Return the least density wished for, by parameter name; without those that may stay as the user asked."""

    @abstractmethod
    def reason(self, name: str) -> str:
        """Say in a few words why the last wish for a parameter is what it is."""

    def begin(self) -> None:
        """Forget everything: a ``fit`` begins."""
        return

    def observe(self, measurement: Measurement, context: RuleContext) -> None:
        """Look at a step that has been made; ``context`` was before it."""
        return

    def state_dict(self) -> dict[str, Any]:
        """Return what has been learned, as plain numbers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        return
