"""Pure functions of flat tensors: no state, no process group, no randomness that is not passed in."""
