"""The device that tests run on: the first GPU where there is one, shared by all ranks, and the CPU elsewhere."""

import os
from typing import Any

import torch
from torch import Tensor

_VARIABLE = "LIGHTNING_SPARSE_TEST_DEVICE"


def _chosen() -> torch.device:
    kind = os.environ.get(_VARIABLE) or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"{_VARIABLE}={kind!r} must be 'cpu' or 'cuda'; leave it out for a GPU where there is one")
    if kind == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"{_VARIABLE}='cuda', but torch finds no GPU here; set it to 'cpu', or leave it out")
    # With its index, as parameters report it.
    return torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")


DEVICE = _chosen()


def moved(value: Any, device: "torch.device | str") -> Any:
    """Return a value with the tensors in it on a device, through tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: moved(each, device) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(moved(each, device) for each in value)
    if isinstance(value, (tuple, list)):
        return type(value)(moved(each, device) for each in value)
    return value
