"""Tables of names: a word in a yaml file, or an object, becomes an object."""

import difflib
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Generic, Optional, TypeVar, Union

from lightning_sparse.registry.installed import InstalledRow, checked_class, installed_rows

Item = TypeVar("Item")
_MAX_LISTED = 20  # a model may have thousands of parameter names


class NamedTable(Generic[Item]):
    """Names of one noun and the classes that they stand for.

    Args:
        noun: what the names name, also the argument that error messages speak of.
        base: class that every object must be an instance of.
        rows: for each name, what builds the object without arguments.
        group: of the entry points by which other packages bring rows; ``None`` if they cannot. They are looked up when
            somebody first asks for names, and imported when their own are used.
        former: for names that are no longer understood, the ones that took their place.
    """

    def __init__(
        self,
        noun: str,
        base: type,
        rows: Mapping[str, Callable[[], Item]],
        group: Optional[str] = None,
        former: Mapping[str, str] = {},
    ) -> None:
        self._noun = noun
        self._base = base
        self._own = rows
        self._group = group
        self._former = former
        self._listeners: list[Callable[[str, str], None]] = []

    @cached_property
    def _rows(self) -> dict[str, Callable[[], Item]]:
        rows: dict[str, Callable[[], Any]] = dict(self._own)
        found = {} if self._group is None else installed_rows(self._noun, self._base, self._group)
        for name, row in found.items():
            if name in rows:
                warnings.warn(
                    f"{self._noun} {name!r} ({row.origin}) is left out: {rows[name]!r} has that name", stacklevel=2
                )
            else:
                rows[name] = row
        return rows

    def names(self) -> list[str]:
        """Return the names in alphabetical order."""
        return sorted(self._rows)

    def descriptions(self) -> dict[str, str]:
        """Return for each name the first line of its documentation, or which package it comes from."""
        return {name: _description(row) for name, row in self._rows.items()}

    def announce(self, tell: Callable[[str, str], None]) -> None:
        """Tell of every name and its description: of those there are, and of each that is registered later.

        Args:
            tell: may refuse a name with a ``ValueError``.
        """
        for name, description in self.descriptions().items():
            try:
                tell(name, description)
            except ValueError as error:
                row = self._rows[name]
                if not isinstance(row, InstalledRow):
                    raise
                warnings.warn(f"{self._noun} {name!r} ({row.origin}) is left out: {error}", stacklevel=2)
                del self._rows[name]
        self._listeners.append(tell)

    def register(self, name: str, build: Callable[[], Item]) -> None:
        """Add a row.

        Raises:
            TypeError: if ``build`` is not a class of this noun.
            ValueError: if the name is taken.
        """
        row = checked_class(f"{self._noun} {name!r}", self._base, build)
        known = self._rows.get(name)
        if known is None:
            for tell in self._listeners:
                tell(name, _description(row))
        elif not (isinstance(known, InstalledRow) and known.is_by_the_author_of(row)):
            taken_by = known.origin if isinstance(known, InstalledRow) else repr(known)
            raise ValueError(
                f"{self._noun} {name!r} is already registered as {taken_by}; choose another name."
                f" Taken: {', '.join(self.names())}"
            )
        self._rows[name] = row

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
        if name in self._former:
            present = self._former[name]
            raise ValueError(f"{self._noun}={name!r} is called {present!r} now: use {self._noun}={present!r}")
        message = unknown_name(self._noun, name, self.names())
        if self._group is not None:
            message += (
                f". A {self._noun} of your own has a name once its module has been imported; by its class path, such as"
                f" mymodule.My{self._noun.capitalize()}, a yaml file finds it without"
            )
        raise ValueError(message)


def _description(row: Callable[[], Any]) -> str:
    return row.origin if isinstance(row, InstalledRow) else (inspect.getdoc(row) or "").partition("\n")[0]


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
