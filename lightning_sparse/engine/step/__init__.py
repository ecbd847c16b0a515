"""THE WAY OF ONE GRADIENT, from DDP's bucket to ``p.grad``.

1. :mod:`~lightning_sparse.engine.step.hook`: buckets become groups;
2. :mod:`~lightning_sparse.engine.step.worker`: one thread, first in, first out;
3. :mod:`~lightning_sparse.engine.step.step`: compensate, select, encode, exchange, decode; and, at the end, commit;
4. :mod:`~lightning_sparse.engine.step.selecting` asks the compressor, :mod:`~lightning_sparse.engine.step.node` cuts a
   gradient into the shares of a node's ranks, and :mod:`~lightning_sparse.engine.step.arrived` remembers what came
   where several exchanges make one step.
"""
