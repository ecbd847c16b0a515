"""Save, and go back into SLURM's queue, at the end of a step that all ranks have agreed on."""

import os
import shutil
import subprocess
import threading
from typing import Any, Optional

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_sparse.engine.collectives import gather_together
from lightning_sparse.strategy.lightning import Callback, LightningModule, SLURMEnvironment, Trainer
from lightning_sparse.strategy.signals import Signals


class RequeueAtStepEnd(Callback):
    """Answer SLURM's signal at the end of a step, instead of wherever each rank happens to be.

    Lightning saves within the signal's handler: a rank that waits for another one's gradient does not get there, and
    the job hangs. Here the handler takes a note, and notes are reduced while the next step runs, so all ranks learn of
    a signal at the end of the same step. There they save ``hpc_ckpt_<n>.ckpt`` in the Trainer's ``default_root_dir``,
    from which the requeued job goes on, and end. A signal is answered after a validation, and where a round of local
    steps has ended; where some ranks have no batch left by then, and others have, at the end of the epoch.

    It replaces Lightning's handler, and does nothing outside of SLURM or where ``SLURMEnvironment(auto_requeue=False)``
    is among the Trainer's plugins. ``lightning-sparse fit`` has it always.

    Example::

        >>> callbacks = [RequeueAtStepEnd()]
    """

    def __init__(self) -> None:
        self._signals: Optional[Signals] = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        environment = getattr(trainer.strategy, "cluster_environment", None)
        if stage != "fit" or not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
            return
        # Signals reach the main thread only. Lightning installs no handler of its own where it finds one.
        if environment.requeue_signal is not None and threading.current_thread() is threading.main_thread():
            self._signals = Signals(environment.requeue_signal)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._signals is not None and trainer.world_size > 1:
            self._signals.connect(trainer, lambda: self._answer(trainer, "waits"))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._signals is None:
            return
        is_agreed = self._signals.heard()  # whether any rank was signalled by the end of the last step
        if is_agreed:
            self._signals.is_noted = False  # answered now, and not again after the next step
        self._signals.tell()
        if is_agreed:
            is_last = trainer.is_last_batch or batch_idx + 1 == trainer.num_training_batches
            self._answer(trainer, "ends" if is_last else "trains")

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._signals is not None and _is_uneven(trainer) and any(gather_together(self._signals.is_noted)):
            self._signals.is_noted = False
            self._save_and_requeue(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._signals is not None:
            self._signals.heard()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._signals is not None:
            self._signals.close()
            self._signals = None

    def _answer(self, trainer: Trainer, place: str) -> None:
        """Answer on all ranks if training can go on from where each is; if not, later."""
        assert self._signals is not None
        self._signals.is_noted = _is_uneven(trainer) and len(set(gather_together(place))) > 1
        if not self._signals.is_noted:
            self._save_and_requeue(trainer)

    def _save_and_requeue(self, trainer: Trainer) -> None:
        # Lightning's own name for the file, since it is Lightning that looks for it.
        path = trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir)
        path = trainer.strategy.broadcast(path)
        trainer.save_checkpoint(path)
        rank_zero_info(f"RequeueAtStepEnd: saved {path} after step {trainer.global_step}")
        if trainer.strategy.broadcast(_requeue() if trainer.is_global_zero else None):
            # Steps after the checkpoint would be done, and logged, twice.
            raise SystemExit(0)


def _is_uneven(trainer: Trainer) -> bool:
    return getattr(trainer.strategy, "has_uneven_batches", False) and trainer.world_size > 1


def _requeue() -> bool:
    """Put this job back into the queue; SLURM ends its processes then."""
    job = os.environ["SLURM_JOB_ID"]
    if shutil.which("scontrol") is None:
        rank_zero_warn(
            f"scontrol is not to be found here, such as in a container; job {job} trains on until its end. Bind it and"
            " SLURM's configuration into the image, or submit a new job with the checkpoint as ckpt_path"
        )
        return False
    done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)  # noqa: S603, S607
    if done.returncode > 0:  # below 0 it was ended by a signal: SLURM may end the job's processes before its answer
        rank_zero_warn(f"SLURM does not put job {job} back, which trains on until its end: {done.stderr.strip()}")
    return done.returncode <= 0
