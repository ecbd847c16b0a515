"""PLANNING: which grouping of gradients is fastest, learned from finished steps."""
