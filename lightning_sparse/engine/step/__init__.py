"""THE WAY OF ONE GRADIENT, from DDP's bucket to ``p.grad``: hook, worker, step, selecting, levels."""
