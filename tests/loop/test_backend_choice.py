"""``sparse_auto``: whichever is faster, in real processes whose steps take, by their clock, what the tests decide."""

from itertools import groupby

import pytest
import torch

from lightning_sparse import SparseDDPStrategy
from tests.helpers.pricing import SETTLED, Priced, much, nothing
from tests.helpers.trainers import make_trainer, weights

pytestmark = pytest.mark.clock


def fit_priced(rank, costs, steps, module=Priced):
    """Fit; return parameters, which steps were plain, what waited, the wrappers that live, and statistics."""
    model = module(*costs)
    strategy = SparseDDPStrategy("lags", 0.05, schedule="auto")
    trainer = make_trainer(rank, strategy, max_epochs=-1, max_steps=steps, limit_val_batches=0)
    living = []
    model.on_train_end = lambda: living.append(sum(wrapper() is not None for wrapper in model.wrappers))
    model.fit(trainer)
    return weights(model), model.were_plain, model.waiting, (len(model.wrappers), living), strategy.compression_stats()


def assert_one_model(answers):
    (first, plain, *_), (second, other_plain, *_) = answers
    assert plain == other_plain
    assert all(torch.equal(first[name], second[name]) and first[name].isfinite().all() for name in first)


def test_a_fast_network_is_left_to_ddp_with_nothing_waiting(pair):
    answers = pair.run(fit_priced, (nothing, much), SETTLED)
    assert_one_model(answers)
    for _, were_plain, waiting, (wrappers, living), stats in answers:
        turns = [len(list(run)) for was_plain, run in groupby(were_plain) if was_plain]
        assert turns[0] == turns[1] < 20
        assert all(were_plain[-60:])
        assert any(waiting)
        assert waiting[-1] == 0
        assert wrappers == 1
        assert living == [1]
        assert stats["density"] == stats["compression_ratio"] == 1.0


@pytest.mark.exhaustive
def test_a_slow_network_is_not_left_to_ddp(pair):
    answers = pair.run(fit_priced, (much, nothing), SETTLED)
    assert_one_model(answers)
    for _, were_plain, waiting, _, _ in answers:
        assert 0 < sum(were_plain) < 12
        assert not were_plain[-1]
        assert waiting[-1] > 0
