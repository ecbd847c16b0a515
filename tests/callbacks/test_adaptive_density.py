import math
from functools import partial

import pytest
import torch
from pytorch_lightning import Callback
from pytorch_lightning.loggers import CSVLogger

from lightning_sparse import AdamCorrection, SparseDDPStrategy
from lightning_sparse.callbacks import AdaptiveDensity, DensityRule, ErrorBudget, Measurement, RuleContext
from lightning_sparse.compressors import LAGS
from lightning_sparse.engine.observe import ParameterSamples
from lightning_sparse.testing.tensors import assert_same
from tests.helpers.fits import fits
from tests.helpers.loggers import rows_of
from tests.helpers.resuming import Numbered
from tests.helpers.trainers import Adversaries, Small, WithAdam, make_trainer, weights

WEIGHT, SLOW = "network.0.weight", "network.0.bias"
SOON = AdamCorrection(warmup_steps=4, density_decay_steps=8)


class ByEpoch(DensityRule):
    def __init__(self, *densities):
        self.densities = densities

    def minimum_densities(self, context):
        is_over = context.epoch >= len(self.densities)
        return {} if is_over else dict.fromkeys(context.asked, self.densities[context.epoch])


class Densities(Callback):
    def __init__(self):
        self.densities = []
        self.sent = []
        self.errors = {WEIGHT: [], SLOW: []}

    def on_before_optimizer_step(self, trainer, *arguments):
        """Runs after the exchange."""
        strategy = trainer.strategy
        engine = strategy.engine
        self.densities.append({name: engine.densities.of(name) for name in engine.numels})
        self.sent.append(strategy.compression_stats()["density"])

    def on_train_batch_start(self, trainer, *arguments):
        trainer.strategy.engine.recorder.samples = ParameterSamples()

    def on_train_batch_end(self, trainer, *arguments):
        samples = trainer.strategy.engine.recorder.last_samples
        if samples is not None:
            facts = samples.facts()
            for name, errors in self.errors.items():
                errors.append(facts[name].residual_norm / facts[name].added_norm)


def fit(rank, rules, every_n_steps=10, max_density=1.0, module=Small, watch=Densities, settings=None, **arguments):
    seen, model = watch(), module()
    callbacks = [seen, *([AdaptiveDensity(rules, max_density, every_n_steps)] if rules else [])]
    strategy = SparseDDPStrategy(**{"density": 0.02, **(settings or {})})
    make_trainer(rank, strategy, callbacks=callbacks, **arguments).fit(model)
    return seen, weights(model), strategy.compression_stats()["total_wire_bytes"]


class ByStep(DensityRule):
    def minimum_densities(self, context):
        return dict.fromkeys(context.asked, 1 / (2 + context.step))


@pytest.mark.exhaustive
@pytest.mark.parametrize("batches", [1, 4])
def test_a_rule_counts_steps_of_the_optimizer(pair, batches):
    expected = [1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 6]
    run = partial(fit, rules=[ByStep()], max_epochs=2, accumulate_grad_batches=batches, limit_train_batches=12)
    for seen, _, _ in pair.run(run):
        assert [density[WEIGHT] for density in seen.densities[:5]] == pytest.approx(expected, rel=1e-6)
        assert seen.sent[:5] == pytest.approx(expected, rel=0.05)


@pytest.mark.exhaustive
def test_the_largest_wish_counts_within_bounds(pair):
    compressor = LAGS(densities={"network.2.weight": 0.4})
    run = partial(fit, rules=[ByEpoch(0.9), ByEpoch(0.1, 0.1)], settings={"compressor": compressor}, max_density=0.25)
    for seen, _, _ in pair.run(partial(run, max_epochs=3, limit_train_batches=2)):
        assert [density[WEIGHT] for density in seen.densities] == [0.25, 0.25, 0.1, 0.1, 0.02, 0.02]
        assert {density["network.2.weight"] for density in seen.densities} == {0.4}


def test_an_error_stays_within_its_budget_on_all_ranks_alike(pair):
    budget, run = 1.5, partial(fit, every_n_steps=2, max_epochs=8)
    (free, _, _), _ = pair.run(run, [])
    (seen, our_weights, _), (other, other_weights, _) = pair.run(run, [ErrorBudget(budget)])
    assert sum(free.errors[WEIGHT][-20:]) / 20 > 1.5 * budget
    assert sum(seen.errors[WEIGHT][-20:]) / 20 < 1.2 * budget
    assert seen.densities == other.densities
    assert 0.02 < seen.densities[-1][WEIGHT] < 1.0
    assert all(torch.equal(our_weights[name], other_weights[name]) for name in our_weights)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("losses", [1, 2])
def test_errors_of_all_optimizers_of_a_batch_are_kept_within_their_budget(pair, losses):
    run = partial(fit, rules=[ErrorBudget(0.5)], every_n_steps=2, module=partial(Adversaries, losses))
    for seen, _, _ in pair.run(run):
        assert all(density > 0.02 for density in seen.densities[-1].values())


@pytest.mark.exhaustive
def test_with_adam_an_error_counts_updates_and_raises_what_waits_too_long(pair):
    settings = {"schedule": "single", "optimizer_correction": SOON}
    run = partial(fit, every_n_steps=2, module=WithAdam, settings=settings, max_epochs=8)
    (free, _, without), _ = pair.run(run, [])
    assert free.errors[SLOW][-1] > 12
    (loose, *_), _ = pair.run(run, [ErrorBudget(25.0)])
    assert loose.densities == free.densities  # in the dense steps, during the decay of the density, and later
    (tight, _, raised), (other, *_) = pair.run(run, [ErrorBudget(8.0)])
    assert tight.densities == other.densities
    assert tight.densities[:16] == free.densities[:16]
    assert 0.02 < tight.densities[-1].pop(SLOW) < 0.2
    assert set(tight.densities[-1].values()) == {0.02}
    assert tight.errors[SLOW][-1] < 1.2 * 8
    assert raised < 1.05 * without


class Planned(Densities):
    def on_train_end(self, trainer, *arguments):
        self.planned = max(trainer.strategy.exchange_plan().densities, default=0.0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("max_density", [1.0, 0.3])
def test_a_plan_that_sends_more_where_that_hides_keeps_to_the_bounds(pair, max_density):
    settings = {"compressor": LAGS(adaptive_density=True)}
    run = partial(fit, rules=[ByEpoch(0.05)], max_density=max_density, watch=Planned, settings=settings, max_epochs=6)
    (first, *_), (second, *_) = pair.run(run)
    assert first.densities == second.densities
    assert all(density >= 0.05 for density in first.densities[0].values())
    assert min(min(step.values()) for step in first.densities) >= 0.02
    assert first.planned <= max_density


def test_densities_are_logged_at_every_observed_step(pair, tmp_path):
    more = {"callbacks": [AdaptiveDensity([ByEpoch(0.5)])], "logger": CSVLogger(tmp_path, name="", version="")}
    fits(pair, Small, {"density": 0.02}, limit_train_batches=16, **more)
    tag = f"sparse_parameters/density/{WEIGHT}"
    assert {int(row["step"]): float(row[tag]) for row in rows_of(tmp_path, tag)} == {9: 0.5, 19: 0.02, 29: 0.02}


class Saving(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == (1, 1):
            trainer.save_checkpoint(self.path)


def test_a_resumed_run_goes_on_to_the_bit_also_where_another_callback_saves_first(pair, tmp_path):
    path, adaptive = str(tmp_path / "early.ckpt"), AdaptiveDensity([ErrorBudget(1.5)], every_n_steps=2)
    settings = {"density": 0.02, "schedule": "layerwise"}
    saved = fits(pair, Numbered, settings, callbacks=[Saving(path), adaptive], max_epochs=4)
    for whole, resumed in zip(saved, fits(pair, Numbered, settings, path, callbacks=[adaptive], max_epochs=4)):
        assert_same(resumed.batches, whole.batches[8:])
        densities = [[stats["density"] for stats in each] for each in (resumed.stats, whole.stats[8:])]
        assert densities[0] == densities[1]
        assert len(set(densities[0])) > 1


def context(step=0, epoch=0, asked=0.001, present=0.001):
    return RuleContext(step, epoch, {"weight": asked}, {"weight": present}, 1.0)


def test_gradients_that_say_nothing_leave_a_density_as_it_is():
    rule = ErrorBudget(2.0)
    rule.observe(Measurement({"weight": 1.0}, {"weight": 3.0}), context())
    before = rule.minimum_densities(context())
    assert before == {"weight": pytest.approx(0.0015)}
    for gradient, residual in ((0.0, 3.0), (math.nan, 3.0), (math.inf, 3.0), (1.0, math.nan)):
        rule.observe(Measurement({"weight": gradient}, {"weight": residual}), context())
        assert rule.minimum_densities(context()) == before


def test_what_was_learned_goes_on():
    rule, resumed = ErrorBudget(2.0), ErrorBudget(2.0)
    for epoch in range(3):
        rule.minimum_densities(context(epoch=epoch))
        rule.observe(Measurement({"weight": 1.0}, {"weight": 4.0}), context(epoch=epoch))
    resumed.load_state_dict(rule.state_dict())
    assert resumed.minimum_densities(context(epoch=3)) == rule.minimum_densities(context(epoch=3))
    rule.begin()
    assert rule.state_dict() == ErrorBudget(2.0).state_dict()
