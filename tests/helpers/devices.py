"""The device that tests run on, and marks for those that choose theirs."""

import pytest

from lightning_sparse.testing.tensors import DEVICE, moved

# For functions that need no processes, cheap enough to be tested on every device at hand.
devices = pytest.mark.parametrize("device", ["cpu"] if DEVICE.type == "cpu" else ["cpu", "cuda"])
needs_cuda = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")

__all__ = ["DEVICE", "devices", "moved", "needs_cuda"]
