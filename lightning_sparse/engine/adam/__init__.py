"""Corrected Adam: the user's settings (correction), updates before selection (memory), and optimizer steps (steps)."""
