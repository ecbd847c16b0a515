"""Every promise names a test that exists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_promise_has_its_test() -> None:
    rows = re.findall(r"`([\w/]*(?:\.py)?)(?:::(\w+))?`", (ROOT / "docs" / "promises.md").read_text())
    file, found = "", 0
    for path, name in rows:
        if path.endswith(".py"):
            file = path
            assert (ROOT / file).is_file(), file
        if name:
            functions = [
                node.name
                for node in ast.walk(ast.parse((ROOT / file).read_text()))
                if isinstance(node, ast.FunctionDef)
            ]
            assert name in functions, f"{file}::{name}"
            found += 1
    assert found > 25
