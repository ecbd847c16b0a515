"""The present density of each parameter."""

from collections.abc import Mapping

from lightning_sparse.compressors import Compressor, element_count

PLAN, RULES = "plan", "rules"  # who may request more than the user asked for
_DEPARTURE = 1.25  # a density that falls a little in every step is not worth a plan, or a line, in every step


class Densities:
    """The density of each parameter: the user's, or the largest requested minimum above it.

    All ranks change it alike, and only between two steps.
    """

    def __init__(self, compressor: Compressor, density: float) -> None:
        self._compressor = compressor
        self._density = density
        self._requested: dict[str, dict[str, float]] = {PLAN: {}, RULES: {}}
        self._noted: dict[str, float] = {}
        self.sends_all = False  # and nothing is left over
        self.ceiling = 1.0  # the most that a rule, or a plan made from now on, gets of a parameter
        self.have_changed = False  # for a plan to note, and to set back

    @property
    def density(self) -> float:
        """That of the model, as the user asked for it; a warm-up changes it."""
        return self._density

    @density.setter
    def density(self, density: float) -> None:
        self.have_changed = self.have_changed or density != self._density
        self._density = density

    def request(self, requester: str, densities: Mapping[str, float]) -> None:
        """Replace the minimum densities that :data:`PLAN` or :data:`RULES` has requested, by parameter name."""
        self._requested[requester] = dict(densities)
        if requester == RULES and _departs(self._noted, self._requested[RULES]):
            self._noted = self._requested[RULES]
            self.have_changed = True

    def of(self, name: str) -> float:
        """Return the fraction of elements to send of a parameter."""
        return 1.0 if self.sends_all else max(self.wanted(name), self._requested[PLAN].get(name, 0.0))

    def wanted(self, name: str) -> float:
        """Return the least density that a plan may send: the user's, or a rule's."""
        asked = self._compressor.density_of(name, self._density)
        return max(asked, min(self._requested[RULES].get(name, 0.0), self.ceiling))

    def count(self, name: str, numel: int) -> int:
        """Return the least number of a parameter's elements that a plan may send."""
        return element_count(numel, self.wanted(name))


def _departs(before: Mapping[str, float], after: Mapping[str, float]) -> bool:
    """Return whether a request has come or gone, or is another by more than a plan is exact to."""
    if before.keys() != after.keys():
        return True
    return any(is_other_density(before[name], density) for name, density in after.items())


def is_other_density(before: float, after: float) -> bool:
    """Return whether a density is another by a quarter, enough to act on it."""
    return not 1 / _DEPARTURE < after / before < _DEPARTURE
