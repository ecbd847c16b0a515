"""Equality to the bit of nested values."""

from typing import Any

from torch import Tensor


def differences(one: Any, other: Any, place: str = "") -> list[str]:
    """Return the places at which two values differ: tensors to the bit, dictionaries and sequences entry by entry."""
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
    """Fail with the places at which two values differ."""
    found = differences(one, other)
    assert not found, "\n".join(found)
