"""ONE STEP, from DDP's bucket to ``p.grad``.

In the order in which a gradient meets them:

1. :mod:`~lightning_sparse.engine.ddp_hook`: buckets become groups;
2. :mod:`~lightning_sparse.engine.worker`: one thread, first in, first out;
3. :mod:`~lightning_sparse.engine.step`: compensate, select, encode, exchange, decode; and, at the end, commit;
4. :mod:`~lightning_sparse.engine.memory` (KEPT), :mod:`~lightning_sparse.engine.selecting` (ask the compressor),
   :mod:`~lightning_sparse.engine.wire` (WRITTEN) and :mod:`~lightning_sparse.engine.collectives` (TRAVELS), which do
   not know each other; :mod:`~lightning_sparse.engine.observe` (SEEN) stands beside.

:mod:`~lightning_sparse.engine.engine` builds all of them for one model. Where ranks make local steps,
:mod:`~lightning_sparse.engine.rounds` stands in the place of the first. :mod:`~lightning_sparse.engine.loop` is the
optimizers' part of a step, and the door for training loops of one's own.
"""

from lightning_sparse.engine.engine import Engine

__all__ = ["Engine"]
