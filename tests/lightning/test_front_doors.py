"""Lightning's other name: the package ``lightning``, made here as Lightning makes it, from ``pytorch_lightning``."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_sparse import SparseDDPStrategy
from tests.helpers.commands import Ended, Interpreter
from tests.helpers.packages import install
from tests.helpers.stubs import stubs
from tests.helpers.unified import unify

FIT = """
import lightning.pytorch
import lightning_sparse.lightning
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_sparse.callbacks.compression_monitor import CompressionMonitor as ForTheOther
from lightning_sparse.lightning.callbacks import AdaptiveDensity, CompressionMonitor, MomentumCorrection
from lightning_sparse.callbacks import Warmup

if __name__ == "__main__":
    quiet = dict(accelerator="cpu", devices=2, max_epochs=2, limit_train_batches=4, limit_val_batches=1,
                 logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    def fit(path):
        model = BoringModel()
        trainer = lightning.pytorch.Trainer(strategy="sparse_topk", **quiet, callbacks=[
            MomentumCorrection(), CompressionMonitor(progress_bar=True), AdaptiveDensity([Warmup(1, unit="step")]),
        ])
        trainer.fit(model, ckpt_path=path)
        return trainer
    trainer = fit(None)
    strategy = trainer.strategy
    assert isinstance(strategy, lightning.pytorch.strategies.DDPStrategy)
    assert isinstance(strategy, lightning_sparse.lightning.SparseDDPStrategy)
    assert not isinstance(strategy, lightning_sparse.strategy.SparseDDPStrategy)
    assert lightning_sparse.SparseDDPStrategy is type(strategy)  # that of the Lightning which came first
    assert ForTheOther is not CompressionMonitor
    stats = strategy.compression_stats()
    assert 0 < stats["density"] < 0.2, stats
    trainer.save_checkpoint("half.ckpt")
    assert fit("half.ckpt").global_step == 8
    print("fitted", trainer.global_step)
"""

MIXED = """
import lightning.pytorch as other
import lightning_sparse.strategy
from lightning_sparse.callbacks.compression_monitor import CompressionMonitor
from lightning.pytorch.demos.boring_classes import BoringModel

other.Trainer(strategy="sparse_lags", accelerator="cpu", devices=1, logger=False)  # known, because it came first
try:
    other.Trainer(strategy=lightning_sparse.strategy.SparseDDPStrategy(), accelerator="cpu")
except ValueError as error:
    print(error)
try:
    trainer = other.Trainer(accelerator="cpu", max_epochs=1, callbacks=[CompressionMonitor()], logger=False)
    trainer.fit(BoringModel())
except TypeError as error:
    print(error)
"""

NAMED = """
import sys
import lightning_sparse.strategy
from lightning_sparse.compressors import TopK

class Mine(TopK):
    pass

lightning_sparse.register_compressor("before", Mine)
import lightning_sparse.lightning
lightning_sparse.register_compressor("after", Mine)

import lightning.pytorch as other
import pytorch_lightning as first
from lightning.pytorch.demos.boring_classes import BoringModel

if __name__ == "__main__":
    quiet = dict(accelerator="cpu", devices=2, max_epochs=1, limit_train_batches=2, limit_val_batches=0, logger=False,
                 enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    from lightning_sparse import lightning, strategy
    strategies = {first: strategy.SparseDDPStrategy, other: lightning.SparseDDPStrategy}
    for name in ("sparse_before", "sparse_after", "sparse_installed"):
        for suffix in ("", "_spawn", "_fork", "_find_unused_parameters_true"):
            for door, strategy in strategies.items():
                entry = door.strategies.StrategyRegistry[name + suffix]
                assert entry["strategy"] is strategy
    assert "installed_package" not in sys.modules
    for door, strategy in strategies.items():
        trainer = door.Trainer(strategy="sparse_after_find_unused_parameters_true", **quiet)
        assert type(trainer.strategy) is strategy
    trainer = other.Trainer(strategy="sparse_installed_fork", **quiet)
    assert "installed_package" in sys.modules
    model = BoringModel()
    weight = model.layer.weight.detach().clone()
    trainer.fit(model)
    assert not weight.equal(model.layer.weight)
    assert trainer.strategy.compression_stats()["wire_bytes"] > 0  # of processes that are gone
"""

ORDERS = {
    "before": "import {name}\nimport lightning_sparse\n",
    "after": "import lightning_sparse\nimport {name}\n",
}
SERVED = """
import sys
assert sys.modules.keys().isdisjoint({{"lightning_sparse.engine", "lightning_sparse.schedule"}})  # not before use
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
"""
OWN_SCRIPT = """
import lightning_sparse
from lightning.pytorch.cli import LightningCLI

if __name__ == "__main__":
    cli = LightningCLI()
    print("density", cli.trainer.strategy.compression_stats()["density"])
"""
CONFIG = """
model: model.Model
trainer:
  strategy:
    class_path: lightning_sparse.SparseDDPStrategy
    init_args: {density: 0.1}
  callbacks:
    - class_path: lightning_sparse.callbacks.CompressionMonitor
    - class_path: lightning_sparse.callbacks.AdaptiveDensity
      init_args: {rules: [{class_path: lightning_sparse.callbacks.Warmup, init_args: {length: 1, unit: step}}]}
  accelerator: cpu
  devices: 2
  fast_dev_run: 2
"""
COMMAND = "from lightning_sparse.cli import main\nif __name__ == '__main__':\n    main()\n"
Run = Callable[..., Ended]
each_name = pytest.mark.parametrize("name", ["pytorch_lightning", "lightning.pytorch"])


@pytest.fixture(scope="module")
def unified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that holds a package ``lightning``."""
    root = tmp_path_factory.mktemp("unified")
    unify(root)
    return root


@pytest.fixture
def run(unified: Path, interpreter: Interpreter) -> Run:
    """Return a function that runs a script which finds the package."""

    def run_script(script: str, *arguments: str, ranks: int = 1) -> Ended:
        path = unified / "script.py"
        path.write_text(script)
        paths = os.pathsep.join([str(unified), str(Path(__file__).parents[2])])
        environment = {"PYTHONPATH": paths, "PATH": "/usr/bin:/bin", "HOME": str(unified), "CUDA_VISIBLE_DEVICES": ""}
        return interpreter.run(path, *arguments, environment=environment, ranks=ranks)

    return run_script


def test_strategies_callbacks_and_checkpoints_work_behind_the_other_name(run: Run) -> None:
    done = run(FIT, ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fitted 8") == 2  # both ranks
    assert "AdaptiveDensity: step 0: 2 parameters at 0.1 (Warmup" in done.stderr


def test_compressors_have_their_strategies_behind_both_doors(unified: Path, run: Run) -> None:
    code = "from lightning_sparse.compressors import TopK\n\nclass Theirs(TopK): ...\n"
    install(unified, "installed_package", {"installed": "installed_package:Theirs"}, code)
    done = run(NAMED)
    assert done.returncode == 0, done.stderr


@each_name
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_importing_the_package_serves_whichever_lightning_is_imported(run: Run, name: str, order: str) -> None:
    other = {"pytorch_lightning": "lightning.pytorch", "lightning.pytorch": "pytorch_lightning"}[name]
    fabric = {"pytorch_lightning": "lightning_fabric", "lightning.pytorch": "lightning.fabric"}[name]
    done = run((order + SERVED).format(name=name, other=other, fabric=fabric))
    assert done.returncode == 0, done.stderr


@pytest.fixture
def with_model(unified: Path) -> Path:
    """Return a folder that also holds a model of ``lightning.pytorch``, as tests/cli uses those of the other name."""
    (unified / "model.py").write_text(
        "from lightning.pytorch.demos.boring_classes import BoringModel\n\n\nclass Model(BoringModel): ...\n"
    )
    return unified


@pytest.mark.parametrize("script", [OWN_SCRIPT, COMMAND], ids=["own", "ours"])
def test_the_class_path_and_the_command_serve_the_other_name_too(with_model: Path, run: Run, script: str) -> None:
    (with_model / "fit.yaml").write_text(CONFIG)
    done = run(script, "fit", "--config=fit.yaml", ranks=2)
    assert done.returncode == 0, done.stderr
    assert "SparseDDPStrategy: TopK sends 0.1 of each gradient" in done.stderr


def test_plan_takes_models_of_the_other_name_too(with_model: Path, run: Run) -> None:
    network = ("--bandwidth=1gbit", "--latency=100us", "--workers=4", "--densities", "0.01")
    done = run(COMMAND, "plan", "--model=model.Model", *network)
    assert done.returncode == 0, done.stderr
    assert "Nothing pays" in done.stdout


AGAIN = """
import importlib, lightning_fabric, pytorch_lightning
import lightning_sparse
for module in (lightning_fabric, pytorch_lightning):
    importlib.reload(module)
from pytorch_lightning.strategies import StrategyRegistry
from lightning_sparse.compressors import TopK, register_compressor
register_compressor("again", TopK)
assert "sparse_again" in StrategyRegistry
assert pytorch_lightning.Trainer(strategy="sparse_lags", accelerator="cpu", devices=2).strategy.settings.compressor
"""


def test_a_lightning_that_is_imported_again_is_served_once(tmp_path: Path, interpreter: Interpreter) -> None:
    (tmp_path / "again.py").write_text(AGAIN)
    done = interpreter.run(tmp_path / "again.py")
    assert done.returncode == 0, done.stderr


def test_stubs_are_those_of_the_present_source() -> None:
    for path, text in stubs().items():
        assert path.read_text() == text, f"{path} is out of date: python -m tests.helpers.stubs"


def test_mixing_the_names_says_what_to_import(run: Run) -> None:
    done = run(MIXED)
    assert done.returncode == 0, done.stderr
    assert (
        "<SparseDDPStrategy for pytorch_lightning; for lightning.pytorch, import it from lightning_sparse.lightning>"
        in done.stdout
    )
    assert (
        "this CompressionMonitor is for pytorch_lightning; for lightning.pytorch, import it from"
        " lightning_sparse.lightning.callbacks. The Trainer is one of lightning.pytorch, which has classes of its own."
        in done.stdout
    )


def test_without_the_other_package_the_other_door_says_so() -> None:
    script = (
        "import sys\n"
        "sys.meta_path.insert(0, type('Hidden', (), {'find_spec': staticmethod(lambda name, path, target=None:"
        " (_ for _ in ()).throw(ModuleNotFoundError(name=name)) if name.startswith('lightning.') or name =="
        " 'lightning' else None)}))\n"
        "import lightning_sparse.lightning\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode != 0
    assert "which is not installed: pip install lightning" in done.stderr


def test_a_strategy_says_for_whom_it_is() -> None:
    assert repr(SparseDDPStrategy()).startswith("<SparseDDPStrategy for pytorch_lightning; for lightning.pytorch,")
