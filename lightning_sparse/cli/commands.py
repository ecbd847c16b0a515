"""The subcommands."""

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jsonargparse import Namespace
from typing_extensions import override

from lightning_sparse.cli.parser import SparseCLI
from lightning_sparse.cli.plan.command import plan
from lightning_sparse.compressors.registry import unknown_name
from lightning_sparse.removed import refuse_removed
from lightning_sparse.strategy.lightning import ArgsType, LightningArgumentParser
from lightning_sparse.strategy.submit import check_step, submit

_ASK_ONLY = {"-h", "--help", "--print_config"}
_USAGE = "%(prog)s [-h] [-c CONFIG] {fit,validate,test,predict,plan,submit} ..."
_EPILOG = (
    "Two more subcommands: 'plan' says by formula, for a size of model and a network, what each strategy's step takes;"
    " 'submit' sends a fit to a cluster. See 'lightning-sparse plan --help' and 'lightning-sparse submit --help'."
)


class _CLI(SparseCLI):
    """Lightning's subcommands, whose help shows those beside them."""

    @override
    def setup_parser(self, *arguments: Any, **named: Any) -> None:
        super().setup_parser(*arguments, **named)
        self.parser.usage = _USAGE  # earlier it would come before the usage of each subcommand


class _ParsedError(Exception):
    """Lightning has understood the arguments, and would build the model now."""


class _FitReader(SparseCLI):
    """Lightning's own parser of ``fit``, stopped before it builds anything."""

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        self._parser("fit").prog = parser.prog  # the word is this module's, and not the user's
        super().parse_arguments(parser, args)
        assert isinstance(args, list)
        raise _ParsedError(parser.parse_args(args, defaults=False)["fit"])


def _read_fit(args: Sequence[str]) -> Namespace:
    """Return what the arguments and their files say, without defaults."""
    try:
        with warnings.catch_warnings():
            # They are those of the command line, less this command's own.
            warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended")
            _FitReader(args=["fit", *args], parser_kwargs={"prog": "lightning-sparse submit"})
    except _ParsedError as parsed:
        return parsed.args[0]  # type: ignore[no-any-return]  # the one that was given
    raise AssertionError("the reader stops as soon as it has read")


_COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {"plan": plan, "submit": partial(submit, read=_read_fit)}


def run(args: ArgsType = None) -> None:
    """Run the subcommand that the arguments name, see :func:`~lightning_sparse.cli.main`."""
    words = sys.argv[1:] if args is None else args
    if isinstance(words, list) and words and words[0] in _COMMANDS:
        _COMMANDS[words[0]](words[1:])
        return
    if not isinstance(words, list) or not _ASK_ONLY.intersection(words):
        check_step()
    if isinstance(words, list) and words and not words[0].startswith("-"):
        known = [*SparseCLI.subcommands(), *_COMMANDS]
        if words[0] not in known:
            refuse_removed(f"lightning-sparse {words[0]}", words[0], SystemExit)
            argparse.ArgumentParser("lightning-sparse", _USAGE).error(unknown_name("command", words[0], known))
    _CLI(args=args, parser_kwargs={"epilog": _EPILOG, "prog": "lightning-sparse"})
