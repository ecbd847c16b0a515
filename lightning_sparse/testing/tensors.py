"""The device of tests, which all ranks share (the first GPU or the CPU), and exact comparison of tensors."""

import os
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_KIND = os.environ.get("LIGHTNING_SPARSE_TEST_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
DEVICE = torch.device(_KIND, 0) if _KIND == "cuda" else torch.device(_KIND)  # index 0, as in `parameter.device`


def moved(value: Any, device: "torch.device | str") -> Any:
    """Return a copy of a value with all tensors on a device. The value may nest tuples, lists and dictionaries."""
    return tree_map_only(Tensor, lambda each: each.to(device), value)


def differences(one: Any, other: Any, place: str = "") -> list[str]:
    """Return one line for each difference between two nested values. Tensors are compared by ``Tensor.equal``."""
    if type(one) is not type(other):
        return [f"{place}: {type(one).__name__} and {type(other).__name__}"]
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [f"{place}: {sorted(map(str, one))} and {sorted(map(str, other))}"]
        return [found for key in one for found in differences(one[key], other[key], f"{place}.{key}")]
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return [f"{place}: {len(one)} and {len(other)} entries"]
        pairs = enumerate(zip(one, other))
        return [found for index, pair in pairs for found in differences(*pair, f"{place}[{index}]")]
    is_same = one.equal(other) if isinstance(one, Tensor) else one == other
    return [] if is_same else [f"{place}: {one} and {other}"]


def assert_same(one: Any, other: Any) -> None:
    """Assert that two values are equal. The error lists all differences."""
    found = differences(one, other)
    assert not found, "\n".join(found)
