import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from pytorch_lightning import Callback

from lightning_sparse.strategy.stop import GracefulStop
from tests.helpers.trainers import Small


def restarts():
    return int(os.environ.get("SLURM_RESTART_COUNT", 0))


class Slow(Small):
    """A model with a sleep on rank 0 in each step, so that a signal arrives while the others wait.

    ``waits_at`` has the steps before which a job waits for the signal, by number of requeues.
    """

    def __init__(self, waits_at: Sequence[int] = ()):
        super().__init__()
        self.waits_at = dict(enumerate(waits_at)).get(restarts())
        self._is_signalled = threading.Event()
        GracefulStop.SECONDS = 0.0  # compare signals after each step

    def on_train_start(self):
        handler = signal.getsignal(signal.SIGUSR1)

        def note(number, frame):
            self._is_signalled.set()
            handler(number, frame)

        if self.waits_at is not None:
            signal.signal(signal.SIGUSR1, note)

    def on_train_batch_start(self, batch, batch_index):
        if self.trainer.is_global_zero:
            time.sleep(0.1)
            if self.waits_at == self.trainer.global_step:
                assert self._is_signalled.wait(100)


class Recorder(Callback):
    def __init__(self, path: str):
        self.path = Path(path)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.is_global_zero:
            self._write(restarts=restarts(), step=trainer.global_step, epoch=trainer.current_epoch, batch=batch_idx)

    def on_fit_end(self, trainer, pl_module):
        weights = torch.cat([parameter.detach().flatten() for parameter in pl_module.parameters()])
        replicas = [torch.empty_like(weights) for _ in range(trainer.world_size)]
        hosts = [None] * trainer.world_size
        dist.all_gather(replicas, weights)
        dist.all_gather_object(hosts, os.environ["SLURMD_NODENAME"])
        if trainer.is_global_zero:
            self._write(
                hosts=hosts,
                identical=all(torch.equal(replica, weights) for replica in replicas),
                stats=trainer.strategy.compression_stats(),
                loss=float(trainer.callback_metrics["loss"]),
            )

    def _write(self, **line):
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
