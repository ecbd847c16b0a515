"""The command line."""

import re
import sys
from pathlib import Path

import pytest
import yaml
from pytorch_lightning import Trainer

from lightning_sparse import SparseDDPStrategy, callbacks
from lightning_sparse.cli import main
from lightning_sparse.strategy.names import systems
from lightning_sparse.testing.pool import Pool
from tests.helpers.commands import COMMAND, MODEL, Interpreter, begin

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


def test_fits_with_a_strategy_name(interpreter: Interpreter, tmp_path: Path) -> None:
    options = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.fast_dev_run=true"]
    words = ["fit", MODEL, "--trainer.strategy=sparse_topk", *options, f"--trainer.default_root_dir={tmp_path}"]
    done = interpreter.run(Path(COMMAND), *words)
    assert done.returncode == 0, done.stderr
    assert "All distributed processes registered. Starting with 2 processes" in done.stderr


def answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what is printed for arguments that only ask."""
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    monkeypatch.setattr(sys, "argv", ["lightning-sparse", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code in (None, 0)
    return capsys.readouterr().out


def test_a_strategy_is_built_from_plain_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = answer(
        monkeypatch,
        capsys,
        "fit",
        MODEL,
        "--trainer.strategy=lightning_sparse.SparseDDPStrategy",
        "--trainer.strategy.density=0.02",
        "--trainer.strategy.schedule=lightning_sparse.schedule.FixedSize",
        "--trainer.strategy.schedule.min_elements=1000",
        "--trainer.strategy.wire=bfloat16",
        "--trainer.strategy.local_steps=4",
        "--trainer.strategy.synchronous_steps=20",
        "--trainer.strategy.find_unused_parameters=true",
        "--print_config",
    )
    given = ("density: 0.02", "min_elements: 1000", "wire: bfloat16", "synchronous_steps: 20")
    for line in (*given, "resume_compression: true"):
        assert line in printed
    # Those of DDP, too, but not its default in place of ours.
    for line in ("find_unused_parameters: true", "static_graph: false", "gradient_as_bucket_view: true"):
        assert line in printed


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("strategy: sparse_lags", ["--trainer.strategy.density=0.05"]),
        ("strategy: sparse_lags", ["--trainer.strategy.init_args.density", "0.05"]),
        ("max_epochs: 3", ["--trainer.strategy=sparse_lags", "--trainer.strategy.density", "0.05"]),
        ("strategy: sparse_lags", ["--config={folder}/more.yaml"]),
    ],
)
def test_a_name_and_arguments_beside_it_are_a_strategy(
    strategy: str, more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fit.yaml").write_text(f"trainer: {{{strategy}}}\n")
    (tmp_path / "more.yaml").write_text("trainer: {strategy: {init_args: {density: 0.05}}}\n")
    words = [f"--config={tmp_path}/fit.yaml", *(word.format(folder=tmp_path) for word in more)]
    words += ["--trainer.strategy.wire=bfloat16", "--print_config"]
    printed = yaml.safe_load(answer(monkeypatch, capsys, "fit", MODEL, *words))["trainer"]["strategy"]
    arguments = {"compressor": "lags", "density": 0.05, "wire": "bfloat16", "start_method": "popen"}
    assert printed["class_path"].endswith(".SparseDDPStrategy")
    assert arguments.items() <= printed["init_args"].items()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "trainer.strategy='auto' takes no arguments: name one first, such as sparse_lags"),
    ],
)
def test_a_name_that_nobody_knows_takes_no_arguments(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    monkeypatch.setattr(sys, "argv", ["lightning-sparse"])
    with pytest.raises(SystemExit):
        main(["fit", MODEL, *words, "--trainer.strategy.density=0.05"])
    assert message in capsys.readouterr().err


def test_the_help_lists_all_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    printed = answer(monkeypatch, capsys, "--help")
    assert all(command in printed for command in ("fit", "validate", "test", "predict", "'plan'", "'submit'"))
    assert "{fit,validate,test,predict,plan,submit} ..." in printed


def test_an_unknown_command_is_refused_with_all_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["fti"])
    assert stop.value.code == 2
    said = "command='fti' is unknown; choose one of: fit, validate, test, predict, plan, submit (did you mean 'fit'?)"
    assert said in capsys.readouterr().err


def test_a_script_of_the_users_own_knows_the_names(pair: Pool, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (["--trainer.max_epoks=3"], "'trainer.max_epoks' is unknown; did you mean 'trainer.max_epochs'"),
        (["--config={folder}/key.yaml"], "'trainer.max_epoch' is unknown; did you mean 'trainer.max_epochs'"),
        (
            ["--config={folder}/argument.yaml"],
            "'wyre' of lightning_sparse.SparseDDPStrategy is unknown; did you mean 'wire'?",
        ),
        (
            ["--config={folder}/inner.yaml"],
            "'error_fedback' of lightning_sparse.compressors.LAGS is unknown; did you mean 'error_feedback'?",
        ),
        (["--model=tests.helpers.trainers.Smal"], "'Smal' of tests.helpers.trainers is unknown; did you mean 'Small'"),
        (
            ["--config={folder}/class.yaml"],
            "'AdaptivDensity' of lightning_sparse.callbacks is unknown; did you mean 'AdaptiveDensity'?",
        ),
        (["--config={folder}/module.yaml"], "'callback' of lightning_sparse is unknown; did you mean 'callbacks'?"),
        (
            ["--config={folder}/rule.yaml"],
            "'lenth' of lightning_sparse.compressors.density.Warmup is unknown; did you mean 'length'?",
        ),
        (["--trainer.strategy=sparse_lag"], "trainer.strategy='sparse_lag' is unknown"),
        (["--trainer.strategy=sparse_lag"], "(did you mean 'sparse_lags'?)"),
        (["--trainer.strategy=lags"], "trainer.strategy='lags' is unknown (did you mean 'sparse_lags'?)"),
        (["--trainer.strategy=sparse-lags"], "trainer.strategy='sparse-lags' is unknown (did you mean 'sparse_lags'?)"),
        (["--trainer.strategy=dpp"], "(did you mean 'ddp'?)"),
        (["--trainer.strategy=sparse_blockmax"], "init_args.compressor: mymodule.MyCompressor"),
        (["--nothing_like_it=3"], "unrecognized arguments: --nothing_like_it=3"),
    ],
)
def test_an_unknown_name_is_refused_with_one_that_is_near(
    arguments: list[str],
    near: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    strategy = "trainer:\n  strategy:\n    class_path: lightning_sparse.SparseDDPStrategy\n    init_args:\n"
    (tmp_path / "key.yaml").write_text("trainer:\n  max_epoch: 3\n")
    (tmp_path / "argument.yaml").write_text(f"{strategy}      wyre: float16\n")
    compressor = "{class_path: lightning_sparse.compressors.LAGS, init_args: {error_fedback: update}}"
    (tmp_path / "inner.yaml").write_text(f"{strategy}      compressor: {compressor}\n")
    callback = "trainer: {{callbacks: [{{class_path: lightning_sparse.{}, init_args: {{rules: [{}]}}}}, {}]}}\n"
    rule = "{{class_path: lightning_sparse.compressors.density.Warmup, init_args: {{{}: 3}}}}"
    other = "{class_path: pytorch_lightning.callbacks.EarlyStopping, init_args: {monitor: val_loss}}"
    for name, path, argument in (
        ("class", "callbacks.AdaptivDensity", "length"),
        ("module", "callback.AdaptiveDensity", "length"),
        ("rule", "callbacks.AdaptiveDensity", "lenth"),
    ):
        (tmp_path / f"{name}.yaml").write_text(callback.format(path, rule.format(argument), other))
    monkeypatch.setattr(sys, "argv", ["lightning-sparse"])
    with pytest.raises(SystemExit) as stop:
        main(["fit", MODEL, *(word.format(folder=tmp_path) for word in arguments)])
    assert stop.value.code == 2
    *_, error = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert near in error


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            "density: 1.5",
            "SparseDDPStrategy: density=1.5 must be a fraction of elements with 0 < density <= 1; 0.01 sends",
        ),
        (
            "density: 1%",
            "SparseDDPStrategy: density='1%' must be a fraction of elements with 0 < density <= 1; 0.01 sends",
        ),
        ("compressor: blockmax", "such as mymodule.MyCompressor, a yaml file finds it without"),
        ("warmup_epochs: few", "SparseDDPStrategy: warmup_epochs='few' must be a whole number of epochs"),
        (
            "compressor: {class_path: lightning_sparse.compressors.LAGS, init_args: {densities: {a: 3.0}}}",
            "LAGS: densities['a']=3.0 must be a fraction of elements",
        ),
        (
            "compressor: {class_path: lightning_sparse.compressors.LAGS, init_args: {densities: 3}}",
            "LAGS: densities=3 must be Optional[",
        ),
    ],
    ids=["number", "percent", "name of one's own", "words", "inside", "type inside"],
)
def test_a_value_that_is_refused_is_one_sentence(
    arguments: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    monkeypatch.setattr(sys, "argv", ["lightning-sparse"])
    config = tmp_path / "fit.yaml"
    config.write_text(
        f"seed_everything: 1\ntrainer:\n  strategy:\n    class_path: lightning_sparse.SparseDDPStrategy\n"
        f"    init_args:\n      {arguments}\n"
    )
    with pytest.raises(SystemExit) as stop:
        main(["fit", MODEL, f"--config={config}"])
    assert stop.value.code == 2
    usage, tip, error = capsys.readouterr().err.splitlines()[-3:]
    assert usage.startswith("usage: lightning-sparse")
    assert tip.startswith("tip: For details")
    assert error.startswith("error: ")
    assert sentence in error


def test_the_help_of_fit_lists_the_names_and_no_class_that_is_not_for_users(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = "".join(answer(monkeypatch, capsys, "fit", "--help").split())
    assert f"Oflightning_sparse:{','.join(system.name for system in systems())}" in printed
    public = {"SparseDDPStrategy", *callbacks.__all__}
    assert {path.rpartition(".")[2] for path in re.findall(r"lightning_sparse\.[\w.]+", printed)} <= public


def test_a_class_path_alone_is_a_strategy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    strategy = "lightning_sparse.SparseDDPStrategy"
    assert isinstance(Trainer(strategy=strategy, accelerator="cpu", logger=False).strategy, SparseDDPStrategy)
    assert f"strategy: {strategy}" in answer(
        monkeypatch, capsys, "fit", MODEL, f"--trainer.strategy={strategy}", "--print_config"
    )


def test_the_command_finds_a_model_in_the_folder_where_it_is_run(interpreter: Interpreter, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text(
        "from pytorch_lightning.demos.boring_classes import BoringModel\nclass Model(BoringModel): ...\n"
    )
    # As pip writes it for the console script: Python puts the script's folder on its path, and not the current one.
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "lightning-sparse"
    script.write_text("from lightning_sparse.cli import main\nmain()\n")
    words = ("fit", "--model=beside.Model", "--print_config")
    done = interpreter.run(script, *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "beside.Model" in done.stdout
