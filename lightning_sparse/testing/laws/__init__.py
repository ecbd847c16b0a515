"""The laws that hold for every compressor under every schedule, in real processes.

Four of them follow from what a compressor declares: mass is conserved where a residual is kept, density 1 is DDP where
everything can be sent, replicas are identical unless they are said to diverge, and no schedule changes a bit unless the
selection is said to depend on it.
"""
