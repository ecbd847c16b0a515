"""Cost models of a step's stages, fitted to measurements or computed for a network."""
