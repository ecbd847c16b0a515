"""The conformance kit: the invariants of our compressors, for those of others. See ``docs/write-a-compressor.md``."""

from lightning_sparse.testing.invariants import Check, InvariantError, check_compressor, checks_for

__all__ = ["Check", "InvariantError", "check_compressor", "checks_for"]
