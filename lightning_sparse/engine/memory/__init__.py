"""Memories, which store the residual and momentum of each parameter between steps, as flat tensors."""
