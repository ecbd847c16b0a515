"""The path of a gradient, from backward to the mean in ``p.grad``: reducer, backward, step, selecting, topology."""
