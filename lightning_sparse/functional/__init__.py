"""Functions of flat tensors, without state, process groups, or random numbers."""
