"""THE WAY OF ONE GRADIENT, from DDP's bucket to ``p.grad``.

1. :mod:`~lightning_sparse.engine.step.hook`: DDP's buckets become groups; what earlier exchanges of the same optimizer
   step have brought is kept out of them.
2. :mod:`~lightning_sparse.engine.step.worker`: one thread, first in, first out; its channels record each collective.
3. :mod:`~lightning_sparse.engine.step.step`: compensate, select, encode, exchange, decode; and, at the end, commit.
4. :mod:`~lightning_sparse.engine.step.selecting` asks the compressor what is sent, and sends it part by part;
   :mod:`~lightning_sparse.engine.step.levels` says which ranks exchange what with which.
"""
