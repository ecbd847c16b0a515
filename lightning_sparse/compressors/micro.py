"""MiCRO: each rank selects in a fixed partition of its own, above a threshold that is followed online.

Yoon and Oh, "MiCRO: Near-Zero Cost Gradient Sparsification for Scaling and Accelerating Distributed DNN Training",
HiPC 2023 (arXiv 2310.00967).
"""

from typing import ClassVar

from lightning_sparse.compressors.exdyna import ExDyna


class MiCRO(ExDyna):
    """Send what reaches one threshold, each rank looking in an equal part of the model.

    :class:`~lightning_sparse.compressors.ExDyna` with partitions that stay as they are cut first. Where the large
    elements lie close together, messages are padded to the count of the rank that finds most.

    Example::

        >>> import torch
        >>> from lightning_sparse import ModelLayout
        >>> micro = MiCRO()
        >>> micro.begin(ModelLayout(("weight",), (4,), rank=0, ranks=2, device=torch.device("cpu")))
        >>> micro.select(["weight"], [torch.tensor([0.1, -3.0, 2.0, -0.5])], counts=[2])[0].values
        tensor([-3.])
    """

    rebalances: ClassVar[bool] = False
