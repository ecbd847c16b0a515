"""Memories: what is KEPT because it has not been sent yet, a flat tensor for each parameter name."""
