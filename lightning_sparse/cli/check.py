"""The command ``lightning-sparse check``: run small trainings and timings on the machines of a training."""

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from lightning_sparse.cli.estimate import COUNTS, SECONDS, read
from lightning_sparse.cli.probes import Probes


def check(args: Sequence[str]) -> None:
    """Run all checks, if necessary in new local processes. Exit with status 1 if a check has failed."""
    options = _parsed(args)
    if "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_STEP_ID" in os.environ:
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
        probes = Probes(options)
        probes.rows.run(probes.table())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.devices)))
    local = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={options.devices}"]
    try:
        torchrun([*local, "-m", "lightning_sparse", "check", *args])
    except (ChildFailedError, SignalException):
        sys.exit(1)


def _parsed(args: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("lightning-sparse check", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    devices = torch.cuda.device_count() or 1
    add("--devices", type=int, default=devices, help="number of local processes, without torchrun and srun")
    add("--time", type=float, default=60.0, help="time limit of the command in seconds, default %(default)g")
    add("--output", type=Path, help="a JSON file for the report, such as check.json")
    add("--parameters", help="trained parameters of your model, such as 124M, for advice; needs --compute")
    add("--compute", help="time of a step without communication, such as 120ms; needs --parameters")
    options = parser.parse_args(args)
    if bool(options.parameters) is not bool(options.compute):
        parser.error("--parameters and --compute need each other: pass both, or neither")
    try:
        if options.parameters:
            options.parameters = read("parameters", options.parameters, COUNTS, "124M")
            options.compute = read("compute", options.compute, SECONDS, "120ms")
    except ValueError as error:
        parser.error(str(error))
    return options
