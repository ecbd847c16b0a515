"""Lightning's command line: its refusals are one sentence, and name what was probably meant."""

import argparse
import ast
import difflib
import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any, NoReturn, Optional

from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace
from jsonargparse._typehints import ActionTypeHint
from typing_extensions import override

import lightning_sparse  # noqa: F401  # registers the strategy names
from lightning_sparse._lightning import ArgsType, Callback, LightningArgumentParser, LightningCLI, StrategyRegistry
from lightning_sparse.callbacks import (  # noqa: F401  # help and short names know what has been imported
    adaptive_density,
    assumption_monitor,
    compression_monitor,
    momentum_correction,
    overlap_timeline,
    replica_sentinel,
)
from lightning_sparse.callbacks.requeue import RequeueAtStepEnd
from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.density import Rule
from lightning_sparse.compressors.feedback import ErrorFeedback
from lightning_sparse.engine.adam.correction import AdamCorrection
from lightning_sparse.engine.wire import Owners
from lightning_sparse.registry import unknown_name
from lightning_sparse.schedule import Schedule
from lightning_sparse.strategy.names import meant_by, systems
from lightning_sparse.strategy.trainer import SparseDDPStrategy

_UNKNOWN_KEY = re.compile(r"does not accept option '([^']+)'")
_UNKNOWN_OPTION = re.compile(r"unrecognized arguments: --([\w.]+)")
_UNKNOWN_ARGUMENT = re.compile(r"class_path '([\w.]+)':\s+Option '([^']+)' is not accepted")
_UNKNOWN_ATTRIBUTE = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'")
# The innermost of several: no other class path stands between the class and its value.
_WRONG_VALUE = re.compile(
    r"class_path '(lightning_sparse[\w.]*)':\s+Parser key \"(\w+)\":(?:(?!class_path).)*?Given value: (\S.*?)$",
    re.DOTALL | re.MULTILINE,
)
_SAID_OF_VALUE = re.compile(r"class_path 'lightning_sparse[\w.]*':\s+(\w+: \w+=.+)$", re.MULTILINE)
_SAID_OF_NAME = re.compile(r"^\s*('[\w.]+' of [\w.]+ is unknown; did you mean .+\?)$", re.MULTILINE)
_LISTED_CLASS = re.compile(r", (lightning_sparse(?:\.\w+)+)")
_BUILT_FROM_YAML = (SparseDDPStrategy, Compressor, Schedule, Callback, Rule, AdamCorrection, ErrorFeedback, Owners)


class PublicHelp(DefaultHelpFormatter):
    """Lightning's help, with the strategy names of this package and without classes that are not for users."""

    @override
    def _expand_help(self, action: argparse.Action) -> str:
        text = _LISTED_CLASS.sub(
            lambda listed: listed[0] if _is_public(listed[1]) else "", super()._expand_help(action)
        )
        if action.dest == "trainer.strategy":
            text += f". Of lightning_sparse: {', '.join(system.name for system in systems())}"
        return text


class HintingParser(LightningArgumentParser):
    """Lightning's parser; it shows no usage of hundreds of lines, and of what it refuses says what comes near."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": PublicHelp, **kwargs})

    @override
    def print_usage(self, file: Any = None) -> None:
        print(f"usage: {self.prog.replace(' [options]', '')} [--config FILE] [--KEY VALUE ...]", file=file)

    @override
    def error(self, message: str, *cause: Any, **named_cause: Any) -> NoReturn:
        said = wrong_value(message) or near_names(message, self) or message
        super().error(said, *cause, **named_cause)


class _NameWithArguments(ActionTypeHint):
    """The Trainer's strategy: arguments beside a registered name stand for those of its class."""

    def _check_type_(self, value: Any, **parsing: Any) -> Any:
        is_whole = isinstance(value, str) or (isinstance(value, dict) and "class_path" in value)
        name = None if is_whole or not parsing.get("cfg") else parsing["cfg"].get(self.dest)
        if isinstance(name, str) and name.lower() in StrategyRegistry:
            row = StrategyRegistry[name.lower()]
            kind = row["strategy"]
            named = Namespace(
                class_path=f"{kind.__module__}.{kind.__qualname__}", init_args=Namespace(row["init_params"])
            )
            parsing["cfg"] = Namespace({self.dest: named})
        elif name == "auto":
            raise TypeError("trainer.strategy='auto' takes no arguments: name one first, such as sparse_lags")
        elif isinstance(name, str) and "." not in name:
            raise TypeError(unknown_strategy(name))
        return super()._check_type_(value, **parsing)


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
    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_core_arguments_to_parser(parser)
        next(action for action in parser._actions if action.dest == "trainer.strategy").__class__ = _NameWithArguments

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        super().parse_arguments(parser, args)
        config = self.config[self.config.subcommand] if "subcommand" in self.config else self.config
        strategy = config.trainer.strategy
        if isinstance(strategy, str) and strategy != "auto" and strategy.lower() not in StrategyRegistry:
            parser.error(unknown_strategy(strategy))

    @override
    def before_instantiate_classes(self) -> None:
        for kind in _BUILT_FROM_YAML:
            self.parser.add_instantiator(self._built, kind, subclasses=True)

    def _built(self, kind: type, *args: Any, **kwargs: Any) -> Any:
        """Build an object; what a class of ours refuses is an error of the command line, without a traceback."""
        try:
            return kind(*args, **kwargs)
        except (TypeError, ValueError) as error:
            if not kind.__module__.startswith("lightning_sparse."):
                raise
            self.parser.error(f"{kind.__name__}: {error}")


def unknown_strategy(name: str) -> str:
    """Compose the message for a strategy's name that nobody has registered.

    Example::

        >>> unknown_strategy("lags").partition(" (")[2]
        "did you mean 'sparse_lags'?)"
    """
    near = meant_by(name)
    if near is not None:
        return f"trainer.strategy={name!r} is unknown (did you mean {near!r}?)"
    ours = [system.name for system in systems()]
    others = [each for each in StrategyRegistry if not each.startswith("sparse_")]
    message = unknown_name("trainer.strategy", name, [*ours, "lightning_sparse.SparseDDPStrategy", *others])
    if not name.startswith("sparse_"):
        return message
    return (
        f"{message}. If it is that of a compressor of your own, name the compressor by its class path instead:"
        " trainer.strategy.class_path: lightning_sparse.SparseDDPStrategy, init_args.compressor: mymodule.MyCompressor"
    )


def wrong_value(message: str) -> Optional[str]:
    """Return in one sentence what a parser says of a value that a class of this package does not take.

    Args:
        message: what the parser says; ``None`` is returned for anything else.
    """
    said = _SAID_OF_VALUE.findall(message)  # by the parser of a class inside another
    if said:
        return str(said[-1])
    found = _WRONG_VALUE.findall(message)
    if not found:
        return None
    path, key, text = found[-1]
    module, _, name = path.rpartition(".")
    kind = getattr(import_module(module), name)
    parameter = inspect.signature(kind).parameters.get(key)
    if parameter is None:
        return None
    try:
        kind(**{key: _literal(text)})
    except (TypeError, ValueError) as error:
        if str(error).startswith(f"{key}="):
            return f"{name}: {error}"
    kinds = inspect.formatannotation(parameter.annotation).replace("typing.", "")
    return f"{name}: {key}={text} must be {kinds}"


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def _is_public(class_path: str) -> bool:
    return class_path.replace(".lightning.", ".").count(".") <= 2


def near_names(message: str, parser: ArgumentParser) -> str:
    """Return in one line which known names are like those that a parser refuses; empty if none is.

    Args:
        message: what the parser says.
        parser: which names the keys.
    """
    keys = _UNKNOWN_KEY.findall(message) + _UNKNOWN_OPTION.findall(message)
    hints = [
        *_SAID_OF_NAME.findall(message),  # by the parser of a class inside another
        *(_hint(key, _keys(parser)) for key in keys),
        *(_hint(name, _arguments_of(path), path) for path, name in _UNKNOWN_ARGUMENT.findall(message)),
        *(
            _hint(name, _classes_of(path), path) or _hint(name, dir(sys.modules.get(path)), path)
            for path, name in _UNKNOWN_ATTRIBUTE.findall(message)
        ),
    ]
    return "; ".join(hint for hint in dict.fromkeys(hints) if hint)


def _hint(name: str, known: Iterable[str], place: str = "") -> str:
    near = difflib.get_close_matches(name, list(dict.fromkeys(known)), n=3)
    where = f" of {place}" if place else ""
    return f"{name!r}{where} is unknown; did you mean {' or '.join(map(repr, near))}?" if near else ""


def _classes_of(path: str) -> Iterator[str]:
    """Yield the names of a module's classes, those included that it imports when they are asked for."""
    module = sys.modules.get(path)
    for name in {*getattr(module, "__all__", ()), *dir(module)}:
        if isinstance(getattr(module, name, None), type):
            yield name


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
