"""Plans: groupings that a schedule can follow, and what is known of them."""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any, NamedTuple, Optional

from lightning_sparse.schedule.merge.simulator import Prediction
from lightning_sparse.schedule.step_profile import Profile


class Grouping(NamedTuple):
    """A way to send the gradients of a model.

    Attributes:
        stops: where the groups stop, in the order of readiness.
        densities: of each group; none where every parameter has the density that it has without a plan.
    """

    stops: tuple[int, ...]
    densities: tuple[float, ...] = ()


class Plan(NamedTuple):
    """The grouping in force, and the time that it is expected to take.

    Attributes:
        groups: names of the parameters of each group.
        densities: as of :class:`Grouping`.
        predicted: a step under it; ``None`` where sizes were too alike to fit costs to them.
        seconds: from the start of backward until all gradients could be used, as measured when the plan was adopted.
        exposed_seconds: of these, after the end of backward.
        tried: number of groups, and seconds of the fastest grouping with so many that was timed.
        profile: costs that the prediction is made from.
    """

    groups: tuple[tuple[str, ...], ...]
    densities: tuple[float, ...]
    predicted: Optional[Prediction]
    seconds: float
    exposed_seconds: float
    tried: tuple[tuple[int, float], ...]
    profile: Optional[Profile]

    def state_dict(self) -> dict[str, Any]:
        """Return plain lists and numbers, for checkpoints that are read without running what a pickle asks for."""
        fields = self._asdict()
        del fields["predicted"]  # follows from the rest
        return {name: _lists(value) for name, value in fields.items()}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "Plan":
        """Return the plan that :meth:`state_dict` is of."""
        groups = tuple(tuple(map(str, group)) for group in state["groups"])
        profile = None if state["profile"] is None else Profile.of(*state["profile"])
        return cls(
            groups,
            tuple(map(float, state["densities"])),
            None if profile is None else profile.predict(tuple(accumulate(map(len, groups)))),
            float(state["seconds"]),
            float(state["exposed_seconds"]),
            tuple((int(count), float(seconds)) for count, seconds in state["tried"]),
            profile,
        )

    def __str__(self) -> str:
        expected = "" if self.predicted is None else f" (predicted {1e3 * self.predicted.total:.1f})"
        tried = ", ".join(f"{groups}: {1e3 * seconds:.1f}" for groups, seconds in self.tried)
        groups = "1 group" if len(self.groups) == 1 else f"{len(self.groups)} groups"
        return (
            f"gradients travel in {groups}{self._densities()}; backward and exchange take"
            f" {1e3 * self.seconds:.1f} ms{expected}, {1e3 * self.exposed_seconds:.1f} ms of it after backward."
            f" Tried, the fastest by number of groups, ms: {tried}"
        )

    def _densities(self) -> str:
        if not self.densities:
            return ""
        whole = sum(density >= 1 for density in self.densities)
        return f", {whole} of them whole, at densities from {min(self.densities):.2g} to {max(self.densities):.2g}"


def _lists(value: Any) -> Any:
    return [_lists(each) for each in value] if isinstance(value, tuple) else value
