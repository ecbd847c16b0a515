"""Train a workload in one of the ways that the rows describe."""

from collections.abc import Sequence

from models import BenchmarkModule
from pytorch_lightning import Callback, Trainer
from rows import RegisterHook, Row

_DATA_BATCHES = 8  # trained on in turn


def train(row: Row, module: BenchmarkModule, hosts: int, steps: int, callbacks: Sequence[Callback]) -> Trainer:
    """Train for a number of optimizer steps, on CPU, with one process on each host.

    Args:
        row: how.
        module: what.
        hosts: number of hosts.
        steps: number of steps.
        callbacks: what watches.

    Returns:
        the Trainer, after training.
    """
    hooks = [] if row.hook is None else [RegisterHook(*row.hook)]
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        max_steps=steps,
        callbacks=[*callbacks, *hooks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **row.arguments(hosts),
    )
    trainer.fit(module, module.batches(_DATA_BATCHES))
    return trainer
