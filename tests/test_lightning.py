"""Both names of Lightning. The ``lightning`` package is generated from ``pytorch_lightning``, as Lightning does."""

import compileall
import os
import re
import shutil
from pathlib import Path

import lightning_fabric
import pytest
import pytorch_lightning

FIT = """
import lightning.pytorch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_sparse.callbacks import AdaptiveDensity, CompressionMonitor, ErrorBudget, MomentumCorrection

if __name__ == "__main__":
    quiet = dict(accelerator="cpu", devices=2, max_epochs=2, limit_train_batches=4, limit_val_batches=1,
                 logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    def fit(path):
        model = BoringModel()
        trainer = lightning.pytorch.Trainer(strategy="sparse_topk", **quiet, callbacks=[
            MomentumCorrection(), CompressionMonitor(progress_bar=True), AdaptiveDensity([ErrorBudget(9.0)]),
        ])
        trainer.fit(model, ckpt_path=path)
        return trainer
    trainer = fit(None)
    assert 0 < trainer.strategy.compression_stats()["density"] < 0.2
    trainer.save_checkpoint("half.ckpt")
    assert fit("half.ckpt").global_step == 8
"""
SERVED = """
import sys

import {fabric}
from {name} import Trainer
quiet = dict(accelerator="cpu", devices=1, logger=False)
for strategy in ("sparse_lags", "lightning_sparse.SparseDDPStrategy", lightning_sparse.SparseDDPStrategy(density=0.1)):
    assert isinstance(Trainer(strategy=strategy, **quiet).strategy, lightning_sparse.SparseDDPStrategy)
from {fabric} import Fabric
for strategy in ("sparse_lags", "lightning_sparse.SparseFabricStrategy", lightning_sparse.SparseFabricStrategy()):
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=1)
    assert isinstance(fabric.strategy, {fabric}.strategies.DDPStrategy)
assert {other!r} not in sys.modules
import {other} as other
from {other}.demos.boring_classes import BoringModel
from lightning_sparse.callbacks import CompressionMonitor
for strategy, callbacks in (
    ("sparse_lags", []), (lightning_sparse.SparseDDPStrategy(), []), ("auto", [CompressionMonitor()])
):
    try:
        other.Trainer(strategy=strategy, callbacks=callbacks, max_epochs=1, **quiet).fit(BoringModel())
    except (TypeError, ValueError) as error:
        is_explicit = "to use {other}, import {other} before {name}" in str(error)
        assert is_explicit or "invalid strategy name" in str(error), error
    else:
        raise AssertionError(strategy)
"""
CONFIG = """
model: model.Model
trainer:
  strategy:
    class_path: lightning_sparse.SparseDDPStrategy
    init_args: {density: 0.1}
  callbacks:
    - class_path: lightning_sparse.callbacks.CompressionMonitor
  accelerator: cpu
  devices: 2
  fast_dev_run: 2
"""
COMMAND = """
import lightning.pytorch.cli
import lightning_sparse

if __name__ == "__main__":
    lightning.pytorch.cli.LightningCLI()
"""
FABRICS = {"pytorch_lightning": "lightning_fabric", "lightning.pytorch": "lightning.fabric"}


@pytest.fixture(scope="module")
def unified(tmp_path_factory):
    root = tmp_path_factory.mktemp("unified")
    for package, name in ((pytorch_lightning, "pytorch"), (lightning_fabric, "fabric")):
        target = root / "lightning" / name
        shutil.copytree(Path(package.__file__).parent, target, ignore=shutil.ignore_patterns("__pycache__"))
        for path in target.rglob("*.py"):
            text = re.sub(r"\bpytorch_lightning\b", "lightning.pytorch", path.read_text())
            path.write_text(re.sub(r"\blightning_fabric\b", "lightning.fabric", text))
    (root / "lightning" / "__init__.py").touch()
    compileall.compile_dir(root, quiet=1)  # compiled once for all processes
    model = "from lightning.pytorch.demos.boring_classes import BoringModel\n\n\nclass Model(BoringModel): ...\n"
    (root / "model.py").write_text(model)
    (root / "fit.yaml").write_text(CONFIG)
    return root


@pytest.fixture
def run(unified, interpreter):
    def run_script(script, *arguments, ranks=1):
        path = unified / "script.py"
        path.write_text(script)
        paths = os.pathsep.join([str(unified), str(Path(__file__).parents[1])])
        environment = {"PYTHONPATH": paths, "PATH": "/usr/bin:/bin", "HOME": str(unified), "CUDA_VISIBLE_DEVICES": ""}
        done = interpreter.run(path, *arguments, environment=environment, ranks=ranks)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    return run_script


@pytest.mark.exhaustive
def test_strategies_callbacks_and_checkpoints_work_with_the_other_name(run):
    run(FIT, ranks=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "imports",
    [
        "import pytorch_lightning\nimport lightning_sparse\n",
        "import lightning.pytorch\nimport lightning_sparse\n",
    ],
)
def test_whichever_lightning_is_imported_first_is_served_and_the_other_is_told(run, imports):
    name, other = list(FABRICS)[:: -1 if "lightning.pytorch" in imports else 1]
    run(imports + SERVED.format(name=name, other=other, fabric=FABRICS[name]))


@pytest.mark.exhaustive
def test_class_paths_serve_the_other_name(run):
    assert "SparseDDPStrategy: LAGS sends 0.1" in run(COMMAND, "fit", "--config=fit.yaml", ranks=2)
