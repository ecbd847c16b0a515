"""OMGS-SGD: top-k of the flattened gradients of a bucket.

Shi et al., "Communication-Efficient Distributed Deep Learning with Merged Gradient Sparsification on GPUs", INFOCOM
2020. The other half of the paper, the choice of buckets, is a schedule (see :mod:`lightning_sparse.schedule`).
"""

from typing import ClassVar

from lightning_sparse.compressors.topk import TopK


class OMGS(TopK):
    """Send the ``max(1, round(density * n))`` largest magnitudes of every bucket, which has ``n`` elements.

    Layers of a bucket compete, so the result depends on the schedule. With a layer per bucket this is layer-wise top-k,
    and with a single bucket top-k of the whole model. Differences from the paper or the released code:

    * Residuals are stored per parameter, so that a change of buckets loses no residual.
    * Values and indices of a bucket are a single message instead of two.
    * The residual of a layer that a rank did not use in a step competes only with ``levels=2``.

    The method needs more memory than layer-wise top-k: 8 bytes per element of a bucket, for the gradients and means.

    Example::

        >>> import torch
        >>> OMGS().select(["weight", "bias"], [torch.tensor([0.1, -3.0, 2.0, -0.5])], counts=[2])[0].values
        tensor([-3.,  2.])
    """

    selects_across_bucket: ClassVar[bool] = True
    has_density_by_parameter: ClassVar[bool] = False
