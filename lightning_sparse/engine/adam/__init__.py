"""The correction of Adam: user settings (correction), updates before selection (memory), optimizer steps (steps)."""
