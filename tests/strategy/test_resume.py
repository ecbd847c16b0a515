import re
from functools import partial
from typing import Any, NamedTuple, Optional

import pytest
import torch
from torch import nn

from lightning_sparse import AdamCorrection, SparseDDPStrategy
from lightning_sparse.compressors import A2SGD, DGC
from lightning_sparse.testing.tensors import assert_same, differences
from tests.helpers.fits import assert_goes_on, fits, one_model
from tests.helpers.resuming import Numbered, Starting, fit_numbered, momenta
from tests.helpers.sparse_ddp import COMPRESSOR_NAMES, DENSITY, GROUPING_FREE_NAMES, SCHEDULE_NAMES

# Methods that depend on the bucketing need a fixed bucketing to be exact.
REPRODUCIBLE = [
    (compressor, schedule)
    for compressor in COMPRESSOR_NAMES
    for schedule in SCHEDULE_NAMES
    if compressor in GROUPING_FREE_NAMES or schedule != "merged"
]


@pytest.mark.sampled
@pytest.mark.parametrize(("compressor", "schedule"), REPRODUCIBLE)
def test_resumed_in_the_middle_of_an_epoch_it_goes_on_to_the_bit(pair, tmp_path, compressor, schedule):
    settings = {"compressor": compressor, "density": DENSITY[compressor], "schedule": schedule}
    assert_goes_on(pair, tmp_path, settings, limit_val_batches=1)
    headers = [torch.load(path, weights_only=True)["header"] for path in tmp_path.rglob("rank_*.pt")]
    assert [each["world_size"] for each in headers] == [2, 2]


IN_PAIRS = {"accumulate_grad_batches": 2}
DGC_ = {"compressor": "dgc", "density": 0.05}
TOPK = {"compressor": "topk", "density": 0.05}
EXACT = {  # settings that random trainings do not draw
    "local clipping": ({"compressor": DGC(clip_norm=0.5), "density": 0.05}, {}),
    "warm-up": ({"compressor": "dgc", "density": 0.01, "warmup_steps": 16}, {}),
    "averages of replicas": ({"compressor": A2SGD(param_sync_every=5)}, {}),
    "own buckets": ({"compressor": "topk", "gradient_as_bucket_view": False}, IN_PAIRS),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("settings", "arguments"), EXACT.values(), ids=EXACT)
def test_nothing_that_is_kept_is_left_out(pair, tmp_path, settings, arguments):
    assert_goes_on(pair, tmp_path, settings, **arguments)


def test_a_save_between_two_batches_of_a_step_is_ddps(pair, tmp_path):
    path = str(tmp_path / "mid.ckpt")
    fits(pair, partial(Numbered, 7, path), TOPK, **IN_PAIRS)
    assert len(one_model(fits(pair, Numbered, TOPK, path, **IN_PAIRS)).batches) == 5


def fit_twice(rank, path):
    first, second = Numbered(8, path), Numbered()
    trainer = fit_numbered(rank, SparseDDPStrategy("dgc", density=0.05), first)
    once = trainer.strategy.final_state
    trainer.fit(second, ckpt_path=path)
    found = differences({seen: first.history[seen] for seen in (9, 10, 11, 12)}, second.history)
    return found + differences(once, trainer.strategy.final_state)


def test_a_second_fit_goes_on_from_a_checkpoint(pair, tmp_path):
    assert pair.run(fit_twice, str(tmp_path / "twice.ckpt")) == [[], []]


class Odd(Starting):
    """A model with parts of unequal sizes."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.network = nn.Sequential(nn.Linear(32, 5), nn.ReLU(), nn.Linear(5, 32))


class OddWithAdamW(Odd):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, betas=(0.9, 0.95))


class Stage(NamedTuple):
    ranks: int
    local_world_size: Optional[int] = None
    levels: Any = "auto"

    @property
    def shared_by(self):
        return self.local_world_size if self.levels != 1 and 1 < (self.local_world_size or 1) < self.ranks else 1


def means(states, shared_by):
    """Return means over ranks, or over nodes of ``shared_by`` ranks with a share of each tensor."""
    found = {}
    for kind in states[0]["memory"].keys() & {"residual", "update", "momentum", "learning_rate"}:
        for name in states[0]["memory"][kind]:
            shares = [state["memory"][kind][name].double().flatten() for state in states]
            wholes = [torch.cat(shares[first : first + shared_by]) for first in range(0, len(shares), shared_by)]
            found[f"{kind}.{name}"] = torch.stack(wholes).mean(dim=0)[: states[0]["weights"][name].numel()]
    buffers = zip(*(state["optimizers"] for state in states))
    return found | {str(place): torch.stack(rows).double().mean(dim=0) for place, rows in enumerate(buffers)}


RANKS = [Stage(4), Stage(2), Stage(3), Stage(1), Stage(4)]
NODES = [Stage(4, 2), Stage(4, 2, levels=1), Stage(4, 2, levels=2), Stage(2, 2), Stage(4, 2), Stage(1, 1), Stage(4, 2)]
CORRECTED = {"optimizer_correction": AdamCorrection(warmup_steps=3, density_decay_steps=2, second_moment_interval=2)}
MOVES = {
    **{
        name: (Starting, {"compressor": name, "density": DENSITY[name]}, RANKS)
        for name in ("topk", "dgc", "sdagc", "exdyna", "a2sgd")
    },
    "topk, nodes": (Odd, TOPK, NODES),
    "dgc, nodes": (Odd, {**DGC_, "warmup_steps": 0}, NODES),
    "AdamW, nodes": (OddWithAdamW, {**TOPK, **CORRECTED}, NODES),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("model", "settings", "stages"), MOVES.values(), ids=MOVES)
def test_on_other_numbers_of_ranks_the_mean_of_what_is_kept_stays(pools, tmp_path, model, settings, stages):
    source, before, expected = None, [], {}
    for number, (ranks, local_world_size, levels) in enumerate(stages):
        path, limits = str(tmp_path / f"{number}.ckpt"), {"max_steps": 7 * (number + 1), "max_epochs": -1}
        limits["local_world_size"] = local_world_size
        answers = fits(pools[ranks], partial(model, None, path), {**settings, "levels": levels}, source, **limits)
        starts = [each.notes for each in answers]
        if before:
            torch.testing.assert_close(means(starts, stages[number].shared_by), expected, rtol=1e-6, atol=1e-9)
            said = [line for line in answers[0].said if f"{len(before)} ranks saved" in line]
            assert len(said) == 1
            assert f"{ranks} ranks continue" in said[0]
        if before and settings["compressor"] == "exdyna":
            assert {len(start["compressor"]["cuts"]) for start in starts} == {ranks + 1}
            learned = [[state["compressor"][key] for key in ("step", "threshold")] for state in before]
            assert all([start["compressor"][key] for key in ("step", "threshold")] in learned for start in starts)
        source = path
        before = [{**each.notes, **each.kept, "optimizers": momenta(each.optimizers[0])} for each in answers]
        expected = means(before, stages[number].shared_by)
        assert len(expected) >= 4
        assert any(tensor.any() for tensor in expected.values())


EXDYNA, DENSE = ({"compressor": name, "density": DENSITY[name]} for name in ("exdyna", "dense"))
IN_ROUNDS = {**TOPK, "local_steps": 4}
SWITCHES = {
    "dense to sparse": (None, TOPK, False, "holds no state of a sparse strategy"),
    "sparse to dense": (TOPK, None, False, None),
    "alike": (TOPK, {"compressor": "lags", "density": 0.05}, True, None),
    "momentum": (DGC_, TOPK, False, "unused parts of .*: momentum and residual, because this training stores"),
    "learned": (EXDYNA, TOPK, True, "unused parts of .*: the state of ExDyna, because TopK continues"),
    "to none": (TOPK, DENSE, False, "unused parts of .*: residual, because this training stores other tensors"),
    "from none": (DENSE, TOPK, False, None),
    "from rounds": (IN_ROUNDS, TOPK, False, "the changes of the last round"),
    "to rounds": (TOPK, IN_ROUNDS, False, "this training stores other tensors"),
    "refused": (TOPK, {**TOPK, "resume_compression": False}, False, "was read without its states, so residuals"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("first", "second", "is_kept", "message"), SWITCHES.values(), ids=SWITCHES)
def test_strategies_may_change_and_say_what_they_do_not_use(pair, tmp_path, first, second, is_kept, message):
    path = str(tmp_path / "switch.ckpt")
    saved, *_ = fits(pair, partial(Numbered, 4, path), first, max_steps=4)
    answers = fits(pair, Starting, second, path, max_steps=8)
    for each in answers:
        assert_same(each.notes["weights"], saved.batches[-1])
        assert len(each.batches) == 4
        assert any(kept.any() for kept in each.notes["memory"].get("residual", {}).values()) == is_kept
    said = [line for line in answers[0].said if "ckpt" in line]
    assert len(said) == (message is not None)
    assert message is None or re.search(message, said[0])
