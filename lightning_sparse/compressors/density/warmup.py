"""More in the first steps, when gradients change too fast to wait."""

from typing import ClassVar

from typing_extensions import override

from lightning_sparse.compressors.density.rule import Rule, RuleContext


class Warmup(Rule):
    """Let the density fall to what the user asked for step by step, exponentially as in Deep Gradient Compression.

    At step ``k`` of a warm-up of ``n``, a density of ``d`` is ``d ** ((k + 1) / (n + 1))`` (arXiv 1712.01887, which
    counts epochs). By epochs the strategy warms up itself: ``SparseDDPStrategy(warmup_epochs=4)``.

    Args:
        length: steps of the optimizer until the density is that of the user.

    Raises:
        ValueError: for a ``length`` below 1.

    Example::

        >>> context = RuleContext(step=1, epoch=0, asked={"weight": 0.001}, present={}, ceiling=1.0)
        >>> round(Warmup(length=4).minimum_densities(context)["weight"], 3)
        0.063
    """

    follows_steps: ClassVar[bool] = True

    def __init__(self, length: int) -> None:
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise ValueError(
                f"length={length!r} must be a whole number of steps, at least 1; without any, leave the rule out"
            )
        self.length = length
        self._step = 0

    @override
    def minimum_densities(self, context: RuleContext) -> dict[str, float]:
        self._step = context.step
        if self._step >= self.length:
            return {}
        exponent = (self._step + 1) / (self.length + 1)
        # A library's last digit must not make two ranks send different numbers of elements.
        return {name: round(asked**exponent, 9) for name, asked in context.asked.items()}

    @override
    def reason(self, name: str) -> str:
        return f"step {self._step + 1} of {self.length}"
