"""The device of tests, which all ranks share (the first GPU or the CPU), and exact comparison of tensors."""

import os
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only

_KIND = os.environ.get("LIGHTNING_SPARSE_TEST_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
DEVICE = torch.device(_KIND, 0) if _KIND == "cuda" else torch.device(_KIND)  # `parameter.device` has an index


def moved(value: Any, device: "torch.device | str") -> Any:
    """Return a copy of a value with all tensors on a device. The value may nest tuples, lists and dictionaries."""
    return tree_map_only(Tensor, lambda each: each.to(device), value)


def differences(one: Any, other: Any) -> list[str]:
    """Return one line for each difference between two nested values. Tensors are compared by ``Tensor.equal``."""
    ones, others = (dict(tree_flatten_with_path(each)[0]) for each in (one, other))
    if ones.keys() != others.keys():
        return [f"{keystr(path)} is missing in one value" for path in ones.keys() ^ others.keys()]
    pairs = ((path, each, others[path]) for path, each in ones.items())
    return [f"{keystr(path)}: {each} and {other}" for path, each, other in pairs if not _equal(each, other)]


def _equal(one: Any, other: Any) -> bool:
    are_tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
    return type(one) is type(other) and (one.equal(other) if are_tensors else bool(one == other))


def assert_same(one: Any, other: Any) -> None:
    """Assert that two values are equal. The error lists all differences."""
    found = differences(one, other)
    assert not found, "\n".join(found)
