import math
import re
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from pytorch_lightning import Callback
from pytorch_lightning.loggers import CSVLogger

from lightning_sparse import AdamCorrection
from lightning_sparse.callbacks import CompressionMonitor
from lightning_sparse.compressors import A2SGD
from tests.helpers.fits import fits
from tests.helpers.loggers import rows_of
from tests.helpers.trainers import Small

PAGE = Path(__file__).parents[2] / "docs" / "monitor.md"
KINDS = ("wire_bytes", "dense_bytes")


class Often(Small):
    def __init__(self, backwards=1, kind=torch.optim.SGD):
        super().__init__()
        self.automatic_optimization = backwards == 1
        self.backwards, self.kind = backwards, kind

    def training_step(self, batch, batch_index):
        if self.automatic_optimization:
            return super().training_step(batch, batch_index)
        for _ in range(self.backwards):
            self.manual_backward(self.network(batch).square().mean())
        self.optimizers().step()
        return self.optimizers().zero_grad()

    def configure_optimizers(self):
        return self.kind(self.parameters(), lr=0.01)


class LateAtEnd(Callback):
    """Delay the last exchange far beyond a step."""

    def on_train_batch_start(self, trainer, *arguments):
        if trainer.is_last_batch:
            trainer.strategy.engine.worker.submit(lambda: time.sleep(0.5))


TWICE, DENSE_FIRST = partial(Often, 2), AdamCorrection(warmup_steps=6, density_decay_steps=0)
ALL = ("topk", "lags", "omgs", "exdyna", "dgc", "sdagc", "a2sgd", "qsgd", "micro", "dense")
STRATEGIES = {
    **{name: ({"compressor": name}, Often, {}) for name in ALL},
    **{f"{name}, two backwards": ({"compressor": name}, TWICE, {}) for name in ("topk", "exdyna", "a2sgd", "dense")},
    "accumulation": ({"compressor": "lags"}, Often, {"accumulate_grad_batches": 2}),
    "averages of replicas": ({"compressor": A2SGD(param_sync_every=3)}, Often, {}),
    "auto": ({"schedule": "auto"}, Often, {}),
    "AdamW": ({"optimizer_correction": DENSE_FIRST}, partial(Often, 1, torch.optim.AdamW), {}),
    "AdamW, two backwards": ({"optimizer_correction": DENSE_FIRST}, partial(Often, 2, torch.optim.AdamW), {}),
    "local steps": ({"local_steps": 2}, Often, {}),
    "local steps, accumulation": ({"local_steps": 2}, Often, {"accumulate_grad_batches": 2}),
    "local steps, two backwards": ({"local_steps": 2}, TWICE, {}),
    "local steps, dense": ({"local_steps": 2, "compressor": "dense"}, Often, {}),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("strategy", "module", "arguments"), STRATEGIES.values(), ids=STRATEGIES)
def test_steps_add_up_to_the_totals_and_shares_to_one_at_most(pair, tmp_path, strategy, module, arguments):
    callbacks, logger = [CompressionMonitor(), LateAtEnd()], CSVLogger(tmp_path, name="", version="")
    more = {"max_epochs": 1, "log_every_n_steps": 4, "limit_train_batches": 16, **arguments}
    batches = more.get("accumulate_grad_batches", 1)
    answers = fits(pair, module, strategy, callbacks=callbacks, logger=logger, **more)
    ranks = [each.stats[batches - 1 :: batches] for each in answers]
    every = strategy.get("local_steps", 1)
    for stats in ranks:
        steps = [*filter(None, stats), *[stats[-1]] * (every - 1)]  # a round has statistics at its end
        for kind in KINDS:
            assert sum(each[kind] for each in steps) == pytest.approx(stats[-1][f"total_{kind}"]), kind
        shares = [each["exposed_share"] for each in stats if "exposed_share" in each]
        assert all(math.isnan(share) or 0 <= share <= 1 for share in shares), shares
    before = {"step": -1, **dict.fromkeys([f"sparse/total_{kind}" for kind in KINDS], 0)}
    rows = rows_of(tmp_path, "sparse/wire_bytes")
    assert [int(row["step"]) for row in rows] == list(range(3, len(ranks[0]), 4))
    for row in rows:
        for kind in KINDS:
            sent = float(row[f"sparse/total_{kind}"]) - float(before[f"sparse/total_{kind}"])
            steps = int(row["step"]) - int(before["step"])
            assert float(row[f"sparse/{kind}"]) * steps == pytest.approx(sent), kind
        before = row
    assert any(row.get("sparse/backward_seconds") for row in rows) == (every == 1)  # rounds have no backward times
    logged = {name.removeprefix("sparse/") for row in rows for name in row if name.startswith("sparse/")}
    assert logged <= set(re.findall(r"`(\w+)`", PAGE.read_text()))
