"""The conformance kit: checks of the invariants for custom compressors. See ``docs/write-a-compressor.md``."""

from lightning_sparse.testing.invariants import Check, InvariantError, check_compressor, checks_for

__all__ = ["Check", "InvariantError", "check_compressor", "checks_for"]
