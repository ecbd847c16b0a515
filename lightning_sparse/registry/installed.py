"""Rows of a table of names that other packages bring, by entry points in their metadata."""

from collections import defaultdict
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any


class InstalledRow:
    """A row of another package, whose class is imported when somebody uses the name.

    Args:
        noun: what the name names.
        base: class that the other one must be a subclass of.
        entries: the entry points with this name; of several, none can be chosen.
    """

    def __init__(self, noun: str, base: type, entries: Sequence[EntryPoint]) -> None:
        self._noun = noun
        self._base = base
        self._entries = entries

    @property
    def origin(self) -> str:
        """Origin of the row.

        Example::

            >>> InstalledRow("compressor", object, [EntryPoint("mine", "my.module:Mine", "group")]).origin
            "'my.module:Mine' of a package without metadata"
        """
        return " and ".join(f"{entry.value!r} of {_package_of(entry)}" for entry in self._entries)

    def is_by_the_author_of(self, build: type) -> bool:
        """Return whether a class comes from the same top-level module as the row."""
        return any(_top_level(entry.value) == _top_level(build.__module__) for entry in self._entries)

    def __call__(self) -> Any:
        """Import the class and build an object.

        Raises:
            ValueError: if several packages bring the name.
            ImportError: if the class cannot be imported.
            TypeError: if it is not a class of the noun.
        """
        entry = self._entries[0]
        if len(self._entries) > 1:
            raise ValueError(
                f"{self._noun} {entry.name!r} is brought by more than one package: {self.origin}; uninstall all but"
                " one, or pass an object instead of the name"
            )
        try:
            found = entry.load()
        except Exception as error:  # whatever another package raises while it is imported
            raise ImportError(
                f"{self._noun} {entry.name!r} cannot be imported from {self.origin}: {type(error).__name__}: {error};"
                " upgrade or uninstall that package"
            ) from error
        return checked_class(f"{self._noun} {entry.name!r} ({self.origin})", self._base, found)()


def installed_rows(noun: str, base: type, group: str) -> dict[str, InstalledRow]:
    """Find the rows that installed packages bring, without importing any of them.

    Args:
        noun: what the names name.
        base: class that those of the rows must be subclasses of.
        group: of the entry points: each is a name and a class, ``name = module:Class``.
    """
    entries: defaultdict[str, list[EntryPoint]] = defaultdict(list)
    for entry in entry_points(group=group):
        entries[entry.name].append(entry)
    return {name: InstalledRow(noun, base, claims) for name, claims in entries.items()}


def checked_class(subject: str, base: type, build: Any) -> type:
    """Pass a class through.

    Raises:
        TypeError: if it is not a subclass of ``base``; the message begins with ``subject``.
    """
    if not (isinstance(build, type) and issubclass(build, base)):
        raise TypeError(f"{subject} must be a subclass of {base.__name__}, got {build!r}")
    return build


def _package_of(entry: EntryPoint) -> str:
    if entry.dist is None:
        return "a package without metadata"
    return f"the package {entry.dist.name!r} {entry.dist.version}"


def _top_level(module: str) -> str:
    return module.partition(":")[0].partition(".")[0]
