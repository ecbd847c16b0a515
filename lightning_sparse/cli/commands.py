"""The subcommands."""

import argparse
import sys
from typing import Any

from typing_extensions import override

from lightning_sparse.cli.parser import SparseCLI
from lightning_sparse.cli.plan.command import plan
from lightning_sparse.cli.submit import check_step, submit
from lightning_sparse.registry import unknown_name
from lightning_sparse.strategy.lightning import ArgsType

_COMMANDS = {"plan": plan, "submit": submit}
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
            argparse.ArgumentParser("lightning-sparse", _USAGE).error(unknown_name("command", words[0], known))
    _CLI(args=args, parser_kwargs={"epilog": _EPILOG, "prog": "lightning-sparse"})
