"""The command line: Lightning's own, with this package's strategy names known to it."""

from pytorch_lightning.cli import ArgsType, LightningCLI

import lightning_sparse  # noqa: F401  # registers the strategy names


def main(args: ArgsType = None) -> None:
    """Run ``lightning-sparse fit|validate|test|predict`` for a model and data module given by class path.

    Args:
        args: what to parse instead of the process's arguments.
    """
    LightningCLI(args=args)
