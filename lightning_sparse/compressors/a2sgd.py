"""A2SGD: each rank sends two averages of the whole gradient.

Bhattacharya, Yu and Chowdhury, "O(1) Communication for Distributed SGD through Two-Level Gradient Averaging", CLUSTER
2021 (arXiv 2006.07405).
"""

from collections.abc import Sequence
from typing import ClassVar, Optional

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.base import Compressor, ErrorFeedback, Gather, ModelLayout, checked_count
from lightning_sparse.compressors.selection import Selection
from lightning_sparse.functional.elements import round_to
from lightning_sparse.functional.reductions import shift_by_sign, sign_totals


class A2SGD(Compressor):
    """Send two numbers a step: the mean of all positive gradient elements of the model, and of all negative elements.

    From the local gradient ``g``, a rank computes ``mu+`` and ``mu-``, the mean magnitudes of positive and negative
    elements. ``M+`` and ``M-`` are the means of these numbers over ranks. The rank then applies
    ``g + (M+ - mu+) * [g > 0] - (M- - mu-) * [g < 0]``. A non-finite element on any rank makes all updates non-finite.

    **Replicas diverge**, because every rank follows the signs of the local gradient. As in local SGD, parameters must
    be averaged, here every ``param_sync_every`` steps. The paper does not average parameters.

    The abstract of the paper does not define some cases. Here zeros belong to neither sign and stay zero, so that
    unused rows of an embedding do not move. A sign without elements has mean 0. The means of all ranks have equal
    weight. The applied gradient contains the quantization error, so there is no residual.

    Args:
        param_sync_every: steps between averages of parameters over ranks, at least 1; ``None`` for averages only at
            validation, checkpoints and the end. Each average sends 4 bytes per element.

    Raises:
        ValueError: if ``param_sync_every`` is not a positive integer.
    """

    default_density: ClassVar[Optional[float]] = None
    wire_format: ClassVar[str] = "local"
    replicas_diverge: ClassVar[bool] = True
    feedback = ErrorFeedback(keeps_residual=False)

    def __init__(self, param_sync_every: Optional[int] = 50) -> None:
        if param_sync_every is not None:
            checked_count("param_sync_every", param_sync_every, "steps (None: only at validation, checkpoints and end)")
        self.param_sync_every = param_sync_every
        self._names: tuple[str, ...] = ()
        self._totals: dict[str, Tensor] = {}

    @override
    def begin(self, layout: ModelLayout) -> None:
        self._names = layout.names
        self._totals = {}

    @override
    def select(self, names: Sequence[str], accumulated: Sequence[Tensor], counts: Sequence[int]) -> list[Selection]:
        # Each gradient's totals are computed during backward. finish_step() adds the totals of all gradients.
        self._totals.update(zip(names, map(sign_totals, accumulated)))
        return [Selection(tensor, None, tensor.numel()) for tensor in accumulated]

    @override
    def finish_step(self, names: Sequence[str], means: Sequence[Selection], finite: Tensor, all_gather: Gather) -> None:
        local = self._local_means()
        received = all_gather(local)
        # ``local`` is rounded like the received means, so that equal gradients on all ranks give zero shifts.
        shifts = received.double().mean(dim=0) - local.double()
        above, below = shifts.where(received.isfinite().all(), torch.nan).unbind()
        # ``means`` contains the local gradient. No other code reads this gradient, so the gradient is shifted in place.
        shift_by_sign([mean.values for mean in means], above, -below)

    def _local_means(self) -> Tensor:
        # Totals are added in order of definition, so that the sum does not depend on the buckets.
        totals = [self._totals[name] for name in self._names if name in self._totals]
        self._totals = {}
        sums, counts = torch.stack(totals).sum(dim=0).unbind(dim=1)
        return round_to(sums / counts.clamp(min=1.0), torch.float32)
