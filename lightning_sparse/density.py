"""How much is sent of each parameter now."""

from lightning_sparse.compressors import Compressor, element_count


class Densities:
    """The density of each parameter: what the user asked for, or what a plan adds to it.

    All ranks change it alike, and only between two steps.

    Args:
        compressor: which may have densities of its own for some parameters.
        density: of the model.

    Attributes:
        density: of the model; a warm-up changes it.
        planned: by parameter name, what a plan can send for nothing; less than the user asked for changes nothing.
        sends_all: whether everything is sent, so that nothing is left to wait.
    """

    def __init__(self, compressor: Compressor, density: float) -> None:
        self._compressor = compressor
        self.density = density
        self.planned: dict[str, float] = {}
        self.sends_all = False

    def of(self, name: str) -> float:
        """Return the fraction of elements to send of a parameter."""
        return 1.0 if self.sends_all else max(self.wanted(name), self.planned.get(name, 0.0))

    def wanted(self, name: str) -> float:
        """Return the fraction that the user asked for."""
        return self._compressor.density_of(name, self.density)

    def count(self, name: str, numel: int) -> int:
        """Return how many of a parameter's elements the user asked for."""
        return element_count(numel, self.wanted(name))
