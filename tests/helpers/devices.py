"""The device that tests run on, and marks for tests of one device."""

import pytest

from lightning_sparse.testing.tensors import DEVICE, moved

devices = pytest.mark.parametrize("device", ["cpu"] if DEVICE.type == "cpu" else ["cpu", "cuda"])
needs_cuda = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")

__all__ = ["DEVICE", "devices", "moved", "needs_cuda"]
