"""The house stays in order: imports run downward, and nothing outgrows a reader."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "lightning_sparse"
FILES = sorted(PACKAGE.rglob("*.py"))

# Each row may import from the rows above it and from its own folder, never from its neighbours in the row.
LAYERS = [
    {"installed"},
    {"selection", "named", "mirror", "functional", "layout", "metrics", "origin"},
    {"end_to_end", "feedback"},
    {"compressors", "memory", "wire", "collectives", "schedule", "observe"},
    {"merging", "density", "settings", "timeline", "rules"},
    {"pipeline", "replicas", "planning"},
    {"hook"},
    {"engine"},
    {"registry"},
    {"strategy", "prediction"},
    {"testing"},
    {"callbacks"},
    {"lightning"},
    {"__init__"},
    {"parser"},
    {"plan", "submit"},
    {"cli"},
    {"__main__"},
]
KNOWS_LIGHTNING = {
    "strategy",
    "callbacks",
    "cli",
    "parser",
    "plan",
    "submit",
    "lightning",
    "__init__",
}


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return what a file is made of."""
    return list(ast.walk(ast.parse(path.read_text())))


def noun(path: Path) -> str:
    """Return the noun that a file belongs to: its folder, or its own name."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Return the dotted names of the modules that a file imports."""
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(str(node.module))
    return names


def layer_of(name: str) -> int:
    """Return how high a noun stands."""
    return next(height for height, nouns in enumerate(LAYERS) if name in nouns)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_downward(path: Path) -> None:
    for name in imported(path):
        if not name.startswith("lightning_sparse"):
            continue
        target = [*name.split("."), "__init__"][1]
        assert target == noun(path) or layer_of(target) < layer_of(noun(path)), f"{noun(path)} imports {target}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_doors_know_lightning(path: Path) -> None:
    if noun(path) not in KNOWS_LIGHTNING:
        assert not any("lightning" in name and not name.startswith("lightning_sparse") for name in imported(path))


def test_what_tests_share_lies_beside_them() -> None:
    for path in Path(__file__).parent.rglob("*.py"):
        assert not any(re.match(r"tests\.(.*\.)?test_", name) for name in imported(path)), f"{path} imports a test"


def test_functional_knows_nothing_but_torch() -> None:
    standard = ("math", "typing", "collections", "itertools", "functools", "threading")
    allowed = ("torch", *standard, "lightning_sparse.functional")
    for path in (PACKAGE / "functional").glob("*.py"):
        assert all(name.startswith(allowed) for name in imported(path)), path


def test_only_the_hook_knows_buckets() -> None:
    assert [path.name for path in FILES if "GradBucket" in path.read_text()] == ["hook.py"]


def test_only_collectives_the_engine_and_the_doors_call_torch_distributed() -> None:
    calling = {path.name for path in FILES if "torch.distributed" in imported(path) and noun(path) != "testing"}
    assert calling == {"collectives.py", "engine.py", "hook.py", "job.py", "requeue.py", "strategy.py"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_outgrows_a_reader(path: Path) -> None:
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            assert not body or node.end_lineno - body[0].lineno < 40, f"{node.name} is too long"
            arguments = [argument.arg for argument in node.args.args]
            assert all(len(name) > 2 for name in arguments), f"{node.name} has an argument of one or two letters"
