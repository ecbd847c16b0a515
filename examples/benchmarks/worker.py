"""One rank of the step benchmark. Started by step.py on every host; not meant to be called by hand."""

import argparse
import json
import logging
import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import WORKLOADS, BenchmarkModule
from pytorch_lightning import Callback, LightningModule, Trainer
from rows import ROWS, RegisterHook, Row

from lightning_sparse import SparseDDPStrategy

_DATA_BATCHES = 8


class StepTimes(Callback):
    """Record when each batch ended.

    Args:
        warm_up: batches left out: DDP rebuilds its buckets after the first, PowerSGD starts at the third.
    """

    def __init__(self, warm_up: int) -> None:
        self.warm_up = warm_up
        self.ends: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        """Take the time."""
        self.ends.append(time.perf_counter())

    def seconds(self, batches_per_step: int) -> list[float]:
        """Return seconds for each batch, averaged over the batches of a step."""
        ends = self.ends[self.warm_up :: batches_per_step]
        return [(end - start) / batches_per_step for start, end in zip(ends, ends[1:])]


def measure(row: Row, workload_name: str, hosts: int, steps: int, warm_up: int) -> tuple[list[float], dict[str, float]]:
    """Train for some steps and return the time of each, and the compression statistics of the last."""
    torch.manual_seed(0)
    module = BenchmarkModule(WORKLOADS[workload_name])
    times = StepTimes(warm_up * row.batches_per_step)
    callbacks = [times] if row.hook is None else [times, RegisterHook(*row.hook)]
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        max_steps=warm_up + steps + 1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **row.arguments(hosts),
    )
    trainer.fit(module, module.batches(_DATA_BATCHES))
    strategy = trainer.strategy
    stats = strategy.compression_stats() if isinstance(strategy, SparseDDPStrategy) else {}
    return times.seconds(row.batches_per_step), stats


def main() -> None:
    """Measure the rows asked for, in turn, and write what this rank saw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--rows", nargs="+", choices=ROWS, required=True)
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warm-up", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    # The group outlives every Trainer, so that all rows run in the same processes over the same connections.
    dist.init_process_group("gloo", rank=int(os.environ["NODE_RANK"]), world_size=options.hosts)
    results: dict[str, Any] = {name: {"seconds": [], "stats": {}} for name in options.rows}
    for _ in range(options.rounds):
        for name in options.rows:
            dist.barrier()
            seconds, stats = measure(ROWS[name], options.workload, options.hosts, options.steps, options.warm_up)
            results[name]["seconds"] += seconds
            results[name]["stats"] = stats
            if os.environ["NODE_RANK"] == "0":
                print(f"  {name:32s} {1e3 * sorted(seconds)[len(seconds) // 2]:8.1f} ms", flush=True)
    options.output.write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
