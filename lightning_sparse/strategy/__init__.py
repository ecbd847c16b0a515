"""The entry points of the Trainer and of Fabric: DDP strategies whose gradients are exchanged by the engine."""
