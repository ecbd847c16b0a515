"""The command line."""

import re
import sys
from pathlib import Path

import pytest
import yaml
from pytorch_lightning import Trainer

from lightning_sparse import LocalSteps, SparseDDPStrategy, callbacks
from lightning_sparse.cli import main
from lightning_sparse.cli.parser import SparseCLI
from lightning_sparse.strategy.names import systems
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
    """Keep Lightning's own deprecation to itself, and pytest's words from the parser."""
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    monkeypatch.setattr(sys, "argv", ["lightning-sparse"])


def answer(capsys, *arguments):
    """Return what is printed for arguments that only ask."""
    with pytest.raises(SystemExit) as stop:
        main([*arguments])
    assert stop.value.code in (None, 0)
    return capsys.readouterr().out


def refused(capsys, *arguments):
    """Return the one line that is said of arguments that are refused, after one of usage."""
    *_, usage, tip, error = refusal(capsys, *arguments)
    assert usage.startswith("usage: lightning-sparse")
    assert tip.startswith("tip: For details")
    assert error.startswith("error: ")
    return error


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
    printed = answer(capsys, "fit", MODEL, "--trainer.strategy=lightning_sparse.SparseDDPStrategy", *words)
    arguments = yaml.safe_load(printed)["trainer"]["strategy"]["init_args"]
    assert arguments["schedule"]["init_args"] == {"min_elements": 1000}
    # Those of DDP, too, but not its default in place of ours.
    defaults = {"resume_compression": True, "static_graph": False, "gradient_as_bucket_view": True}
    assert {**given, **defaults}.items() <= arguments.items()


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("strategy: sparse_lags", ["--trainer.strategy.density=0.05"]),
        ("strategy: sparse_lags", ["--trainer.strategy.init_args.density", "0.05"]),
        ("max_epochs: 3", ["--trainer.strategy=sparse_lags", "--trainer.strategy.density", "0.05"]),
        ("strategy: sparse_lags", ["--config={folder}/more.yaml"]),
    ],
)
def test_a_name_and_arguments_beside_it_are_a_strategy(strategy, more, tmp_path, capsys):
    (tmp_path / "fit.yaml").write_text(f"trainer: {{{strategy}}}\n")
    (tmp_path / "more.yaml").write_text("trainer: {strategy: {init_args: {density: 0.05}}}\n")
    words = [f"--config={tmp_path}/fit.yaml", *(word.format(folder=tmp_path) for word in more)]
    words += ["--trainer.strategy.wire=bfloat16", "--print_config"]
    printed = yaml.safe_load(answer(capsys, "fit", MODEL, *words))["trainer"]["strategy"]
    arguments = {"compressor": "lags", "density": 0.05, "wire": "bfloat16", "start_method": "popen"}
    assert printed["class_path"].endswith(".SparseDDPStrategy")
    assert arguments.items() <= printed["init_args"].items()


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("sparse_loco", ["density=0.05"], {"density": 0.05, "local_steps": LocalSteps(30, residual_decay=0.95)}),
        ("sparse_diloco", ["local_steps.every=7"], {"local_steps": LocalSteps(7, 0.7, 0.9, True)}),
        ("sparse_topk", ["levels=1", "optimizer_correction=null"], {"levels": 1, "optimizer_correction": None}),
    ],
)
def test_a_name_keeps_what_no_argument_changes_and_the_saved_file_says_all(name, words, expected, tmp_path):
    options = [MODEL, "--seed_everything=false", "--trainer.accelerator=cpu", f"--trainer.strategy={name}"]
    given = SparseCLI(args=[*options, *(f"--trainer.strategy.{word}" for word in words)], run=False)
    (tmp_path / "saved.yaml").write_text(given.parser.dump(given.config, skip_none=False))
    saved = SparseCLI(args=[f"--config={tmp_path / 'saved.yaml'}"], run=False)
    for settings in (given.trainer.strategy.settings, saved.trainer.strategy.settings):
        assert {field: getattr(settings, field) for field in expected} == expected


def test_the_help_and_the_refusal_of_another_command_list_all(capsys):
    assert "{fit,validate,test,predict,plan} ..." in answer(capsys, "--help")
    said = refusal(capsys, "fti")[-1]
    assert "choose one of: fit, validate, test, predict, plan (did you mean 'fit'?)" in said


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


STRATEGY = "trainer: {strategy: {class_path: lightning_sparse.SparseDDPStrategy, init_args: {%s}}}"
LAGS = STRATEGY % "compressor: {class_path: lightning_sparse.compressors.LAGS, init_args: {%s}}"
OTHER = "{class_path: pytorch_lightning.callbacks.EarlyStopping, init_args: {monitor: val_loss}}"
RULES = "init_args: {rules: [{class_path: lightning_sparse.compressors.density.ErrorBudget, init_args: {%s}}]}"
CALLBACK = f"trainer: {{callbacks: [{{class_path: lightning_sparse.callbacks.AdaptiveDensity, {RULES}}}, {OTHER}]}}"


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("slip", "said"),
    [
        ("--trainer.max_epoks=3", "trainer.max_epoks"),
        ("--trainer.max_epochs=few", "trainer.max_epochs=few must be Optional[int]"),
        ("--trainer.strategy=sparse_lag", "trainer.strategy='sparse_lag' is unknown (did you mean 'sparse_lags'?)"),
        ("--trainer.strategy=dpp", "(did you mean 'ddp'?)"),
        ("--trainer.strategy=sparse_blockmax", "init_args.compressor: mymodule.MyCompressor"),
        ("--trainer.strategy.density=0.05", "trainer.strategy='auto' takes no arguments"),
        ("trainer: {max_epoch: 3}", "trainer.max_epoch"),
        ("trainer: {max_epochs: few}", "trainer.max_epochs=few must be Optional[int]"),
        ("trainer: {strategy: sparse_lag}", "trainer.strategy='sparse_lag' is unknown (did you mean 'sparse_lags'?)"),
        (STRATEGY % "wyre: float16", "SparseDDPStrategy: Option 'wyre'"),
        (STRATEGY % "density: 1.5", "SparseDDPStrategy: density=1.5 must be a fraction of elements"),
        (STRATEGY % "density: 1%", "density=1% must be Optional[float]: fraction of elements sent, 0 < density"),
        (STRATEGY % "compressor: blockmax", "SparseDDPStrategy: compressor='blockmax' is unknown"),
        (LAGS % "error_fedback: update", "LAGS: Option 'error_fedback'"),
        (LAGS % "densities: {a: 3.0}", "LAGS: densities['a']=3.0 must be a fraction of elements"),
        (CALLBACK % "budgt: 3", "ErrorBudget: Option 'budgt'"),
        (CALLBACK % "budget: much", "ErrorBudget: budget=much must be float: "),
    ],
)
def test_a_slip_is_one_line(slip, said, tmp_path, capsys):
    (tmp_path / "fit.yaml").write_text(f"seed_everything: 1\n{slip}")
    word = slip if slip.startswith("--") else f"--config={tmp_path / 'fit.yaml'}"
    assert said in refused(capsys, "fit", MODEL, word)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--model=tests.helpers.trainers.Smal", "Smal"),
        ("--trainer.callbacks=lightning_sparse.callbacks.AdaptivDensity", "AdaptivDensity"),
    ],
)
def test_a_class_that_is_not_there_is_named(word, said, capsys):
    assert said in "\n".join(refusal(capsys, "fit", MODEL, word))


def test_the_help_of_fit_lists_the_names_and_no_class_that_is_not_for_users(capsys):
    printed = "".join(answer(capsys, "fit", "--help").split())
    assert f"Oflightning_sparse:{','.join(system.name for system in systems())}" in printed
    public = {"SparseDDPStrategy", "SparseModelParallelStrategy", *callbacks.__all__}
    assert {path.rpartition(".")[2] for path in re.findall(r"lightning_sparse\.[\w.]+", printed)} <= public


def test_a_class_path_alone_is_a_strategy(capsys):
    strategy = "lightning_sparse.SparseDDPStrategy"
    assert isinstance(Trainer(strategy=strategy, accelerator="cpu", logger=False).strategy, SparseDDPStrategy)
    printed = answer(capsys, "fit", MODEL, f"--trainer.strategy={strategy}", "--print_config")
    assert f"strategy: {strategy}" in printed


def test_the_command_finds_a_model_in_the_folder_where_it_is_run(interpreter, tmp_path):
    (tmp_path / "beside.py").write_text(
        "from pytorch_lightning.demos.boring_classes import BoringModel\nclass Model(BoringModel): ...\n"
    )
    # As pip writes it for the console script: Python puts the script's folder on its path, and not the current one.
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "lightning-sparse"
    script.write_text("from lightning_sparse.cli import main\nmain()\n")
    done = interpreter.run(script, "fit", "--model=beside.Model", "--print_config", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "beside.Model" in done.stdout
