"""LAGS-SGD: top-k of every layer, each with a residual and a density.

Shi, Tang, Wang, Zhao and Chu, "Layer-wise Adaptive Gradient Sparsification for Distributed Deep Learning with
Convergence Guarantees", ECAI 2020 (arXiv 1911.08727).
"""

from collections.abc import Mapping
from typing import Optional

from typing_extensions import override

from lightning_sparse.compressors.base import ErrorFeedback, ModelLayout, checked_density
from lightning_sparse.compressors.registry import checked_name
from lightning_sparse.compressors.topk import TopK
from lightning_sparse.removed import refusing


@refusing
class LAGS(TopK):
    """Send the largest magnitudes of every layer. Each layer has a residual and a density.

    The paper accumulates learning rate times gradient. Every released implementation, the authors' included,
    accumulates the gradient. The results differ only if the learning rate changes while a gradient is in the residual.

    Args:
        densities: density by parameter name; all other parameters have the strategy's density.
        error_feedback: learning rate for gradients in the residual: ``"gradient"`` for the rate of the step that sends
            the gradient, ``"update"`` for the rate of the step that computed the gradient (exact for plain SGD).
        adaptive_density: whether to raise a layer's density, at most to 1, if backward hides the longer exchange. The
            density of the strategy or of the warm-up is the minimum (the inverse of ``c_u`` in the paper). Densities
            depend on times measured in the first steps, so two runs are not bitwise identical. Off by default.
            Requires ``schedule="merged"``; see :func:`~lightning_sparse.schedule.costs.hidden_densities`.

    Raises:
        ValueError: for an unknown ``error_feedback`` or a density outside ``(0, 1]``; at the start of training, for
            an unknown parameter name.

    Example::

        >>> LAGS(densities={"encoder.weight": 0.01}).densities
        {'encoder.weight': 0.01}
    """

    def __init__(
        self,
        densities: Optional[Mapping[str, float]] = None,
        error_feedback: str = "gradient",
        adaptive_density: bool = False,
    ) -> None:
        self.error_feedback = checked_name("error_feedback", error_feedback, ("gradient", "update"))
        self.feedback = ErrorFeedback(rescale_on_lr_change=error_feedback == "update")
        self.adaptive_density = adaptive_density
        self.densities = dict(densities or {})
        for name, density in self.densities.items():
            checked_density(f"densities[{name!r}]", density)

    @override
    def begin(self, layout: ModelLayout) -> None:
        for name in self.densities:
            checked_name("densities", name, (*layout.names, *layout.frozen))
