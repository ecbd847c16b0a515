"""One rank of a whole training over a network. Started by time_to_quality.py on every host; not to be called by hand.

It trains what ``quality.py`` trains, the same batches on the same number of ranks, but for real: with Lightning, in a
process of its own, over a network that takes its time.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pytorch_lightning import LightningModule
from pytorch_lightning.callbacks import Timer
from pytorch_lightning.strategies import DDPStrategy, Strategy
from quality import OPTIMIZERS, TASKS, Run
from rows import Row
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from training import begin_rank, trainer_of
from typing_extensions import override

from lightning_sparse import LocalSteps, SparseDDPStrategy


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


def strategy_of(run: Run) -> Strategy:
    """Return what a user would give the Trainer."""
    if run.system == "ddp":
        return DDPStrategy()
    arguments: dict[str, Any] = {"compressor": run.system, "wire": run.wire, "warmup_epochs": 0}
    if run.density is not None:
        arguments["density"] = run.density
    if run.local:
        steps, rate, momentum, decay, synchronous = run.local_numbers()
        before = int(synchronous)
        rounds = LocalSteps(int(steps), rate, momentum, momentum > 0, decay, synchronous_steps=before)
        arguments["local_steps"] = rounds
    return SparseDDPStrategy(**arguments)


def main() -> None:
    """Train, and have rank 0 write down how long it took and how good the model is."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    run = Run(**json.loads(options.run))

    begin_rank(run.ranks)
    learner, timer = Learner(run, dist.get_rank()), Timer()
    row = Row(lambda hosts: {"strategy": strategy_of(run), "num_nodes": hosts})
    clip_norm = learner.task.clip_norm
    trainer = trainer_of(row, run.ranks, max_steps=run.steps, gradient_clip_val=clip_norm, callbacks=[timer])
    trainer.fit(learner, DataLoader(range(run.steps), batch_size=None))  # type: ignore[arg-type]  # numbers of steps
    if dist.get_rank() == 0:
        learner.eval()
        with torch.no_grad():
            score = learner.learnable.score(learner.network)
        seconds = timer.time_elapsed()
        options.output.write_text(json.dumps({"seconds": seconds, "score": score}))
        print(f"whole training  {seconds:.0f} s, {score:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
