import sys
from pathlib import Path

import pytest
import yaml
from pytorch_lightning import Trainer

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.cli import main
from tests.helpers.commands import COMMAND, MODEL, begin, refusal

OWN_SCRIPT = """
import lightning_sparse
import torch
from pytorch_lightning.cli import LightningCLI
from pytorch_lightning.demos.boring_classes import BoringModel

class Model(BoringModel):
    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Linear(2, 2)

if __name__ == "__main__":
    cli = LightningCLI(Model)
    if cli.trainer.is_global_zero:
        print("\\nratio", cli.trainer.strategy.compression_stats()["total_compression_ratio"])
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


@pytest.mark.exhaustive
def test_fits_with_a_strategy_name(interpreter, tmp_path):
    options = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.fast_dev_run=true"]
    words = ["fit", MODEL, "--trainer.strategy=sparse_topk", *options, f"--trainer.default_root_dir={tmp_path}"]
    done = interpreter.run(Path(COMMAND), *words)
    assert done.returncode == 0, done.stderr
    assert "All distributed processes registered. Starting with 2 processes" in done.stderr


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


def test_a_script_of_the_users_own_knows_the_names(pair, tmp_path):
    script, config = tmp_path / "train.py", tmp_path / "fit.yaml"
    script.write_text(OWN_SCRIPT)
    config.write_text(
        "trainer:\n  strategy:\n    class_path: lightning_sparse.SparseDDPStrategy\n"
        "    init_args: {density: 0.1, find_unused_parameters: true}\n"
        "  accelerator: cpu\n  devices: 2\n  fast_dev_run: 2\n"
    )
    said, _ = pair.run(begin, str(script), ("fit", f"--config={config}"), str(tmp_path))
    (ratio,) = [float(line.split()[1]) for line in said.splitlines() if line.startswith("ratio")]
    assert ratio > 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--model=tests.helpers.trainers.Smal", "Smal"),
        ("--trainer.callbacks=lightning_sparse.callbacks.AdaptivDensity", "AdaptivDensity"),
    ],
)
def test_a_class_that_is_not_there_is_named(word, said, capsys):
    assert said in "\n".join(refusal(capsys, "fit", MODEL, word))


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
