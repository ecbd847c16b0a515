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
    """

    rebalances: ClassVar[bool] = False
