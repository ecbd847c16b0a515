"""Tables of names: a word in a yaml file, or an object, becomes an object."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar, Union, cast

Item = TypeVar("Item")
_MAX_LISTED = 20  # a model may have thousands of parameter names


class NamedTable(Generic[Item]):
    """Names of one noun and the classes that they stand for.

    Args:
        noun: what the names name, also the argument that error messages speak of.
        base: class that every object must be an instance of.
        rows: for each name, what builds the object without arguments.
    """

    def __init__(self, noun: str, base: type, rows: Mapping[str, Callable[[], Item]]) -> None:
        self._noun = noun
        self._base = base
        self._rows: dict[str, Callable[[], Item]] = dict(rows)

    def names(self) -> list[str]:
        """Return the names in alphabetical order."""
        return sorted(self._rows)

    def descriptions(self) -> dict[str, str]:
        """Return for each name the first line of its documentation."""
        return {name: (inspect.getdoc(self._rows[name]) or "").partition("\n")[0] for name in self.names()}

    def register(self, name: str, build: Callable[[], Item]) -> None:
        """Add a row.

        Raises:
            TypeError: if ``build`` is not a class of this noun.
            ValueError: if the name is taken.
        """
        if not (isinstance(build, type) and issubclass(build, self._base)):
            raise TypeError(f"{self._noun} {name!r} must be a subclass of {self._base.__name__}, got {build!r}")
        if name in self._rows:
            raise ValueError(
                f"{self._noun} {name!r} is already registered as {self._rows[name]!r}; choose another name."
                f" Taken: {', '.join(self.names())}"
            )
        self._rows[name] = cast(Callable[[], Item], build)

    def resolve(self, choice: Union[str, Item]) -> Item:
        """Build the object that a name stands for; pass an object through.

        Raises:
            ValueError: if the name is unknown.
            TypeError: if the object is not of this noun.
        """
        if isinstance(choice, str):
            return self._build(choice)
        if not isinstance(choice, self._base):
            raise TypeError(
                f"{self._noun} must be one of {', '.join(self.names())} or a {self._base.__name__} object,"
                f" got {choice!r}" + (" (a class: call it)" if isinstance(choice, type) else "")
            )
        return choice

    def _build(self, name: str) -> Item:
        if name in self._rows:
            return self._rows[name]()
        raise ValueError(unknown_name(self._noun, name, self.names()))


def one_of(noun: str, name: str, known: Sequence[str]) -> str:
    """Pass a name through.

    Raises:
        ValueError: if it is not among those known.
    """
    if name not in known:
        raise ValueError(unknown_name(noun, name, known))
    return name


def unknown_name(noun: str, name: str, known: Iterable[str]) -> str:
    """Compose the message for a name that is not in a table.

    Example::

        >>> unknown_name("wire", "float23", ["float16", "float32"])
        "wire='float23' is unknown; choose one of: float16, float32 (did you mean 'float32'?)"
    """
    known = list(known)
    near = difflib.get_close_matches(str(name), known, n=1)
    listed = known if len(known) <= _MAX_LISTED else [*known[:_MAX_LISTED], "..."]
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"{noun}={name!r} is unknown; choose one of: {', '.join(listed)}{hint}"
