"""The command ``lightning-sparse plan``."""

import json
import os
import re
import shlex
import sys
from pathlib import Path
from unittest import mock

import pytest

from lightning_sparse.cli import main
from lightning_sparse.cli.plan import BackwardProfile, BucketedDDP, Network, draw
from lightning_sparse.strategy.names import systems
from tests.helpers.commands import COMMAND, Interpreter

ROOT = Path(__file__).parents[3]
MODEL = ["--model=tests.cli.plan.models.WithData", "--trainer.accelerator=cpu"]
NETWORK = ["--bandwidth=1gbit", "--latency=100us", "--workers=4"]
PROFILE = BackwardProfile(("head", "body"), (500_000, 200_000), (0.01, 0.02), 0.03)


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """A kept profile."""
    PROFILE.save(tmp_path / "profile.json")
    return f"--profile={tmp_path / 'profile.json'}"


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Return what is said of arguments that are refused."""
    with pytest.raises(SystemExit) as stop:
        main(["plan", *args])
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_from_a_model_to_a_table_numbers_and_a_profile(interpreter: Interpreter, tmp_path: Path) -> None:
    files = [f"--json={tmp_path / 'plan.json'}", f"--save-profile={tmp_path / 'profile.json'}"]
    words = ["plan", *MODEL, *NETWORK, "--densities", "0.1", "0.01", *files]
    done = interpreter.run(Path(COMMAND), *words)
    assert done.returncode == 0, done.stderr
    assert "4,192 gradient elements in 4 tensors" in done.stdout
    assert "4 workers, 1 Gbit/s, 100 us latency" in done.stdout
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["network"] == {"bandwidth": 1e9, "latency": 1e-4, "workers": 4}
    assert {row["name"] for row in plan["rows"]} == {
        "ddp",
        "ddp + bf16 hook",
        *(system.name for system in systems() if system.name != "sparse_auto"),
    }
    topk = [row for row in plan["rows"] if row["name"] == "sparse_topk"]
    assert [row["density"] for row in topk] == [0.1, 0.01]
    assert all(name in done.stdout for name in ("sparse_exdyna", "ddp + bf16 hook"))
    profile = BackwardProfile.load(tmp_path / "profile.json")
    assert profile.workers == 4
    assert profile.sizes[-1] + profile.sizes[-2] == 32 * 64 + 64


def test_a_kept_profile_is_enough_and_json_may_stand_alone(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", saved, "--bandwidth=100mbit", "--latency=1ms", "--workers=2", "--densities", "0.01", "--json=-"])
    plan = json.loads(capsys.readouterr().out)
    assert plan["profile"]["elements"] == 700_000
    # 2.8 MB at 100 Mbit/s take DDP 224 ms, of which backward hides less than 20.
    best = plan["rows"][plan["best"]]
    assert best["speedup"] > 1.5
    assert plan["rows"][0]["step_seconds"] == pytest.approx(0.224 + 0.06, abs=0.03)


def test_the_command_of_the_pages_draws_a_picture(saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = Path(saved.partition("=")[2])
    monkeypatch.chdir(profile.parent)
    pages = (ROOT / "README.md").read_text() + (ROOT / "docs" / "plan.md").read_text()
    (command,) = set(re.findall(r"^lightning-sparse (plan --config fit.yaml .*)$", pages, re.MULTILINE))
    # With a kept profile in place of the model: that, from a file too, is measured in other tests.
    main(shlex.split(command.replace("--config fit.yaml", f"--profile={profile.name}")))
    picture = profile.parent / "plan.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000


def test_a_picture_of_small_differences_has_plain_numbers(tmp_path: Path) -> None:
    profile = BackwardProfile(("only",), (1_000_000,), (1.0,), 0.1)
    candidates = [BucketedDDP("ddp", 4, 4), BucketedDDP("half", 4, 2)]
    drawn = draw(profile, Network(1e10, 1e-4, 4), candidates, tmp_path / "plan.svg").read_text()
    assert "<!-- 1.1" in drawn
    assert "times" not in drawn


def test_a_picture_without_matplotlib_is_refused_at_once(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.dict(sys.modules, {"matplotlib.figure": None}):
        message = refusal(capsys, saved, *NETWORK, "--picture=plan.png")
    assert "a picture needs matplotlib" in message
    assert "pip install 'lightning-sparse[plot]'" in message


def test_inside_a_job_the_network_is_measured(interpreter: Interpreter) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHELASTIC_RUN_ID": "job", "LOCAL_WORLD_SIZE": "2"}
    words = ["plan", *MODEL, "--densities=0.01", "--json=-"]
    done = interpreter.run(Path(COMMAND), *words, environment=environment, ranks=2)
    assert done.returncode == 0, done.stderr
    network = json.loads(done.stdout)["network"]  # one document: one rank speaks for all
    assert network["workers"] == 2
    assert 1e6 < network["bandwidth"] < 1e13
    assert 0 <= network["latency"] < 1


def test_inside_a_job_another_number_of_workers_is_refused(
    monkeypatch: pytest.MonkeyPatch, saved: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "job", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    message = refusal(capsys, saved, "--workers=8")
    assert "workers=8, but the network would be measured by the 2 processes of this job" in message


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--bandwidth=1gib", "--latency=100us", "--workers=4"], "bandwidth='1gib' must be a number"),
        (["--bandwidth=1gbit", "--latency=100", "--workers=4"], "latency='100' must be a number"),
        (["--bandwidth=1gbit", "--latency=100us", "--workers=1"], "workers=1 must be a whole number"),
        (["--bandwidth=1gbit", "--latency=100us"], "workers=None is not known"),
        (["--bandwidth=1gbit", "--workers=4"], "--bandwidth is given without --latency"),
        (["--latency=1ms", "--workers=4"], "--latency is given without --bandwidth"),
        (["--workers=4"], "no --bandwidth and --latency are given, and this process belongs to no job"),
        ([*NETWORK, "--densities", "0.1", "7"], "density=7.0 must be a fraction"),
        ([*NETWORK, "--profile=nowhere.json"], "--profile nowhere.json stands for a model, so leave out --model"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(capsys, *MODEL, *args)


def test_a_missing_profile_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere.json" in refusal(capsys, *NETWORK, "--profile=nowhere.json")


def test_a_profile_of_another_number_of_workers_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    PROFILE._replace(workers=8).save(tmp_path / "profile.json")
    message = refusal(capsys, f"--profile={tmp_path / 'profile.json'}", *NETWORK)
    assert "workers=4, but the profile was measured for 8" in message


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Lightning's own parser calls what jsonargparse has renamed
def test_a_frozen_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(capsys, "--model=tests.cli.plan.models.Frozen", MODEL[1], *NETWORK)
    assert "no parameter of the model requires a gradient" in message


def test_the_help_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = capsys.readouterr().out
    assert all(option in text for option in ("--bandwidth", "--latency", "--workers", "--picture", "--config"))
