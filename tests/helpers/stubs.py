"""Stubs of what is behind the second door, whose modules type checkers cannot find, written from the first's source.

Written anew where that has changed::

    python -m tests.helpers.stubs
"""

import ast
import re
import runpy
from pathlib import Path

import lightning_sparse.callbacks

PACKAGE = Path(lightning_sparse.__file__).parent
# Its package imports the other Lightning, which need not be installed.
renamed = runpy.run_path(str(PACKAGE / "lightning" / "mirror.py"))["renamed"]
_HEAD = "# Written by `python -m tests.helpers.stubs` from the source that this module is made of.\n"


def stubs() -> dict[Path, str]:
    """Return the text of every stub, by its file."""
    callbacks = PACKAGE / "callbacks"
    tree = ast.parse((callbacks / "__init__.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and "." in str(node.module)]
    ours, exported = ["base"], []
    for node in imports:
        module = str(node.module).rpartition(".")[2]
        source = callbacks / f"{module}.py"
        if source.exists() and renamed(source.read_text()) != source.read_text():
            ours.append(module)
        else:  # knows no Lightning
            names = [each.name for each in node.names if each.name in lightning_sparse.callbacks.__all__]
            exported += [f"from {node.module} import {name} as {name}" for name in names]
    door, names = PACKAGE / "lightning", ("SparseDDPStrategy", "SparseFabricStrategy")
    strategies = [PACKAGE / "strategy" / "strategy.py", PACKAGE / "strategy" / "fabric.py"]
    return {
        door / "__init__.pyi": _HEAD
        + "".join(f"from lightning_sparse.lightning.strategy import {name} as {name}\n" for name in names),
        door / "strategy.pyi": _stub(strategies, []),
        door / "callbacks.pyi": _stub([callbacks / f"{name}.py" for name in ours], exported),
    }


def _stub(sources: list[Path], exported: list[str]) -> str:
    """Compose the stub of the public classes of some modules."""
    classes, imports = [], list(exported)
    for source in sources:
        nodes = ast.parse(renamed(source.read_text())).body
        found = [_declared(node) for node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
        classes += found
        imports += [
            f"from {node.module} import {ast.unparse(each)}"
            for node in nodes
            if isinstance(node, ast.ImportFrom)
            and not str(node.module).startswith("lightning_sparse.lightning.callbacks")
            for each in node.names
            if re.search(rf"\b{each.asname or each.name}\b", "\n".join(found))
            and f" {each.name} as " not in "\n".join(exported)
        ]
    return "\n".join([_HEAD, *sorted(set(imports)), "", *classes, ""])


def _declared(node: ast.ClassDef) -> str:
    """Return the declaration of a class: its public methods and class variables, without what they do."""
    body: list[ast.stmt] = []
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and _is_declared(each):
            each.body = [ast.Expr(ast.Constant(...))]
            each.args.defaults = [ast.Constant(...) for _ in each.args.defaults]
            body.append(each)
        elif isinstance(each, ast.AnnAssign) and not ast.unparse(each.target).startswith("_"):
            each.value = None
            body.append(each)
    node.body = body or [ast.Expr(ast.Constant(...))]
    return ast.unparse(node)


def _is_declared(method: ast.FunctionDef) -> bool:
    is_override = any(ast.unparse(each) == "override" for each in method.decorator_list)
    return method.name == "__init__" or not (is_override or method.name.startswith("_"))


if __name__ == "__main__":
    for path, text in stubs().items():
        path.write_text(text)
