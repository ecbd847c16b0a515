"""Which gradients travel together: exact, greedy and simulated answers to one problem."""
