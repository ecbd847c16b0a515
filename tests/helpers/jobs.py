"""A job of SLURM that there is not, and signals that end a job."""

import os
import signal

from pytorch_lightning import Callback

JOB = {"SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "train", "SLURM_NODEID": "0", "SLURM_NTASKS_PER_NODE": "2"}


def put_scontrol(folder, end="exit 0"):
    """Put a command in place of SLURM's that writes down what is asked of it, and ends as told."""
    path = folder / "scontrol"
    path.write_text(f'#!/bin/sh\necho "$*" >> {folder}/asked\n{end}\n')
    path.chmod(0o755)


class SignalAt(Callback):
    """Send this process a signal before a step, or in the validation after it."""

    def __init__(self, step, number=signal.SIGTERM, in_validation=False):
        self.step, self.number, self.in_validation = step, number, in_validation

    def _send(self, trainer, in_validation):
        if (trainer.global_step, in_validation) == (self.step, self.in_validation):
            os.kill(os.getpid(), self.number)

    def on_train_batch_start(self, trainer, *batch):
        self._send(trainer, False)

    def on_validation_batch_start(self, trainer, *batch):
        self._send(trainer, True)
