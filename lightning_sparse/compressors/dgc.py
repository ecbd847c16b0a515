"""Deep Gradient Compression: top-k with momentum before it, local clipping and a warm-up of the density.

Lin, Han, Mao, Wang and Dally, "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed
Training", ICLR 2018 (arXiv 1712.01887).
"""

from typing import ClassVar, Optional, Union

from lightning_sparse.compressors.base import FROM_OPTIMIZER, ErrorFeedback
from lightning_sparse.compressors.topk import TopK


class DGC(TopK):
    """Send the largest velocities of every parameter: momentum is accumulated before selection.

    Selection is exact, where the paper reads a threshold off a sample of each layer: it costs no more (see
    :mod:`lightning_sparse.functional.topk`), and nothing is cut off in the order of indices. The rest is as published:
    momentum correction, momentum factor masking if asked for, clipping of each rank's gradient at ``clip_norm /
    sqrt(ranks)`` before it is accumulated (the released code left out the factor), and a density that falls over four
    epochs, to 0.1 % as 25 %, 6.3 %, 1.6 %, 0.4 %, 0.1 %. In a training of known length it falls over a tenth of the
    steps where that is less than four epochs, unless ``warmup_epochs`` is given. With Adam and AdamW the optimizer's
    correction takes the place of the momentum.

    Args:
        momentum: ``"optimizer"`` takes it, Nesterov's or not, over from the SGD optimizer, whose steps are made
            without; a number is for an optimizer without momentum; ``None`` for no correction.
        nesterov: whether a ``momentum`` given as a number is Nesterov's.
        masks_momentum: whether a sent element's momentum starts again from zero (momentum factor masking), as
            published. Not by default: while the density falls it takes most elements' momentum in every step, and a
            short training ends below DDP.
        clip_norm: largest norm of the mean gradient; ``None`` not to clip. The whole gradient has to be known first, so
            the exchange no longer overlaps with backward.

    Raises:
        ValueError: for a momentum outside ``[0, 1)``, or a ``clip_norm`` that is not positive.
    """

    default_warmup_epochs: ClassVar[int] = 4

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
