"""Names: one row of the compressors' table is a name for ``compressor=`` and, with its suffixes, for the Trainer."""

import pytest
from lightning_fabric import Fabric
from pytorch_lightning import Trainer
from pytorch_lightning.strategies import StrategyRegistry

from lightning_sparse import SparseDDPStrategy, available_compressors, register_compressor
from lightning_sparse.compressors import COMPRESSORS, STRATEGIES_WITH_SETTINGS, TopK
from lightning_sparse.strategy.names import systems
from tests.helpers.trainers import run_fit, weights

LAUNCHES = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}


class Mine(TopK):
    """Send what top-k sends. Under another name."""


def fit_by_name(rank, name):
    """Register a compressor on this rank, and fit with its strategy."""
    register_compressor(name, Mine)
    trainer = run_fit(rank, f"sparse_{name}")
    assert isinstance(trainer.strategy, SparseDDPStrategy)
    return weights(trainer.lightning_module)


def entries_of(rank, name):
    """Register a compressor on this rank, whose process is another one's; return what strategies it got."""
    register_compressor(name, Mine)
    entries = {
        each: StrategyRegistry[each]
        for each in StrategyRegistry.available_strategies()
        if each.startswith(f"sparse_{name}")
    }
    return {each: {**entry["init_params"], "description": entry["description"]} for each, entry in entries.items()}


def test_every_compressor_has_its_strategy_and_one_description():
    described = {system.name.removeprefix("sparse_"): system.description for system in systems()}
    assert all(described.pop(name) for name in STRATEGIES_WITH_SETTINGS)
    assert described == available_compressors()


def test_a_registered_compressor_trains_by_the_name_of_its_strategy(pair):
    first, second = pair.run(fit_by_name, "registered")
    assert all(first[name].equal(second[name]) for name in first)


def test_a_registered_compressor_has_every_suffix(pair):
    entries, _ = pair.run(entries_of, "suffixed")
    assert len(entries) == 2 * len(LAUNCHES)
    for suffix, start_method in LAUNCHES.items():
        plain = {
            "compressor": "suffixed",
            "start_method": start_method,
            "description": "Send what top-k sends. Under another name.",
        }
        assert entries[f"sparse_suffixed{suffix}"] == plain
        assert entries[f"sparse_suffixed{suffix}_find_unused_parameters_true"] == {
            **plain,
            "find_unused_parameters": True,
        }


@pytest.mark.parametrize("name", ["topk", *STRATEGIES_WITH_SETTINGS])
def test_a_name_that_is_taken_is_refused_and_leaves_nothing(name):
    before = StrategyRegistry.available_strategies(), dict(COMPRESSORS)
    with pytest.raises(ValueError, match=name):
        register_compressor(name, Mine)
    assert (StrategyRegistry.available_strategies(), COMPRESSORS) == before


@pytest.mark.parametrize("name", ["sparse-lags", "Sparse_Lag", "lags", "sparse_lag_find_unused_parameters_true"])
@pytest.mark.parametrize("entry_point", [Trainer, Fabric])
def test_of_a_slip_in_a_name_it_is_said_what_was_meant(entry_point, name):
    hint, refusal = "is unknown; did you mean 'sparse_lags", "invalid strategy name"
    with pytest.warns(UserWarning, match=hint), pytest.raises(ValueError, match=refusal):
        entry_point(strategy=name, accelerator="cpu")


@pytest.mark.parametrize("name", ["sparse_mine", "ddpp"])
def test_of_a_name_like_none_of_ours_nothing_is_said(name):
    assert name not in StrategyRegistry  # of a slip this warns, as above


def test_what_is_no_compressor_is_refused():
    with pytest.raises(TypeError, match="mine"):
        register_compressor("mine", int)
