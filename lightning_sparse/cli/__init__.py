"""The command line: Lightning's own, with this package's strategy names known to it, and the planner."""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import yaml  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from lightning_sparse.strategy.lightning import ArgsType


def main(args: "ArgsType" = None) -> None:
    """Run ``lightning-sparse fit|validate|test|predict|plan`` with ``args``, or with those of the process."""
    if not getattr(sys.flags, "safe_path", False) and not {"", os.getcwd()}.intersection(sys.path):
        sys.path.insert(0, os.getcwd())  # as `python -m` does: the model is often a file there
    words = sys.argv[1:] if args is None else args
    for class_path in _class_paths(words) if isinstance(words, list) else ():
        # The first Lightning that is imported is the one to use. What fails here, the parser refuses.
        with suppress(Exception):
            import_module(class_path.rpartition(".")[0])
    import_module(f"{__name__}.commands").run(args)


def _class_paths(words: Sequence[str]) -> Iterator[str]:
    """Yield the classes of the model and the data that a command line and its yaml files name."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    named = ("--model", "--model.class_path", "--data", "--data.class_path")
    parser.add_argument(*named, action="append", default=[], dest="named")
    parser.add_argument("-c", "--config", action="append", default=[])
    given = parser.parse_known_args(words)[0]
    texts = [f"model: {word}" for word in given.named]
    for file in given.config:
        with suppress(OSError):
            texts.append(Path(file).read_text())
    for text in texts:
        with suppress(Exception):
            config = yaml.safe_load(text)
            for key in ("model", "data"):
                value = config.get("fit", config).get(key)
                yield str(value.get("class_path") if isinstance(value, dict) else value)
