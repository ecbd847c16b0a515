"""One rank of the adaptation benchmark. Started by adaptation.py on every host; not meant to be called by hand."""

import argparse
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import WORKLOADS, BenchmarkModule
from pytorch_lightning import Callback, LightningModule, Trainer
from rows import ROWS
from training import begin_rank, train

from lightning_sparse import SparseDDPStrategy

_ROW = "sparse_auto 0.001"


class Watch(Callback):
    """Note when each step ended and whether it was left to DDP, and say so."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, bool]] = []
        self._border = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        """Take the time."""
        assert isinstance(trainer.strategy, SparseDDPStrategy)
        border, self._border = self._border, time.perf_counter()
        self.steps.append((self._border - border, trainer.strategy.is_plain))
        print(f"step {len(self.steps)}", flush=True)


def main() -> None:
    """Train, and write what this rank saw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()

    begin_rank(options.hosts)
    torch.manual_seed(0)
    module, watch = BenchmarkModule(WORKLOADS[options.workload]), Watch()
    train(ROWS[_ROW], module, options.hosts, options.steps, [watch])
    parameters = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    digest = hashlib.sha256(parameters.numpy().tobytes()).hexdigest()
    options.output.write_text(json.dumps({"steps": watch.steps, "digest": digest}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
