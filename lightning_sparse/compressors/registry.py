"""Look-up of objects by name, with messages for unknown names."""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar, Union

from lightning_sparse.removed import refuse_removed

Item = TypeVar("Item")
_MAX_LISTED = 20  # names in a message; a model may have thousands of parameters


def build_by_name(noun: str, base: type, table: Mapping[str, Callable[[], Item]], choice: Union[str, Item]) -> Item:
    """Build the object that ``table`` has for the name ``choice``. Return an instance of ``base`` unchanged."""
    if isinstance(choice, str):
        return table[checked_name(noun, choice, sorted(table))]()
    if not isinstance(choice, base):
        raise TypeError(
            f"{noun} must be a {base.__name__} object or a name ({', '.join(sorted(table))}), got {choice!r}"
            + ("; pass an object of this class" if isinstance(choice, type) else "")
        )
    return choice


def checked_name(noun: str, name: str, known: Sequence[str]) -> str:
    """Return ``name`` if the sequence ``known`` has the name. Otherwise raise ``ValueError``."""
    if name not in known:
        refuse_removed(f"{noun}={name!r}", name)
        raise ValueError(unknown_name(noun, name, known))
    return name


def unknown_name(noun: str, name: str, known: Iterable[str]) -> str:
    """Return the error message for a name that is not in ``known``.

    Example::

        >>> unknown_name("wire", "float23", ["float16", "float32"])
        "wire='float23' is unknown; choose one of: float16, float32 (did you mean 'float32'?)"
    """
    known = list(known)
    written = str(name).lower()
    # Spellings to look up: as written, in lower case, without "sparse_" (strategy names), with "float" for "fp".
    spellings = (str(name), written, written.removeprefix("sparse_"), written.replace("fp", "float"))
    exact = [each for each in spellings if each in known]
    near = exact or [each for spelling in spellings for each in difflib.get_close_matches(spelling, known, n=1)]
    listed = known if len(known) <= _MAX_LISTED else [*known[:_MAX_LISTED], "..."]
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"{noun}={name!r} is unknown; choose one of: {', '.join(listed)}{hint}"
