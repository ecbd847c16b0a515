"""The package ``lightning``, made here as Lightning makes it, from ``pytorch_lightning``.

For type checkers, in a folder::

    python -m tests.helpers.unified build/unified
"""

import re
import shutil
import sys
from pathlib import Path

import lightning_fabric
import pytorch_lightning


def unify(root: Path) -> None:
    """Write the package into a folder."""
    shutil.rmtree(root / "lightning", ignore_errors=True)
    for package, name in ((pytorch_lightning, "pytorch"), (lightning_fabric, "fabric")):
        target = root / "lightning" / name
        shutil.copytree(Path(package.__file__).parent, target, ignore=shutil.ignore_patterns("__pycache__"))
        for path in target.rglob("*.py"):
            text = re.sub(r"\bpytorch_lightning\b", "lightning.pytorch", path.read_text())
            path.write_text(re.sub(r"\blightning_fabric\b", "lightning.fabric", text))
    (root / "lightning" / "__init__.py").touch()


if __name__ == "__main__":
    unify(Path(sys.argv[1]))
