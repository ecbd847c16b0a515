"""OMGS-SGD: top-k of the gradients that travel together, laid end to end.

Shi et al., "Communication-Efficient Distributed Deep Learning with Merged Gradient Sparsification on GPUs", INFOCOM
2020. Its other half, which gradients to merge, is a schedule's (see :mod:`lightning_sparse.schedule`).
"""

from typing import ClassVar

from lightning_sparse.compressors.topk import TopK


class OMGS(TopK):
    """Send ``max(1, round(density * n))`` largest magnitudes of all layers that travel together, ``n`` elements in all.

    Layers of a bucket compete, so the result depends on the schedule: of layers alone it is layer-wise top-k, of one
    bucket top-k of the whole model. Differs from the paper, or from what its authors released, in this:

    * Residuals are kept by parameter and not by bucket, so that buckets can be planned anew without losing anything.
    * Values and indices of a bucket travel as one message and not as two.
    * A layer that a rank did not use in a step does not compete there. It would go on winning places for nothing.

    Takes 8 bytes an element more than layer-wise top-k, to lay a bucket's gradients end to end and add up their means.

    Example::

        >>> import torch
        >>> OMGS().select(["weight", "bias"], [torch.tensor([0.1, -3.0, 2.0, -0.5])], counts=[2])[0].values
        tensor([-3.,  2.])
    """

    selects_across_bucket: ClassVar[bool] = True
    has_density_by_parameter: ClassVar[bool] = False
