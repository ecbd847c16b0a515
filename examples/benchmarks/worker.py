"""One rank of the step benchmark. Started by step.py on every host; not meant to be called by hand."""

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from models import WORKLOADS, BenchmarkModule, workload
from paced import PACED
from pytorch_lightning import Callback, LightningModule, Trainer
from results import Measurement, milliseconds
from rows import ROWS, Row
from training import begin_rank, train

from lightning_sparse import SparseDDPStrategy, SparseModelParallelStrategy
from lightning_sparse.schedule.costs import sent_bytes


class StepWatch(Callback):
    """Record when each batch ended, and what the host's device had transmitted by then.

    Args:
        warm_up: batches left out: DDP rebuilds its buckets after the first, PowerSGD starts at the third.
        batches_per_step: batches between two exchanges.
    """

    def __init__(self, warm_up: int, batches_per_step: int) -> None:
        self._warm_up = warm_up * batches_per_step
        self._batches_per_step = batches_per_step
        self._ends: list[float] = []
        self._transmitted: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        """Take the time."""
        self._ends.append(time.perf_counter())
        self._transmitted.append(transmitted_bytes())

    def seconds(self) -> list[float]:
        """Return seconds for each batch, averaged over the batches of a step."""
        ends = self._ends[self._warm_up :: self._batches_per_step]
        return [(end - start) / self._batches_per_step for start, end in pairwise(ends)]

    def longest(self) -> float:
        """Return the longest batch of a step, or of a round, relative to the median batch; median over them."""
        batches = [end - start for start, end in pairwise(self._ends[self._warm_up :])]
        steps = [
            batches[start : start + self._batches_per_step] for start in range(0, len(batches), self._batches_per_step)
        ]
        return median(map(max, steps)) / median(batches)

    def inter_node_bytes(self) -> float:
        """Return the bytes that the host's device has transmitted for each batch."""
        transmitted = self._transmitted[self._warm_up :: self._batches_per_step]
        return (transmitted[-1] - transmitted[0]) / (len(transmitted) - 1) / self._batches_per_step


def transmitted_bytes() -> int:
    """Return what ``eth0`` has transmitted since it is up, frame headers included; 0 without such a device."""
    counter = Path("/sys/class/net/eth0/statistics/tx_bytes")
    return int(counter.read_text()) if counter.exists() else 0


def measure(row: Row, name: str, hosts: int, steps: int, warm_up: int, slower: float) -> Measurement:
    """Train a workload for some steps and return what this rank saw, as if it had not been slower by a factor."""
    torch.manual_seed(0)
    module = BenchmarkModule(workload(name, slower))
    batches = row.batches_per_step * row.local_steps
    watch = StepWatch(warm_up + row.trial_steps, batches)
    trainer = train(row, module, hosts, (warm_up + row.trial_steps + steps + 1) * row.local_steps, [watch])
    seconds = watch.seconds()
    sent_bytes = _sent_bytes(row, trainer, module) / batches
    return Measurement([second / slower for second in seconds], sent_bytes, watch.inter_node_bytes(), watch.longest())


def _sent_bytes(row: Row, trainer: Trainer, module: BenchmarkModule) -> float:
    if row.reduced_bytes is not None:
        handed_in = row.reduced_bytes([parameter.shape for parameter in module.parameters()])
        return sent_bytes("all_reduce", handed_in, trainer.world_size)
    assert isinstance(trainer.strategy, (SparseDDPStrategy, SparseModelParallelStrategy))
    return trainer.strategy.compression_stats()["wire_bytes"]


def main() -> None:
    """Measure the rows asked for, in turn, and write what this rank saw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=[*WORKLOADS, *PACED], required=True)
    parser.add_argument("--slower", type=float, required=True)
    parser.add_argument("--rows", nargs="+", choices=ROWS, required=True)
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warm-up", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()

    begin_rank(options.hosts)
    measurements: dict[str, list[Measurement]] = {name: [] for name in options.rows}
    for round_number in range(1, options.rounds + 1):
        for name in options.rows:
            dist.barrier()
            arguments = (options.workload, options.hosts, options.steps, options.warm_up, options.slower)
            seen = measure(ROWS[name], *arguments)
            measurements[name].append(seen)
            print(f"round {round_number}/{options.rounds}  {name:32s}{milliseconds(seen.seconds)}", flush=True)
    options.output.write_text(json.dumps(measurements))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
