"""Memories store the residual and momentum of each parameter, as flat tensors by parameter name."""
