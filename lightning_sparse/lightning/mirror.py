"""Import modules of this package once more, with Lightning's other name in their imports.

That is how Lightning itself makes one of its two packages from the other, but when it is built and not when it is
imported. File names and line numbers stay those of the source that is read.
"""

import re
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Optional

from typing_extensions import override

_ORIGINAL, _MIRRORED = "lightning_sparse", "lightning_sparse.lightning"
# Only what knows Lightning; of everything else there is one.
NOUNS = ("callbacks", "cli", "strategy")
_PATTERN = "|".join(NOUNS)
_RENAMED = (
    (re.compile(r"\bpytorch_lightning\b"), "lightning.pytorch"),
    (re.compile(r"\blightning_fabric\b"), "lightning.fabric"),
    (re.compile(rf"\b{_ORIGINAL}\.({_PATTERN})\b"), rf"{_MIRRORED}.\1"),
)


class Mirror(MetaPathFinder):
    """Find ``lightning_sparse.lightning.<noun>`` where ``lightning_sparse.<noun>`` is."""

    @override
    def find_spec(
        self, fullname: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
    ) -> Optional[ModuleSpec]:
        if re.match(rf"{re.escape(_MIRRORED)}\.({_PATTERN})(\.|$)", fullname) is None:
            return None
        # importlib.util.find_spec would import the package that the original is in, and with it the other Lightning.
        *folders, name = fullname.removeprefix(f"{_MIRRORED}.").split(".")
        place = Path(__file__).parents[1].joinpath(*folders)
        original = PathFinder.find_spec(".".join([_ORIGINAL, *folders, name]), [str(place)])
        if original is None or original.origin is None:
            return None
        spec = spec_from_file_location(fullname, original.origin, loader=RenamingLoader(fullname, original.origin))
        if spec is not None and spec.submodule_search_locations is not None:
            spec.submodule_search_locations = []  # whoever searches there would import the files as they are
        return spec


class RenamingLoader(SourceFileLoader):
    """Read a source file with Lightning's other name in it."""

    @override
    def get_code(self, fullname: str) -> CodeType:
        # Compiled code is cached by file name, and the cache holds the original.
        path = self.get_filename(fullname)
        return compile(renamed(self.get_data(path).decode()), path, "exec", dont_inherit=True)


def renamed(source: str) -> str:
    """Return source code for ``lightning.pytorch`` that was written for ``pytorch_lightning``.

    Example::

        >>> renamed("from pytorch_lightning import Trainer")
        'from lightning.pytorch import Trainer'
        >>> renamed("from lightning_sparse.strategy import SparseDDPStrategy")
        'from lightning_sparse.lightning.strategy import SparseDDPStrategy'
        >>> renamed("from lightning_sparse.engine import Engine")
        'from lightning_sparse.engine import Engine'
    """
    for pattern, replacement in _RENAMED:
        source = pattern.sub(replacement, source)
    return source
