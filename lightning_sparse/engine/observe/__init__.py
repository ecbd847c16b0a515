"""What is SEEN of a step, gathered beside it: nothing here changes a value, or waits for a device unasked."""
