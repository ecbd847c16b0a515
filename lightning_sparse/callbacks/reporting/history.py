"""A history of what was logged, for pictures over time."""

from collections.abc import Mapping

_MAX_COLUMNS = 256


class History:
    """Remember logged steps; when there are too many, every second one of the older ones is forgotten.

    Attributes:
        steps: their numbers.
        statistics: of each step, those of all ranks together.
        densities: by parameter name, one for each step.
    """

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.statistics: list[Mapping[str, float]] = []
        self.densities: dict[str, list[float]] = {}

    def add(self, step: int, statistics: Mapping[str, float], densities: Mapping[str, float]) -> None:
        """Remember a step; a parameter that was not there before has sent nothing until now."""
        for name in densities:
            self.densities.setdefault(name, [0.0] * len(self.steps))
        self.densities = {name: [*row, densities.get(name, 0.0)] for name, row in self.densities.items()}
        self.steps.append(step)
        self.statistics.append(statistics)
        if len(self.steps) > _MAX_COLUMNS:
            self.steps, self.statistics = self.steps[1::2], self.statistics[1::2]
            self.densities = {name: row[1::2] for name, row in self.densities.items()}
