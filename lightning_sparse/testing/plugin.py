"""The pytest side of the conformance kit: its option, and what the laws ask pytest for."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import pytest

from lightning_sparse.engine.refusals import takes_wire
from lightning_sparse.testing.pool import Pool
from lightning_sparse.testing.subjects import COMPRESSOR_NAMES, subject_of

_LAWS = Path(__file__).parent / "laws"
_FILES = [str(_LAWS / f"{name}.py") for name in ("mass", "replicas", "finiteness", "edges")]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names who is held to the laws."""
    parser.getgroup("lightning_sparse").addoption(
        "--compressor",
        metavar="MODULE:CLASS",
        help="hold this compressor to the laws of lightning_sparse, instead of collecting tests of your own; files that"
        " are named on the command line are collected as well",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Collect the laws, if a compressor is to be held to them; a ``UsageError`` says that it cannot be built."""
    chosen: Optional[str] = config.getoption("--compressor")
    if chosen is None:
        return
    try:
        subject_of(chosen)
    except (ValueError, TypeError) as error:
        raise pytest.UsageError(f"--{error}") from error
    are_named = config.args_source is pytest.Config.ArgsSource.ARGS
    config.args = [*(config.args if are_named else []), *_FILES]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Try a law with every compressor that it holds for."""
    promise = getattr(metafunc.function, "promise", None)
    if promise is None:
        return
    chosen: Optional[str] = metafunc.config.getoption("--compressor")
    names = COMPRESSOR_NAMES if chosen is None else [chosen]
    metafunc.parametrize("compressor", [name for name in names if promise(subject_of(name))])


@pytest.hookimpl(tryfirst=True)  # whatever else chooses among cases has only those that are possible
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is refused: a compressor with a wire that it does not take."""
    refused = [item for item in items if not _is_possible(getattr(item, "callspec", None))]
    if refused:
        config.hook.pytest_deselected(items=refused)
        items[:] = [item for item in items if item not in refused]


def _is_possible(case: Any) -> bool:
    given = {} if case is None else case.params
    name, wire = given.get("compressor"), given.get("wire")
    return not (isinstance(name, str) and isinstance(wire, str)) or takes_wire(subject_of(name), wire)


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, Pool]]:
    """Pools of gloo processes by number of ranks; started when first used."""
    largest = Pool(4)
    yield {ranks: largest.first(ranks) for ranks in (1, 2, 3, 4)}
    largest.stop()


@pytest.fixture
def pair(pools: dict[int, Pool]) -> Pool:
    """Two ranks."""
    return pools[2]
