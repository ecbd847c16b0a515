"""The processes that tests run in, which the conformance kit uses, too."""

from lightning_sparse.testing.pool import Pool, RemoteError

__all__ = ["Pool", "RemoteError"]
