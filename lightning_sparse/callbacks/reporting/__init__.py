"""How callbacks show what they found: numbers of all ranks, TensorBoard pages, pictures."""
