"""Lightning's command line, whose refusals end with the name that was probably meant."""

import difflib
import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from jsonargparse import ArgumentParser
from pytorch_lightning.cli import ArgsType, LightningArgumentParser, LightningCLI
from pytorch_lightning.strategies import StrategyRegistry
from typing_extensions import override

import lightning_sparse  # noqa: F401  # registers the strategy names
from lightning_sparse.callbacks import RequeueAtStepEnd
from lightning_sparse.registry import unknown_name
from lightning_sparse.strategy.names import systems

_UNKNOWN_KEY = re.compile(r"does not accept option '([^']+)'")
_UNKNOWN_OPTION = re.compile(r"unrecognized arguments: --([\w.]+)")
_UNKNOWN_ARGUMENT = re.compile(r"class_path '([\w.]+)':\s+Option '([^']+)' is not accepted")
_UNKNOWN_ATTRIBUTE = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'")


class HintingParser(LightningArgumentParser):
    """Lightning's parser; of a key, argument or class that it does not know it also says what comes near."""

    @override
    def error(self, message: str, *cause: Any, **named_cause: Any) -> NoReturn:
        super().error(message + near_names(message, self), *cause, **named_cause)


class SparseCLI(LightningCLI):
    """Lightning's command line with this package's strategy names known to it, and SLURM's signals answered.

    Args:
        **kwargs: as for :class:`~pytorch_lightning.cli.LightningCLI`.
    """

    def __init__(self, **kwargs: Any) -> None:
        # A job that SLURM puts back into the queue finds the file that its first run has written.
        overwrites = int(os.environ.get("SLURM_RESTART_COUNT", 0)) > 0
        defaults: dict[str, Any] = {
            "parser_class": HintingParser,
            "save_config_kwargs": {"overwrite": overwrites},
            "trainer_defaults": {"callbacks": [RequeueAtStepEnd()]},
        }
        super().__init__(**{**defaults, **kwargs})

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        super().parse_arguments(parser, args)
        config = self.config[self.config.subcommand] if "subcommand" in self.config else self.config
        strategy = config.trainer.strategy
        if isinstance(strategy, str) and strategy.startswith("sparse") and strategy not in StrategyRegistry:
            parser.error(unknown_name("trainer.strategy", strategy, [system.name for system in systems()]))


def near_names(message: str, parser: ArgumentParser) -> str:
    """Return the end of a parser's message: which known names are like the one refused; empty if none is.

    Args:
        message: what the parser says.
        parser: which names the keys.
    """
    hints = [
        *(_hint(key, _keys(parser)) for key in _UNKNOWN_KEY.findall(message) + _UNKNOWN_OPTION.findall(message)),
        *(_hint(name, _arguments_of(path)) for path, name in _UNKNOWN_ARGUMENT.findall(message)),
        *(_hint(name, dir(sys.modules.get(path))) for path, name in _UNKNOWN_ATTRIBUTE.findall(message)),
    ]
    return "".join(f"\n{hint}" for hint in dict.fromkeys(hints) if hint)


def _hint(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(dict.fromkeys(known)), n=3)
    return f"{name!r} is unknown; did you mean {' or '.join(map(repr, near))}?" if near else ""


def _keys(parser: Any) -> Iterator[str]:
    """Yield the dotted keys of a parser and of its subcommands."""
    for action in parser._actions:
        yield action.dest
        if isinstance(action.choices, dict):
            for nested in action.choices.values():
                yield from _keys(nested)


def _arguments_of(class_path: str) -> Iterator[str]:
    """Yield the names that the constructors of a class and of its bases take."""
    module, _, name = class_path.rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    for each in inspect.getmro(found) if isinstance(found, type) else ():
        constructor = vars(each).get("__init__")
        if inspect.isfunction(constructor):
            yield from inspect.signature(constructor).parameters
