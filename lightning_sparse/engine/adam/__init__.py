"""ADAM: the one optimizer with a part before the exchange (the memory) and one after it (the steps)."""
