"""The subcommands."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import override

from lightning_sparse.cli.parser import SparseCLI
from lightning_sparse.cli.plan.command import plan
from lightning_sparse.compressors.registry import unknown_name
from lightning_sparse.removed import refuse_removed
from lightning_sparse.strategy.lightning import ArgsType

_USAGE = "%(prog)s [-h] [-c CONFIG] {fit,validate,test,predict,plan} ..."
_EPILOG = (
    "One more subcommand: 'plan' says by formula, for a size of model and a network, what each strategy's step takes."
    " See 'lightning-sparse plan --help'."
)


class _CLI(SparseCLI):
    """Lightning's subcommands, whose help shows those beside them."""

    @override
    def setup_parser(self, *arguments: Any, **named: Any) -> None:
        super().setup_parser(*arguments, **named)
        self.parser.usage = _USAGE  # earlier it would come before the usage of each subcommand


_COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {"plan": plan}


def run(args: ArgsType = None) -> None:
    """Run the subcommand that the arguments name, see :func:`~lightning_sparse.cli.main`."""
    words = sys.argv[1:] if args is None else args
    if isinstance(words, list) and words and words[0] in _COMMANDS:
        _COMMANDS[words[0]](words[1:])
        return
    if isinstance(words, list) and words and not words[0].startswith("-"):
        known = [*SparseCLI.subcommands(), *_COMMANDS]
        if words[0] not in known:
            refuse_removed(f"lightning-sparse {words[0]}", words[0], SystemExit)
            argparse.ArgumentParser("lightning-sparse", _USAGE).error(unknown_name("command", words[0], known))
    _CLI(args=args, parser_kwargs={"epilog": _EPILOG, "prog": "lightning-sparse"})
