"""A2SGD: two averages of the whole gradient travel, and nothing else.

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
from lightning_sparse.functional.reductions import shift_each_by_sign, sign_totals


class A2SGD(Compressor):
    """Send two numbers a step: the mean of all positive, and of all negative gradient elements of the model.

    A rank with gradient ``g`` and means ``mu+`` and ``mu-`` (of magnitudes) receives their means over ranks, ``M+`` and
    ``M-``, and applies ``g + (M+ - mu+) * [g > 0] - (M- - mu-) * [g < 0]``. A gradient that is not finite anywhere
    makes all that is applied not finite, on all ranks.

    **Replicas drift apart**: two numbers cannot tell which element has which sign, so every rank moves along its own
    gradient, its size corrected. As local SGD, that needs parameters averaged: by default every ``param_sync_every``
    steps, in the literal algorithm never.

    Our choices, where the paper's abstract does not say: zeros belong to neither class and stay zero, so that an
    embedding's untouched rows are not pushed; a class without elements has mean 0; ranks' means count equally, whatever
    the number of elements behind them; the error of replacing the gradient by its means is added again in the same
    step, so that nothing has to be kept.

    Args:
        param_sync_every: steps after which parameters are averaged over ranks, at least 1; ``None`` for validation,
            checkpoints and the end alone. Fewer keep replicas closer, and send more: 4 bytes an element each time.

    Raises:
        ValueError: if ``param_sync_every`` is not a whole number above 0.
    """

    default_density: ClassVar[Optional[float]] = None
    wire_format: ClassVar[str] = "local"
    replicas_diverge: ClassVar[bool] = True
    feedback = ErrorFeedback(keeps_residual=False)

    def __init__(self, param_sync_every: Optional[int] = 50) -> None:
        if param_sync_every is not None:
            checked_count("param_sync_every", param_sync_every, "steps (None: replicas drift apart for ever)")
        self.param_sync_every = param_sync_every
        self._positions: dict[str, int] = {}
        self._totals: dict[str, Tensor] = {}

    @override
    def begin(self, layout: ModelLayout) -> None:
        self._positions = layout.positions()
        self._totals = {}

    @override
    def select(self, names: Sequence[str], accumulated: Sequence[Tensor], counts: Sequence[int]) -> list[Selection]:
        # Noted now, while backward goes on, and added up when the step is over.
        self._totals.update(zip(names, map(sign_totals, accumulated)))
        return [Selection(tensor, None, tensor.numel()) for tensor in accumulated]

    @override
    def finish_step(
        self, names: Sequence[str], means: Sequence[Selection], finite: Tensor, all_gather: Gather
    ) -> Sequence[Selection]:
        local = self._local_means()
        received = all_gather(local)
        # The shift is from what was sent, so that equal gradients on all ranks are left exactly as they are.
        shifts = received.double().mean(dim=0) - local.double()
        above, below = shifts.where(received.isfinite().all(), torch.nan).unbind()
        # What has arrived is this rank's own, and nobody reads it any more: it is shifted where it is.
        shifted = shift_each_by_sign([mean.values for mean in means], above, -below)
        return [mean._replace(values=values) for mean, values in zip(means, shifted)]

    def _local_means(self) -> Tensor:
        # In the order of definition, so that no schedule changes a bit of the sum.
        totals = [self._totals[name] for name in sorted(self._totals, key=self._positions.__getitem__)]
        self._totals = {}
        sums, counts = torch.stack(totals).sum(dim=0).unbind(dim=1)
        return round_to(sums / counts.clamp(min=1.0), torch.float32)
