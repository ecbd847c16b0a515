"""Deep Gradient Compression: top-k after momentum, with local clipping and a warm-up of the density.

Lin, Han, Mao, Wang and Dally, "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed
Training", ICLR 2018 (arXiv 1712.01887).
"""

from typing import ClassVar, Optional, Union

from lightning_sparse.compressors.base import FROM_OPTIMIZER, ErrorFeedback
from lightning_sparse.compressors.topk import TopK


class DGC(TopK):
    """Send the largest elements of every parameter's velocity: momentum is accumulated before selection.

    Selection is exact. The paper estimates a threshold from a sample of each layer, which is no faster here (see
    :mod:`lightning_sparse.compressors.topk`). As published, the method has momentum correction, optional momentum
    factor masking, and clipping of each local gradient to ``clip_norm / sqrt(world_size)`` before accumulation (the
    released code lacks ``sqrt(world_size)``). The warm-up has four stages, for example 25 %, 6.3 %, 1.6 % and 0.4 % for
    a target of 0.1 %. In the paper, a stage is an epoch (``warmup_steps=4 * steps_per_epoch``). By default, all stages
    together take a tenth of the training. With Adam and AdamW the optimizer correction replaces the momentum.

    Args:
        momentum: ``"optimizer"`` applies the (Nesterov) momentum of the SGD optimizer before selection instead of in
            the optimizer. Use a number for an optimizer without momentum, ``None`` for no momentum correction.
        nesterov: whether a ``momentum`` given as a number is Nesterov's.
        masks_momentum: whether the momentum of a sent element is reset to zero (momentum factor masking), as
            published. Off by default: during warm-up most momentum would be reset in every step, and the accuracy of a
            short training would be below DDP.
        clip_norm: largest norm of the mean gradient, or ``None``. Clipping needs the gradient of the whole model, so
            the exchange no longer overlaps with backward.

    Raises:
        ValueError: for a momentum outside ``[0, 1)``, or a ``clip_norm`` that is not positive.
    """

    default_warmup_steps: ClassVar[Union[int, float]] = 0.1

    def __init__(
        self,
        momentum: Union[float, str, None] = FROM_OPTIMIZER,
        nesterov: bool = False,
        masks_momentum: bool = False,
        clip_norm: Optional[float] = None,
    ) -> None:
        self.feedback = ErrorFeedback(
            momentum=momentum, nesterov=nesterov, masks_momentum=masks_momentum, clip_norm=clip_norm
        ).checked()
