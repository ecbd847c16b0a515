"""MiCRO: each rank selects in a fixed partition of its own, above a threshold that is followed online.

Yoon and Oh, "MiCRO: Near-Zero Cost Gradient Sparsification for Scaling and Accelerating Distributed DNN Training",
HiPC 2023 (arXiv 2310.00967).
"""

from typing_extensions import override

from lightning_sparse.compressors.exclusive import ExclusiveSelection
from lightning_sparse.compressors.exclusive.partitions import Partitions, even_cuts
from lightning_sparse.compressors.layout import ModelLayout


class MiCRO(ExclusiveSelection):
    """Send what reaches one threshold, each rank looking in an equal part of the model.

    Partitions stay as they are cut; where the large elements lie close together, messages are padded to the count of
    the rank that finds most. :class:`~lightning_sparse.compressors.exdyna.ExDyna` cuts them anew.

    Differs from the paper, unless ``mode="paper"``, in the threshold:

    * it starts from the quantile measured in the first step, instead of ``1 / (2 sqrt(k))``, which knows nothing of the
      size of gradients and which a step of 0.5 % takes 461 steps to mend by a factor of ten;
    * it moves by a twentieth of the logarithm of the density over the one wanted, by 10 % at most, and by less where
      that makes the density swing; where the density is off by a factor of two, the quantile is measured again.

    In both modes it differs in three things. Inside the published dead band the released code tests a condition that
    always holds and so always raises the threshold; here it falls by 0.9987 below the density wanted, as plainly meant.
    A rank that finds nothing sends nothing, where the released code makes up an element so that no message is empty.
    And at least as many elements are wanted as there are ranks.

    Args:
        mode: ``"default"`` or ``"paper"``.

    Raises:
        ValueError: if the mode is unknown.

    Example::

        >>> import torch
        >>> micro = MiCRO()
        >>> micro.begin(ModelLayout(("weight",), (4,), rank=0, ranks=2, device=torch.device("cpu")))
        >>> micro.select(["weight"], [torch.tensor([0.1, -3.0, 2.0, -0.5])], counts=[2])[0].values
        tensor([-3.])
    """

    @override
    def _first_partitions(self, layout: ModelLayout) -> Partitions:
        return Partitions(edges=even_cuts(layout.numel, layout.ranks), cuts=tuple(range(layout.ranks + 1)))
