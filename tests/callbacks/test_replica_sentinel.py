"""ReplicaSentinel: one bit on one rank is found, named, and acted upon."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.callbacks import ReplicaSentinel
from lightning_sparse.callbacks.replica_sentinel import ReplicaError
from lightning_sparse.testing.pool import Pool
from tests.helpers.sparse_ddp import AGREEING_NAMES, DENSITY
from tests.helpers.trainers import Small, make_trainer, run_fit, weights


class Tampered(Small):
    """A model in which the second rank's bits change after a step."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Change them."""
        if self.global_rank == 1 and batch_idx == 5:
            with torch.no_grad():
                bias = self.network[2].bias
                bias[3] = bias[3].nextafter(bias.new_tensor(9.0))
                self.network[2].weight[0, 0] += 1


def fit_tampered(rank: int, action: str) -> tuple[int, str]:
    """Fit with a sentinel; return the steps made and what it said."""
    trainer = make_trainer(rank, SparseDDPStrategy(density=0.05), callbacks=[ReplicaSentinel(4, action)])
    if action == "raise":
        with pytest.raises(ReplicaError) as caught:
            trainer.fit(Tampered())
        return trainer.global_step, str(caught.value)
    if rank > 0:
        trainer.fit(Tampered())
        return trainer.global_step, ""
    with pytest.warns(UserWarning, match="no longer one model") as warned:
        trainer.fit(Tampered())
    return trainer.global_step, str(next(each.message for each in warned if "one model" in str(each.message)))


def test_a_changed_parameter_ends_training_on_all_ranks_and_is_named(pair: Pool) -> None:
    for steps, message in pair.run(fit_tampered, "raise"):
        assert steps == 8
        assert "after step 7 the parameter 'network.2.weight' differs from rank 0's on rank 1" in message
        assert "(2 of 4 parameters differ)" in message


def test_a_warning_lets_training_go_on(pair: Pool) -> None:
    (steps, message), (others, _) = pair.run(fit_tampered, "warn")
    assert steps == others == 16
    assert "'network.2.weight' differs" in message


def fit_guarded(rank: int, compressor: str, guards: bool) -> dict[str, Tensor]:
    """Fit a sound model, with a sentinel or without one."""
    callbacks = [ReplicaSentinel(every_n_steps=1)] if guards else []
    strategy = SparseDDPStrategy(compressor, density=DENSITY[compressor])
    return weights(run_fit(rank, strategy, callbacks=callbacks).lightning_module)


@pytest.mark.parametrize("compressor", AGREEING_NAMES)
def test_sound_replicas_pass_and_keep_every_bit(pair: Pool, compressor: str) -> None:
    guarded, _ = pair.run(fit_guarded, compressor, True)
    alone, _ = pair.run(fit_guarded, compressor, False)
    assert all(torch.equal(guarded[name], alone[name]) for name in alone)


def refused(rank: int) -> str:
    """Try a method whose replicas drift apart."""
    trainer = make_trainer(rank, SparseDDPStrategy("a2sgd"), callbacks=[ReplicaSentinel()])
    with pytest.raises(ValueError, match="by design") as caught:
        trainer.fit(Small())
    return str(caught.value)


def test_a_method_that_lets_replicas_drift_is_refused_with_the_cure(pair: Pool) -> None:
    for message in pair.run(refused):
        assert re.search(r"what A2SGD does by design.*Remove the callback; replica_divergence", message)


@pytest.mark.parametrize("every", [0, -100, "often"])
def test_a_bad_interval_is_refused(every: Any) -> None:
    with pytest.raises(ValueError, match=rf"every_n_steps={every!r} must be a whole number of steps, at least 1"):
        ReplicaSentinel(every)


def test_an_unknown_action_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"action='rise' is unknown; choose one of: raise, warn \(did you mean 'raise'"
    ):
        ReplicaSentinel(action="rise")
