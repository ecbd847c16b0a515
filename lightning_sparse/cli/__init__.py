"""The command line: Lightning's own, with this package's strategy names known to it, the planner, and SLURM."""

import os
import sys

from pytorch_lightning.cli import ArgsType

from lightning_sparse.cli.parser import SparseCLI
from lightning_sparse.cli.plan import plan
from lightning_sparse.cli.submit import check_step, submit

_COMMANDS = {"plan": plan, "submit": submit}
_ASK_ONLY = {"-h", "--help", "--print_config"}
_EPILOG = (
    "Two more subcommands: 'plan' predicts, for a model and a network, what each strategy's step would take;"
    " 'submit' sends a fit to SLURM. See 'lightning-sparse plan --help' and 'lightning-sparse submit --help'."
)


def main(args: ArgsType = None) -> None:
    """Run ``lightning-sparse fit|validate|test|predict|plan|submit`` for a model and data module given by class path.

    Args:
        args: what to parse instead of the process's arguments.
    """
    words = sys.argv[1:] if args is None else args
    if not getattr(sys.flags, "safe_path", False) and not {"", os.getcwd()}.intersection(sys.path):
        sys.path.insert(0, os.getcwd())  # as `python -m` does: the model is often a file there
    if isinstance(words, list) and words and words[0] in _COMMANDS:
        _COMMANDS[words[0]](words[1:])
        return
    if not isinstance(words, list) or not _ASK_ONLY.intersection(words):
        check_step()
    SparseCLI(args=args, parser_kwargs={"epilog": _EPILOG, "prog": "lightning-sparse"})
