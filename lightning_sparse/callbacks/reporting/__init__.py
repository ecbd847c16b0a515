"""Reporting for callbacks: numbers of all ranks, TensorBoard pages, pictures."""
