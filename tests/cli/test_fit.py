import re
import sys

import pytest
import yaml
from pytorch_lightning import Trainer

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.cli import main
from tests.helpers.commands import COMMAND, MODEL, begin

CONFIG = """
trainer:
  strategy: sparse_lags
  accelerator: cpu
  devices: 2
  max_epochs: 1
  limit_train_batches: 4
  limit_val_batches: 0
  enable_checkpointing: false
  enable_progress_bar: false
  logger: false
  default_root_dir: {root}
  callbacks:
    - class_path: lightning_sparse.callbacks.MomentumCorrection
      init_args: {{momentum: optimizer, clip_norm: 1.0}}
    - class_path: lightning_sparse.callbacks.AdaptiveDensity
      init_args:
        max_density: 0.2
        every_n_steps: 1
        rules:
          - class_path: lightning_sparse.callbacks.ErrorBudget
            init_args: {{budget: 0.001}}
"""


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Suppress Lightning's deprecation warning and hide pytest's arguments."""
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    monkeypatch.setattr(sys, "argv", ["lightning-sparse"])


def answer(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main([*arguments])
    assert stop.value.code in (None, 0)
    return capsys.readouterr().out


def test_a_strategy_is_built_from_plain_arguments(capsys):
    given = {"density": 0.02, "wire": "bfloat16", "local_steps": 4, "find_unused_parameters": True}
    words = [f"--trainer.strategy.{name}={value}" for name, value in given.items()]
    words.append("--trainer.strategy.schedule=lightning_sparse.schedule.FixedSize")
    words += ["--trainer.strategy.schedule.min_elements=1000", "--print_config"]
    printed = answer(capsys, "fit", MODEL, "--trainer.strategy=SparseDDPStrategy", *words)
    arguments = yaml.safe_load(printed)["trainer"]["strategy"]["init_args"]
    assert arguments["schedule"]["init_args"] == {"min_elements": 1000}
    # Defaults of DDP, except the defaults that the strategy changes.
    defaults = {"resume_compression": True, "static_graph": False}
    assert {**given, **defaults}.items() <= arguments.items()


def test_rules_are_built_from_yaml(pair, tmp_path):
    config = tmp_path / "fit.yaml"
    config.write_text(CONFIG.format(root=tmp_path))
    said, _ = pair.run(begin, COMMAND, ("fit", MODEL, f"--config={config}"), str(tmp_path))
    assert "momentum before selection: optimizer" in said
    # Without the rule, the ratio is larger, because the rule doubles the density after each step.
    assert float(re.search(r"compression ratio ([\d.]+)", said)[1]) < 40


def test_a_class_path_alone_is_a_strategy(capsys):
    strategy = "lightning_sparse.SparseDDPStrategy"
    assert isinstance(Trainer(strategy=strategy, accelerator="cpu", logger=False).strategy, SparseDDPStrategy)
    printed = answer(capsys, "fit", MODEL, f"--trainer.strategy={strategy}", "--print_config")
    assert f"strategy: {strategy}" in printed


def test_the_command_finds_a_model_in_the_folder_where_it_is_run(capsys, monkeypatch, tmp_path):
    (tmp_path / "beside.py").write_text(
        "from pytorch_lightning.demos.boring_classes import BoringModel\nclass Model(BoringModel): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    # pip's console script has the script's folder on its path, but not the current folder.
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    assert "beside.Model" in answer(capsys, "fit", "--model=beside.Model", "--print_config")
