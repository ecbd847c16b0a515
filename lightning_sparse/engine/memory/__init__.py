"""Memories, which store residuals and momenta: a flat tensor per parameter name."""
