"""Which version of this package has written a configuration file."""

import re
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from packaging.version import InvalidVersion, Version

_PACKAGE = "lightning_sparse"
_WRITTEN_BY = re.compile(rf"^# {_PACKAGE}==(\S+)$", re.MULTILINE)
_OPTIONS = ("--config", "-c")
_HEAD = 4096  # characters; the versions stand at the top

HEADER = f"{_PACKAGE}=={version('lightning-sparse')}"


def newer_files(words: Sequence[str]) -> list[str]:
    """Say of each configuration file on a command line that a newer version of this package wrote it, if one did.

    Args:
        words: of the command line.

    Example::

        >>> newer_files(["fit", "--config", "nowhere.yaml"])
        []
    """
    present = Version(version("lightning-sparse"))
    return [
        f"{path} was written by {_PACKAGE} {written_by}, and this is {present}: it may ask for what came later."
        f" Upgrade with: pip install 'lightning-sparse>={written_by}'"
        for path in _config_files(words)
        if (written_by := _written_by(path)) is not None and written_by > present
    ]


def _config_files(words: Sequence[str]) -> Iterator[Path]:
    for word, following in zip(words, (*words[1:], "")):
        option, _, value = word.partition("=")
        if option in _OPTIONS:
            yield Path(value or following)


def _written_by(path: Path) -> "Version | None":
    try:
        with path.open() as file:
            found = _WRITTEN_BY.search(file.read(_HEAD))
        return None if found is None else Version(found[1])
    except (OSError, UnicodeDecodeError, InvalidVersion):
        return None
