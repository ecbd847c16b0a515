import re
from functools import partial

import pytest
import torch

from lightning_sparse import SparseDDPStrategy
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


def means(states):
    kept = [(kind, name) for kind, of in states[0]["memory"].items() for name in of]
    found = {
        f"{kind}.{name}": torch.stack([state["memory"][kind][name].double() for state in states]).mean(dim=0)
        for kind, name in kept
    }
    buffers = zip(*(state["optimizers"] for state in states))
    return found | {str(place): torch.stack(rows).double().mean(dim=0) for place, rows in enumerate(buffers)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("compressor", ["topk", "dgc", "sdagc", "exdyna", "a2sgd"])
def test_on_other_numbers_of_ranks_the_mean_of_what_is_kept_stays(pools, tmp_path, compressor):
    source, before, settings = None, [], {"compressor": compressor, "density": DENSITY[compressor]}
    for stage, ranks in enumerate((4, 2, 3, 1, 4)):
        path = str(tmp_path / f"{stage}.ckpt")
        limits = {"max_steps": 4 * (stage + 1), "max_epochs": -1}
        answers = fits(pools[ranks], partial(Starting, None, path), settings, source, **limits)
        starts = [each.notes for each in answers]
        if before:
            expected = means(before)
            assert len(expected) >= 4
            torch.testing.assert_close(means(starts), expected, rtol=1e-6, atol=1e-9)
            said = [line for line in answers[0].said if f"{len(before)} ranks saved" in line]
            assert len(said) == 1
            assert f"{ranks} ranks continue" in said[0]
        if before and compressor == "exdyna":
            assert {len(start["compressor"]["cuts"]) for start in starts} == {ranks + 1}
            learned = [[state["compressor"][key] for key in ("step", "threshold")] for state in before]
            assert all([start["compressor"][key] for key in ("step", "threshold")] in learned for start in starts)
        source = path
        before = [{**each.kept, "optimizers": momenta(each.optimizers[0])} for each in answers]


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
