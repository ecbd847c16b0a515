import random
import time

import torch.distributed as dist

from lightning_sparse.engine.collectives import ExchangeWorker


class Sluggish(ExchangeWorker):
    """An exchange worker that sleeps before every task. The time is random and differs between ranks."""

    def submit(self, task):
        chance = random.Random(f"{dist.get_rank()} {time.perf_counter_ns()}")

        def run_late():
            time.sleep(chance.random() * 0.005)
            return task()

        return super().submit(run_late)
