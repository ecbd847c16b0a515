"""Train a workload in one of the ways that the rows describe."""

import logging
import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core import rank_zero
from models import BenchmarkModule
from pytorch_lightning import Callback, Trainer
from rows import RegisterHook, Row

RANKS = 2  # of this machine alone
_DATA_BATCHES = 8  # trained on in turn
_TIMEOUT_SECONDS = 300


def begin_rank(hosts: int) -> None:
    """Make this process one rank of as many as there are hosts, quiet but for what strategies say of themselves.

    The group outlives every Trainer, so that all rows run in the same processes over the same connections.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    logging.basicConfig(format="%(message)s")
    rank_zero.log.setLevel(logging.INFO)
    dist.init_process_group("gloo", rank=int(os.environ["NODE_RANK"]), world_size=hosts)


def trainer_of(row: Row, hosts: int, **arguments: Any) -> Trainer:
    """Return a Trainer on CPU, with one process on each host, that says and writes nothing unless the row asks for it.

    Args:
        row: how to train.
        hosts: number of hosts.
        **arguments: of the Trainer; callbacks are added to those of the row.
    """
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    asked: dict[str, Any] = {**quiet, **arguments, **row.arguments(hosts)}
    hooks = [] if row.hook is None else [RegisterHook(*row.hook)]
    asked["callbacks"] = [*arguments.get("callbacks", ()), *hooks, *row.callbacks()]
    return Trainer(accelerator="cpu", devices=1, max_epochs=-1, use_distributed_sampler=False, **asked)


def train(row: Row, module: BenchmarkModule, hosts: int, steps: int, callbacks: Sequence[Callback]) -> Trainer:
    """Train for a number of optimizer steps.

    Args:
        row: how.
        module: what.
        hosts: number of hosts.
        steps: number of steps.
        callbacks: what watches.

    Returns:
        the Trainer, after training.
    """
    trainer = trainer_of(row, hosts, max_steps=steps, callbacks=callbacks)
    if row.optimizer is not None:
        module.build_optimizer = row.optimizer
    trainer.fit(module, module.batches(_DATA_BATCHES))
    return trainer


def on_each_rank(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call a function in :data:`RANKS` fresh processes that form a group over loopback; return what it returns."""
    # The server imports Lightning once; a process forked from it is as fresh as one that is started, and faster there.
    # It would not find what lies in this folder.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytorch_lightning"])
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(RANKS, mp_context=context) as ranks:
        given = (f"file://{folder}/store", function, *arguments)
        futures = [ranks.submit(_call_on_rank, rank, *given) for rank in range(RANKS)]
        return [future.result(_TIMEOUT_SECONDS) for future in futures]


def _call_on_rank(rank: int, store: str, function: Callable[..., Any], *arguments: Any) -> Any:
    os.environ.update({"NODE_RANK": str(rank), "LOCAL_RANK": "0"})
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    result = function(*arguments)
    dist.barrier()
    dist.destroy_process_group()
    return result
