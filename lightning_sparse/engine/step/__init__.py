"""THE WAY OF ONE GRADIENT, from backward to the mean in ``p.grad``: exchange, worker, step, selecting, levels."""
