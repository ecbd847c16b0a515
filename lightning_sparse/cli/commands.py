"""The subcommands, for the Lightning that the model is of."""

import sys

from pytorch_lightning.cli import ArgsType

from lightning_sparse.cli.parser import SparseCLI
from lightning_sparse.cli.plan import plan
from lightning_sparse.cli.submit import check_step, submit

_COMMANDS = {"plan": plan, "submit": submit}
_ASK_ONLY = {"-h", "--help", "--print_config"}
_EPILOG = (
    "Two more subcommands: 'plan' predicts, for a model and a network, what each strategy's step would take;"
    " 'submit' sends a fit to a cluster. See 'lightning-sparse plan --help' and 'lightning-sparse submit --help'."
)


def run(args: ArgsType = None) -> None:
    """Run the subcommand that the arguments name, see :func:`~lightning_sparse.cli.main`."""
    words = sys.argv[1:] if args is None else args
    if isinstance(words, list) and words and words[0] in _COMMANDS:
        _COMMANDS[words[0]](words[1:])
        return
    if not isinstance(words, list) or not _ASK_ONLY.intersection(words):
        check_step()
    SparseCLI(args=args, parser_kwargs={"epilog": _EPILOG, "prog": "lightning-sparse"})
