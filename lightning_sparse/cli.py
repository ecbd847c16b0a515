"""The command line: Lightning's own, with this package's strategy names known to it, and the planner."""

import sys

from pytorch_lightning.cli import ArgsType, LightningCLI

import lightning_sparse  # noqa: F401  # registers the strategy names
from lightning_sparse.plan import plan

_EPILOG = (
    "One more subcommand: 'plan' predicts, for a model and a network, what each strategy's step would take;"
    " see 'lightning-sparse plan --help'."
)


def main(args: ArgsType = None) -> None:
    """Run ``lightning-sparse fit|validate|test|predict|plan`` for a model and data module given by class path.

    Args:
        args: what to parse instead of the process's arguments.
    """
    words = sys.argv[1:] if args is None else args
    if isinstance(words, list) and words[:1] == ["plan"]:
        plan(words[1:])
    else:
        LightningCLI(args=args, parser_kwargs={"epilog": _EPILOG})
