"""ADAM, in the order of a step: the user's choice (correction), updates before selection (memory), steps."""
