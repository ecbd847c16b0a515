from pathlib import Path

import pytest
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging
from pytorch_lightning.tuner import Tuner

from tests.compatibility.modules import COMPILER, Plain
from tests.compatibility.running import ROUND
from tests.helpers.trainers import weights

CLIP = 0.01


def steps(outcome):
    return [batch.step for batch in outcome.batches]


def rates(outcome):
    return [update.rate for update in outcome.updates]


def windows(first, second):
    assert steps(first) == [0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 4]
    for before, batch in zip(first.batches, first.batches[1:]):
        if batch.stats and not batch.is_dense and not before.is_dense:
            has_sent = batch.stats["total_wire_bytes"] > before.stats.get("total_wire_bytes", 0)
            ends_round = "local_steps" not in batch.stats or batch.step % ROUND == 0
            assert has_sent == (batch.step > before.step and ends_round)


def norms(first, second):
    assert max(update.norm for update in first.updates) > CLIP
    assert max(batch.norm for batch in first.batches) == pytest.approx(CLIP, rel=1e-3)


def fit_noting_types(trainer, module):
    types = set()
    module.network[0].register_forward_hook(lambda layer, given, output: types.add(output.dtype))
    trainer.fit(module)
    return {"types": types}


def types(first, second):
    assert first.notes["types"] == {torch.bfloat16}
    assert {parameter.dtype for parameter in first.after.values()} == {torch.float32}


def steps_are(expected):
    def check(first, second):
        assert steps(first) == list(expected)

    return check


one_step_a_batch = steps_are(range(1, 9))
two_steps_a_batch = steps_are(range(2, 17, 2))
two_steps_in_two_batches = steps_are([0, 2, 2, 4, 4, 6, 6, 8])


def normalized_together(first, second):
    assert first.batches[0].total != second.batches[0].total
    for one, other in zip(first.batches, second.batches):
        assert one.buffers == other.buffers
        assert "network.1.running_mean" in one.buffers


def fit_and_evaluate(trainer, module):
    trainer.fit(module)
    fitted = weights(module)
    validated = trainer.validate(module, verbose=False)
    tested = trainer.test(module, verbose=False)
    predicted = trainer.predict(module)
    return {"fitted": fitted, "validated": validated, "tested": tested, "predicted": predicted}


def evaluated(first, second):
    rows = Plain().val_dataloader().dataset.rows
    losses = [
        (torch.cat(outcome.notes["predicted"]).cpu() - rows[rank::2]).square().mean()
        for rank, outcome in enumerate((first, second))
    ]
    for outcome in (first, second):
        (validated,), (tested,) = outcome.notes["validated"], outcome.notes["tested"]
        assert validated == tested
        assert validated["val_loss"] == pytest.approx(float(sum(losses) / 2), rel=1e-5)
        assert all(torch.equal(outcome.notes["fitted"][name], outcome.after[name]) for name in outcome.after)


def fit_twice(trainer, module):
    trainer.fit(module)
    fitted = weights(module)
    trainer.fit_loop.max_epochs += 1
    trainer.fit(module)
    return {"fitted": fitted}


def continued(first, second):
    assert steps(first) == list(range(1, 17))
    assert first.batches[-1].stats.get("total_steps", 8) == 8  # of the second fit
    for name, parameter in first.notes["fitted"].items():
        assert torch.equal(parameter, second.notes["fitted"][name])
        assert not torch.equal(parameter, first.after[name])


def moments(first, second):
    assert first.kept == {"step", "exp_avg", "exp_avg_sq"}


def moments_of_windows(first, second):
    moments(first, second)
    assert steps(first) == [batch // 2 for batch in range(1, 17)]


def fit_compiled(trainer, module):
    return fit_counting_graphs(trainer, torch.compile(module, backend=COMPILER))


def fit_counting_graphs(trainer, module):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    trainer.fit(module)
    return {"graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"]}


def compiled(first, second):
    one_step_a_batch(first, second)
    assert first.notes["graphs"] > 0


def keepers(folder):
    # The large ``min_delta`` means that no improvement counts.
    stopping = EarlyStopping("val_loss", min_delta=100.0, patience=1, check_on_train_epoch_end=False)
    callbacks = [ModelCheckpoint(folder, monitor="val_loss", save_top_k=1), stopping]
    return {"callbacks": callbacks, "enable_checkpointing": True, "max_epochs": 4}


def fit_and_load_the_best(trainer, module):
    trainer.fit(module)
    best = type(module).load_from_checkpoint(trainer.checkpoint_callback.best_model_path, map_location="cpu")
    score = float(trainer.checkpoint_callback.best_model_score)
    (validated,) = trainer.validate(best, verbose=False)
    return {"score": score, "validated": validated["val_loss"], "epochs": trainer.current_epoch}


def kept_and_stopped(first, second):
    assert first.notes["epochs"] == 2
    assert first.notes["validated"] == pytest.approx(first.notes["score"], rel=1e-5)


def averaging(folder):
    average = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=1)
    return {"max_epochs": 3, "limit_train_batches": 7, "check_val_every_n_epoch": 3, "callbacks": [average]}


def fit_noting_starts(trainer, module):
    starts = []
    module.on_train_epoch_start = lambda: starts.append(weights(module))
    trainer.fit(module)
    return {"starts": starts}


def averaged(first, second):
    for name, parameter in first.after.items():
        starts = [start[name] for outcome in (first, second) for start in outcome.notes["starts"][1:]]
        torch.testing.assert_close(parameter, sum(starts) / 4, rtol=1e-5, atol=1e-6)


def means(first, second):
    for one, other in zip(first.batches, second.batches):
        assert one.logged["loss"] == other.logged["loss"] == pytest.approx((one.loss + other.loss) / 2, rel=1e-5)
        assert one.loss != other.loss


def find_a_rate(trainer, module):
    before = weights(module)
    finder = Tuner(trainer).lr_find(module, min_lr=1e-4, max_lr=0.5, num_training=24)
    stays = all(torch.equal(before[name], found) for name, found in weights(module).items())
    files = list(Path(trainer.default_root_dir).iterdir())
    trainer.fit_loop.max_epochs = 1  # the search needed more
    trainer.fit(module)
    return {"stays": stays, "suggestion": finder.suggestion(), "files": files}


def found_rate(first, second):
    for outcome in (first, second):
        assert outcome.notes["stays"]
        assert outcome.notes["files"] == []
        assert rates(outcome) == [first.notes["suggestion"]] * 8
