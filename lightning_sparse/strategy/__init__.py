"""Strategies for the Trainer and for Fabric that compress gradients, with checkpoints and the names of strategies."""
