"""Which gradients travel together: exact and simulated answers to one problem."""
