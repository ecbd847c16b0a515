"""The Lightning of a command line is that of its model and data: they are imported first."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]


def import_named(words: Sequence[str]) -> None:
    """Import the modules of the model and the data that a command line names.

    What cannot be read or imported is left for Lightning's parser to refuse.
    """
    for class_path in _class_paths(words):
        with suppress(Exception):  # whatever a user's module raises, it raises again when the parser imports it
            import_module(class_path.rpartition(".")[0])


def _class_paths(words: Sequence[str]) -> Iterator[str]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(
        "--model", "--model.class_path", "--data", "--data.class_path", action="append", default=[], dest="named"
    )
    parser.add_argument("-c", "--config", action="append", default=[])
    given = parser.parse_known_args(words)[0]
    for word in given.named:
        yield from _named_by(word)
    for file in given.config:
        try:
            config = yaml.safe_load(Path(file).read_text())
        except (OSError, ValueError, yaml.YAMLError):
            continue
        if isinstance(config, dict):
            config = config.get("fit", config)
            for key in ("model", "data"):
                yield from _named_by(config.get(key))


def _named_by(value: Any) -> Iterator[str]:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = yaml.safe_load(value)
    if isinstance(value, dict):
        value = value.get("class_path")
    if isinstance(value, str):
        yield value
