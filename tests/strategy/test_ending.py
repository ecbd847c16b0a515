import re
from functools import partial

import pytest

from lightning_sparse import SparseDDPStrategy
from tests.helpers.fits import fits, listening
from tests.helpers.trainers import Small, WithAdam, make_trainer

ELEMENTS = 32 * 64 + 64 + 64 * 32 + 32  # elements of Small
DENSE = 4.0 * ELEMENTS  # bytes sent by one of two ranks in a DDP step
SIXTEEN = {"limit_train_batches": 16}


class Stopping(Small):
    def __init__(self, how=""):
        super().__init__()
        self.how = how

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 4 and self.how == "fails":
            raise KeyError("five")
        self.trainer.should_stop = batch_idx == 4 and self.how == "stops"

    def on_train_end(self):
        self.notes = self.trainer.strategy.compression_stats()


class StoppingAdam(Stopping, WithAdam):
    """The same with Adam."""


def closing_of(lines):
    (line,) = [line for line in lines if "steps sent" in line]
    assert line is lines[-1]
    return line


@pytest.mark.parametrize("module", [Stopping, StoppingAdam])
def test_one_line_tells_of_the_whole_training_and_stays_to_be_asked_for(pair, module):
    settings = {"compressor": "topk", "density": 0.01, "schedule": "single"}
    answers = fits(pair, module, settings, limit_val_batches=1, **SIXTEEN)
    for stats, seen in ((each.total, each.notes) for each in answers):
        assert stats["total_steps"] == 32
        assert stats["total_dense_bytes"] == 32 * DENSE
        assert stats["total_compression_ratio"] == stats["total_dense_bytes"] / stats["total_wire_bytes"]
        if module is StoppingAdam:  # dense steps count
            assert stats["total_wire_bytes"] > 10 * DENSE
        assert 0 < stats["exposed_share"] < 1
        assert stats == seen
    stats, line = answers[0].total, closing_of(answers[0].said)
    told = [float(number) for number in re.findall(r"[\d.]+(?=[ ,;])", line)]
    ratio = stats["total_compression_ratio"]
    assert told[:4] == pytest.approx([32, stats["total_wire_bytes"] / 1e3, 32 * DENSE / 1e3, ratio], rel=5e-3)
    assert told[4] == pytest.approx(100 * stats["exposed_share"], abs=0.06)


def fit_failing(rank, settings):
    with listening() as lines, pytest.raises(KeyError):
        make_trainer(rank, SparseDDPStrategy(**settings)).fit(Stopping("fails"))
    return lines


def test_a_training_that_is_stopped_tells_and_one_that_fails_does_not(pair):
    first, other = fits(pair, partial(Stopping, "stops"), {"density": 0.01})
    assert "5 steps sent" in closing_of(first.said)
    assert first.total["total_steps"] == other.total["total_steps"] == 5
    lines, _ = pair.run(fit_failing, {"density": 0.01})
    assert lines
    assert not any("steps sent" in line for line in lines)
