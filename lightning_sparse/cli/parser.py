"""Lightning's command line: a wrong value and an unknown strategy are refused in one sentence."""

import argparse
import inspect
import os
from dataclasses import is_dataclass
from typing import Any, NoReturn, Optional

from jsonargparse import DefaultHelpFormatter, Namespace
from jsonargparse._typehints import ActionTypeHint
from typing_extensions import override

from lightning_sparse import callbacks
from lightning_sparse.compressors.registry import unknown_name
from lightning_sparse.strategy.lightning import ArgsType, LightningArgumentParser, LightningCLI, StrategyRegistry
from lightning_sparse.strategy.names import meant_by, systems

for _name in callbacks.__all__:
    getattr(callbacks, _name)  # help and short names know what has been imported


class PublicHelp(DefaultHelpFormatter):
    """Lightning's help, with the strategy names of this package and without classes that are not for users."""

    @override
    def _expand_help(self, action: argparse.Action) -> str:
        parts = super()._expand_help(action).split(", ")
        # A class that is not for users lies deeper.
        public = [part for part in parts if not part.startswith("lightning_sparse.") or part.count(".") < 3]
        text = ", ".join(public)
        if action.dest == "trainer.strategy":
            text += f". Of lightning_sparse: {', '.join(system.name for system in systems())}"
        return text


class SentenceParser(LightningArgumentParser):
    """Lightning's parser; it shows no usage of hundreds of lines, and says which class refuses what."""

    _kind: Optional[type] = None
    _said = ""  # by the parser of the innermost class

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": PublicHelp, **kwargs})

    @override
    def add_class_arguments(self, theclass: Any, nested_key: Optional[str] = None, *args: Any, **kwargs: Any) -> Any:
        if nested_key is None:
            self._kind = theclass
        added = super().add_class_arguments(theclass, nested_key, *args, **kwargs)
        for action in self._actions:
            if type(action) is ActionTypeHint:
                action.__class__ = _Checked
        return added

    @override
    def print_usage(self, file: Any = None) -> None:
        print(f"usage: {self.prog.replace(' [options]', '')} [--config FILE] [--KEY VALUE ...]", file=file)

    @override
    def error(self, message: str, *cause: Any, **named_cause: Any) -> NoReturn:
        if not SentenceParser._said or SentenceParser._said not in message:
            SentenceParser._said = message if self._kind is None else f"{self._kind.__name__}: {message}"
        super().error(SentenceParser._said, *cause, **named_cause)


class _Checked(ActionTypeHint):
    """An argument that refuses a value of another type in one sentence, where no class has to be told of."""

    def _check_type_(self, value: Any, **parsing: Any) -> Any:
        try:
            return super()._check_type_(value, **parsing)
        except TypeError as error:
            if self.is_subclass_typehint(self, all_subtypes=False, also_lists=True):
                raise
            kind = inspect.formatannotation(self._typehint)
            told = " ".join((self.help or "").replace("``", "").split()).partition(". ")[0].rstrip(".")
            raise TypeError(f"{self.dest}={value} must be {kind}{told and f': {told}'}") from error


class _NameWithArguments(_Checked):
    """The Trainer's strategy: arguments beside a registered name stand for those of its class."""

    def _check_type_(self, value: Any, **parsing: Any) -> Any:
        is_whole = isinstance(value, str) or (isinstance(value, dict) and "class_path" in value)
        name = None if is_whole or not parsing.get("cfg") else parsing["cfg"].get(self.dest)
        if isinstance(name, str) and name.lower() in StrategyRegistry:
            row = StrategyRegistry[name.lower()]
            arguments = {
                name: _named(type(each), vars(each)) if is_dataclass(each) else each
                for name, each in row["init_params"].items()
            }
            parsing["cfg"] = Namespace({self.dest: _named(row["strategy"], arguments)})
        elif name == "auto":
            raise TypeError("trainer.strategy='auto' takes no arguments: name one first, such as sparse_lags")
        elif isinstance(name, str) and "." not in name:
            raise TypeError(unknown_strategy(name))
        return super()._check_type_(value, **parsing)


def _named(kind: type, arguments: dict[str, Any]) -> Namespace:
    """Return an object as it is written in a file, so that its arguments can be given one by one."""
    return Namespace(class_path=f"{kind.__module__}.{kind.__qualname__}", init_args=Namespace(arguments))


class SparseCLI(LightningCLI):
    """Lightning's command line, with this package's strategy names known to it."""

    def __init__(self, **kwargs: Any) -> None:
        # A job that SLURM puts back, or torchrun starts again, finds the file that its first run has written.
        starts_again = ("SLURM_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
        overwrites = any(int(os.environ.get(name, 0)) > 0 for name in starts_again)
        defaults: dict[str, Any] = {
            "parser_class": SentenceParser,
            "save_config_kwargs": {"overwrite": overwrites},
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
        self.parser.add_instantiator(self._built, object, subclasses=True)
        trainer = (self.config[self.config.subcommand] if "subcommand" in self.config else self.config).trainer
        if "TORCHELASTIC_RUN_ID" in os.environ and trainer.num_nodes == 1:  # it may start on any number of them
            trainer.num_nodes = int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])

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
