"""One rank of a whole training over a network. Started by time_to_quality.py on every host; not to be called by hand.

It trains what ``quality.py`` trains, the same batches on the same number of ranks, but for real: with Lightning, in a
process of its own, over a network that takes its time. Forward and backward may wait as long as a GPU takes.
"""

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from paced import PACED, pace
from pytorch_lightning import Callback, LightningModule, Trainer
from quality import OPTIMIZERS, TASKS, Run, scored
from rows import ROWS, Row
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from training import begin_rank, trainer_of
from typing_extensions import override

from lightning_sparse import SparseDDPStrategy


class Learner(LightningModule):
    """Learn a task of the quality benchmark.

    Args:
        run: the training.
        rank: this rank.
    """

    def __init__(self, run: Run, rank: int) -> None:
        super().__init__()
        self.run, self.rank = run, rank
        self.task = TASKS[run.task]
        self.learnable = self.task.build(run.seed, run.ranks)
        self.network = self.learnable.network()

    @override
    def training_step(self, step: int) -> Tensor:
        return self.learnable.loss(self.rank, step, self.network)

    @override
    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.run.optimizer](self.network, self.run.rate, self.task)
        schedule = LambdaLR(optimizer, lambda step: self.task.schedule(step, self.run.steps))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Progress(Callback):
    """Take the time, and at a tenth of the training each the validation loss, which takes none.

    Args:
        learner: that is trained.
        steps: of the whole training.
        stop_after: number of steps after which the training stops.

    Attributes:
        seconds: since training began.
        step_seconds: of a step, in the tenth that was the last to be complete.
        curve: steps and validation loss; of rank 0 alone.
    """

    def __init__(self, learner: Learner, steps: int, stop_after: int) -> None:
        self._stop_after = stop_after
        self.curve: list[tuple[int, float]] = []
        self.seconds = self.step_seconds = self._border = 0.0
        self._learner, self._every = learner, max(1, steps // 10)
        self._resumed = 0.0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._resumed = time.perf_counter()

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        self.seconds += time.perf_counter() - self._resumed
        if trainer.global_step % self._every == 0:
            self.step_seconds, self._border = (self.seconds - self._border) / self._every, self.seconds
            if trainer.is_global_zero:
                learner = self._learner
                self.curve.append((trainer.global_step, scored(learner.learnable, learner.network)))
                print(f"whole training  {trainer.global_step} {self.seconds:.0f} s {self.curve[-1][1]:.4f}", flush=True)
        # With a smaller max_steps, the warm-up would be that of a shorter training.
        trainer.should_stop = trainer.global_step >= self._stop_after
        self._resumed = time.perf_counter()


def row_of(run: Run, arguments: Mapping[str, Any]) -> Row:
    """Return what a user would give the Trainer."""
    if run.system in ROWS:
        return ROWS[run.system]
    settings: dict[str, Any] = {"compressor": run.system, "wire": run.wire, "warmup_steps": 0, **arguments}
    if run.density is not None:
        settings["density"] = run.density
    if run.local:
        settings["local_steps"] = run.rounds()
    return Row(lambda hosts: {"strategy": SparseDDPStrategy(**settings), "num_nodes": hosts})


def main() -> None:
    """Train, and have rank 0 write down how long it took and how good the model is."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", required=True)
    parser.add_argument("--arguments", type=json.loads, required=True)
    parser.add_argument("--paced", choices=("", *PACED), required=True)
    parser.add_argument("--slower", type=float, required=True)
    parser.add_argument("--stop-after", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    run = Run(**json.loads(options.run))

    begin_rank(run.ranks)
    learner = Learner(run, dist.get_rank())
    if options.paced:
        paced = PACED[options.paced]
        pace(learner.network, options.slower * paced.forward_seconds, options.slower * paced.backward_seconds)
    progress = Progress(learner, run.steps, options.stop_after)
    trainer = trainer_of(
        row_of(run, options.arguments),
        run.ranks,
        max_steps=run.steps,
        gradient_clip_val=learner.task.clip_norm,
        callbacks=[progress],
    )
    trainer.fit(learner, DataLoader(range(run.steps), batch_size=None))  # type: ignore[arg-type]  # numbers of steps
    if dist.get_rank() == 0:
        left = run.steps - options.stop_after
        seconds = progress.seconds + left * (progress.step_seconds or progress.seconds / options.stop_after)
        seconds /= options.slower
        seen = {"steps": run.steps, "ran": options.stop_after, "seconds": seconds, "curve": progress.curve}
        options.output.write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
