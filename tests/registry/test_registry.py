"""Names: one row of the compressors' table is a name for ``compressor=`` and, with its suffixes, for the Trainer."""

import sys
from pathlib import Path
from typing import Any

import pytest
from lightning_fabric import Fabric
from pytorch_lightning import Trainer
from pytorch_lightning.strategies import StrategyRegistry
from torch import Tensor

from lightning_sparse import Compressor, SparseDDPStrategy, available_compressors, register_compressor
from lightning_sparse.compressors import COMPRESSORS, TopK
from lightning_sparse.registry import NamedTable
from lightning_sparse.strategy.names import systems
from lightning_sparse.testing.pool import Pool
from tests.helpers.packages import GROUP, install
from tests.helpers.trainers import run_fit, weights

LAUNCHES = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}


class Mine(TopK):
    """Send what top-k sends. Under another name."""


def fit_by_name(rank: int, name: str) -> dict[str, Tensor]:
    """Register a compressor on this rank, and fit with its strategy."""
    register_compressor(name, Mine)
    trainer = run_fit(rank, f"sparse_{name}")
    assert isinstance(trainer.strategy, SparseDDPStrategy)
    return weights(trainer.lightning_module)


def entries_of(rank: int, name: str) -> dict[str, Any]:
    """Register a compressor on this rank, whose process is another one's; return what strategies it got."""
    register_compressor(name, Mine)
    entries = {each: entry for each, entry in StrategyRegistry.items() if each.startswith(f"sparse_{name}")}
    return {each: {**entry["init_params"], "description": entry["description"]} for each, entry in entries.items()}


def table(group: str = GROUP) -> NamedTable[Compressor]:
    """Build a table with one row of its own, to which packages may bring others."""
    return NamedTable("compressor", Compressor, {"topk": TopK}, group)


def test_every_compressor_has_its_strategy_and_one_description() -> None:
    described = {system.name.removeprefix("sparse_"): system.description for system in systems()}
    assert all(described.pop(name) for name in ("auto", "diloco", "loco"))
    assert described == available_compressors()


def test_a_registered_compressor_trains_by_the_name_of_its_strategy(pair: Pool) -> None:
    first, second = pair.run(fit_by_name, "registered")
    assert all(first[name].equal(second[name]) for name in first)


def test_a_registered_compressor_has_every_suffix(pair: Pool) -> None:
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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("topk", "compressor 'topk' is already registered as <class"),
        ("auto", "strategy 'sparse_auto' exists already: choose another name than 'auto'"),
        ("topk_spawn", "strategy 'sparse_topk_spawn' exists already"),
    ],
)
def test_a_name_that_is_taken_is_refused_and_leaves_nothing(name: str, message: str) -> None:
    before = StrategyRegistry.available_strategies(), COMPRESSORS.descriptions()
    with pytest.raises(ValueError, match=message):
        register_compressor(name, Mine)
    assert (StrategyRegistry.available_strategies(), COMPRESSORS.descriptions()) == before


@pytest.mark.parametrize("name", ["sparse-lags", "Sparse_Lag", "lags", "sparse_lag_find_unused_parameters_true"])
@pytest.mark.parametrize("door", [Trainer, Fabric])
def test_of_a_slip_in_a_name_it_is_said_what_was_meant(door: Any, name: str) -> None:
    hint, refusal = "is unknown; did you mean 'sparse_lags", "invalid strategy name"
    with pytest.warns(UserWarning, match=hint), pytest.raises(ValueError, match=refusal):
        door(strategy=name, accelerator="cpu")


@pytest.mark.parametrize("name", ["sparse_mine", "ddpp"])
def test_of_a_name_like_none_of_ours_nothing_is_said(name: str) -> None:
    assert name not in StrategyRegistry.available_strategies()


def test_what_is_no_compressor_is_refused() -> None:
    with pytest.raises(TypeError, match="compressor 'mine' must be a subclass of Compressor, got <class 'int'>"):
        register_compressor("mine", int)  # type: ignore[arg-type]


def test_a_package_brings_a_row_that_is_imported_when_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from lightning_sparse.compressors import TopK\n\nclass Theirs(TopK): ...\n"
    install(tmp_path, "lazy_package", {"theirs": "lazy_package:Theirs"}, code)
    monkeypatch.syspath_prepend(tmp_path)
    rows = table()
    assert rows.names() == ["theirs", "topk"]
    assert rows.descriptions()["theirs"] == "'lazy_package:Theirs' of the package 'lazy_package' 1.2"
    told: list[str] = []
    rows.announce(lambda name, description: told.append(name))
    assert told == ["topk", "theirs"]
    assert "lazy_package" not in sys.modules
    assert type(rows.resolve("theirs")).__name__ == "Theirs"


def test_a_package_may_also_register_its_row_while_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = table()
    monkeypatch.setattr(sys.modules[__name__], "ROWS", rows, raising=False)
    code = f"from {__name__} import Mine, ROWS\n\nclass Theirs(Mine): ...\n\nROWS.register('theirs', Theirs)\n"
    install(tmp_path, "eager_package", {"theirs": "eager_package:Theirs"}, code)
    monkeypatch.syspath_prepend(tmp_path)
    assert type(rows.resolve("theirs")).__name__ == "Theirs"


BROKEN: dict[str, tuple[str, type[Exception], str]] = {
    "import nowhere_to_be_found": (
        "broken_package:Theirs",
        ImportError,
        "compressor 'theirs' cannot be imported from 'broken_package:Theirs' of the package 'broken_package' 1.2:"
        " ModuleNotFoundError: No module named 'nowhere_to_be_found'; upgrade or uninstall that package",
    ),
    "": (
        "broken_package:Theirs",
        ImportError,
        "of the package 'broken_package' 1.2: AttributeError: module 'broken_package' has no attribute 'Theirs'",
    ),
    "Theirs = int": (
        "broken_package:Theirs",
        TypeError,
        r"of the package 'broken_package' 1.2\) must be a subclass of Compressor, got <class 'int'>",
    ),
}


@pytest.mark.parametrize("code", BROKEN, ids=["missing module", "missing class", "no compressor"])
def test_a_broken_package_is_named_when_its_row_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    value, error, message = BROKEN[code]
    install(tmp_path, "broken_package", {"theirs": value}, code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_package", raising=False)
    rows = table()
    assert isinstance(rows.resolve("topk"), TopK)
    with pytest.raises(error, match=message):
        rows.resolve("theirs")


def test_packages_that_bring_the_same_name_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "first_package", {"theirs": "first_package:One"})
    install(tmp_path, "second_package", {"theirs": "second_package:Two"})
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="brought by more than one package: 'first_package:One' of the") as said:
        table().resolve("theirs")
    assert "'second_package:Two' of the package 'second_package' 1.2; uninstall all but one" in str(said.value)


def test_a_package_that_brings_a_name_of_ours_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "clashing_package", {"topk": "clashing_package:Top"})
    monkeypatch.syspath_prepend(tmp_path)
    rows = table()
    with pytest.warns(UserWarning, match=r"compressor 'topk' \('clashing_package:Top' of the package 'clash.*left out"):
        assert rows.names() == ["topk"]
    assert isinstance(rows.resolve("topk"), TopK)


def test_a_package_whose_strategy_is_taken_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "clashing_package", {"auto": "clashing_package:Auto"})
    monkeypatch.syspath_prepend(tmp_path)
    rows = table()

    def refuse_auto(name: str, description: str) -> None:
        if name == "auto":
            raise ValueError("strategy 'sparse_auto' exists already")

    with pytest.warns(UserWarning, match="of the package 'clashing_package' 1.2.*left out: strategy 'sparse_auto'"):
        rows.announce(refuse_auto)
    assert rows.names() == ["topk"]


def test_registering_a_name_that_another_package_brings_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "other_package", {"mine": "other_package:Theirs"})
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="already registered as 'other_package:Theirs' of the package 'other_package'"):
        table().register("mine", Mine)


def test_there_is_nobody_to_bring_schedules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "schedule_package", {"theirs": "schedule_package:Theirs"}, group="lightning_sparse.schedules")
    monkeypatch.syspath_prepend(tmp_path)
    assert NamedTable[Any]("schedule", object, {}).names() == []
