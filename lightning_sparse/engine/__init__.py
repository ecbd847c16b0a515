"""ONE STEP, without Lightning: :mod:`~lightning_sparse.engine.step` is the way of a gradient.

It asks :mod:`~lightning_sparse.engine.memory` (KEPT), :mod:`~lightning_sparse.engine.wire` (WRITTEN) and
:mod:`~lightning_sparse.engine.collectives` (TRAVELS), which do not know each other;
:mod:`~lightning_sparse.engine.observe` (SEEN) stands beside. :mod:`~lightning_sparse.engine.adam` is the one optimizer
with a part before and a part after the exchange, :mod:`~lightning_sparse.engine.planner` learns which grouping is
fastest, :mod:`~lightning_sparse.engine.local_steps` hands changes of parameters to a step in the place of gradients,
and :mod:`~lightning_sparse.engine.engine` builds all of them for one model.
"""

from lightning_sparse.engine.engine import Engine

__all__ = ["Engine"]
