"""The conformance kit: the invariants that our compressors keep, for those of others; see ``docs/conformance.md``."""

from lightning_sparse.testing.invariants import Check, InvariantError, check_compressor, checks_for

__all__ = ["Check", "InvariantError", "check_compressor", "checks_for"]
