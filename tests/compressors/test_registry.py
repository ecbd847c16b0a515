import pytest
from lightning_fabric.strategies import STRATEGY_REGISTRY
from pytorch_lightning.strategies import StrategyRegistry

from lightning_sparse import SparseDDPStrategy, available_compressors, register_compressor
from lightning_sparse.compressors import COMPRESSORS, TopK
from lightning_sparse.strategy.names import systems
from tests.helpers.trainers import run_fit, weights

WITH_SETTINGS = ("auto", "diloco", "loco")  # sparse_<name> has more settings than the compressor
LAUNCHES = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}


class Mine(TopK):
    """Top-k under another name."""


def fit_by_name(rank, name):
    register_compressor(name, Mine)
    trainer = run_fit(rank, f"sparse_{name}")
    assert isinstance(trainer.strategy, SparseDDPStrategy)
    return weights(trainer.lightning_module)


def entries_of(rank, name):
    register_compressor(name, Mine)
    assert f"sparse_{name}_spawn" in STRATEGY_REGISTRY.available_strategies()
    entries = {each: entry for each, entry in StrategyRegistry.items() if each.startswith(f"sparse_{name}")}
    return {each: {**entry["init_params"], "description": entry["description"]} for each, entry in entries.items()}


def test_every_compressor_has_its_strategy_and_one_description():
    described = {system.name.removeprefix("sparse_"): system.description for system in systems()}
    assert all(described.pop(name) for name in WITH_SETTINGS)
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
            "description": "Top-k under another name.",
        }
        assert entries[f"sparse_suffixed{suffix}"] == plain
        assert entries[f"sparse_suffixed{suffix}_find_unused_parameters_true"] == {
            **plain,
            "find_unused_parameters": True,
        }


@pytest.mark.parametrize("name", ["topk", *WITH_SETTINGS])
def test_a_name_that_is_taken_is_refused_and_leaves_nothing(name):
    before = StrategyRegistry.available_strategies(), dict(COMPRESSORS)
    with pytest.raises(ValueError, match=name):
        register_compressor(name, Mine)
    assert (StrategyRegistry.available_strategies(), COMPRESSORS) == before


def test_what_is_no_compressor_is_refused():
    with pytest.raises(TypeError, match="mine"):
        register_compressor("mine", int)
