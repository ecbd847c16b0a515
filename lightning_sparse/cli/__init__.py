"""The command line: Lightning's own, with this package's strategy names known to it, the planner, and SLURM."""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from lightning_sparse.cli.door import import_named

if TYPE_CHECKING:
    from lightning_sparse._lightning import ArgsType


def main(args: "ArgsType" = None) -> None:
    """Run ``lightning-sparse fit|validate|test|predict|plan|submit`` for a model and data module given by class path.

    Both may be ``pytorch_lightning``'s or ``lightning.pytorch``'s.

    Args:
        args: what to parse instead of the process's arguments.
    """
    if not getattr(sys.flags, "safe_path", False) and not {"", os.getcwd()}.intersection(sys.path):
        sys.path.insert(0, os.getcwd())  # as `python -m` does: the model is often a file there
    words = sys.argv[1:] if args is None else args
    if isinstance(words, list):
        import_named(words)
    import_module(f"{__name__}.commands").run(args)
