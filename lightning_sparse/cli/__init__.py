"""The command line: Lightning's CLI with this package's strategy names, and two subcommands of the package."""

import os
import sys

from lightning_sparse.cli.estimate import estimate
from lightning_sparse.cli.probes import check
from lightning_sparse.removed import refuse_removed
from lightning_sparse.strategy.lightning import ArgsType, LightningCLI

_EPILOG = (
    "Two more subcommands: 'estimate' computes whether compression pays, and 'check' tests the package on these"
    " machines. See 'lightning-sparse estimate --help' and 'lightning-sparse check --help'."
)


def main(args: ArgsType = None) -> None:
    """Run ``lightning-sparse fit|validate|test|predict|estimate|check`` with ``args`` (default: ``sys.argv``)."""
    if not getattr(sys.flags, "safe_path", False) and not {"", os.getcwd()}.intersection(sys.path):
        sys.path.insert(0, os.getcwd())  # as `python -m` does: a model file is often in this folder
    words = sys.argv[1:] if args is None else args
    if isinstance(words, list) and words:
        refuse_removed(f"lightning-sparse {words[0]}", words[0], SystemExit)
        if words[0] in (commands := {"estimate": estimate, "check": check}):
            commands[words[0]](words[1:])
            return
    defaults = {}
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's variables give the number of nodes
        defaults["num_nodes"] = int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    overwrite = {"overwrite": True}  # without overwrite, the first run's config file would stop a restarted job
    LightningCLI(args=args, save_config_kwargs=overwrite, trainer_defaults=defaults, parser_kwargs={"epilog": _EPILOG})
