"""The command ``lightning-sparse plan``."""

import json
import re
import shlex
import sys
from pathlib import Path
from unittest import mock

import pytest

from lightning_sparse.cli import main
from lightning_sparse.cli.plan import BackwardProfile, Candidate, Network, draw
from lightning_sparse.strategy.names import systems
from tests.helpers.commands import COMMAND, Interpreter

ROOT = Path(__file__).parents[3]
MODEL = ["--model=tests.cli.plan.models.WithData", "--trainer.accelerator=cpu"]
NETWORK = ["--bandwidth=1gbit", "--latency=100us", "--workers=4"]
PROFILE = BackwardProfile(("head", "body"), (500_000, 200_000), (0.01, 0.02), 0.03)


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a model that is not there as profiled."""
    monkeypatch.setattr("lightning_sparse.cli.plan.command.profile_model", lambda args: PROFILE)


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Return what is said of arguments that are refused."""
    with pytest.raises(SystemExit) as stop:
        main(["plan", *args])
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_from_a_model_to_a_table_and_numbers(interpreter: Interpreter, tmp_path: Path) -> None:
    words = ["plan", *MODEL, *NETWORK, "--densities", "0.1", "0.01", f"--json={tmp_path / 'plan.json'}"]
    done = interpreter.run(Path(COMMAND), *words)
    assert done.returncode == 0, done.stderr
    assert "4,192 gradient elements in 4 tensors" in done.stdout
    assert "4 workers, 1 Gbit/s, 100 us latency" in done.stdout
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["network"] == {"bandwidth": 1e9, "latency": 1e-4, "workers": 4}
    names = ["ddp", "ddp + bf16 hook", *(system.name for system in systems() if system.name != "sparse_auto")]
    assert list(dict.fromkeys(row["name"] for row in plan["rows"])) == names
    assert all(name in done.stdout for name in names)
    assert [row["density"] for row in plan["rows"] if row["name"] == "sparse_topk"] == [0.1, 0.01]


@pytest.mark.usefixtures("profiled")
def test_json_may_stand_alone(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--bandwidth=100mbit", "--latency=1ms", "--workers=2", "--densities", "0.01", "--json=-"])
    plan = json.loads(capsys.readouterr().out)
    assert plan["profile"]["elements"] == 700_000
    # 2.8 MB at 100 Mbit/s take DDP 224 ms, of which backward hides less than 20.
    best = plan["rows"][plan["best"]]
    assert best["speedup"] > 1.5
    assert plan["rows"][0]["step_seconds"] == pytest.approx(0.224 + 0.06, abs=0.03)


@pytest.mark.usefixtures("profiled")
def test_the_command_of_the_pages_draws_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pages = "".join(page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
    for command in set(re.findall(r"^lightning-sparse (plan .*)$", pages, re.MULTILINE)):
        main(shlex.split(command))
    picture = tmp_path / "plan.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000


def test_a_picture_of_small_differences_has_plain_numbers(tmp_path: Path) -> None:
    profile = BackwardProfile(("only",), (1_000_000,), (1.0,), 0.1)
    draw(profile, Network(1e10, 1e-4, 4), [Candidate("ddp"), Candidate("half", wire_bytes=2)], tmp_path / "plan.svg")
    drawn = (tmp_path / "plan.svg").read_text()
    assert "<!-- 1.1" in drawn
    assert "times" not in drawn


def test_a_picture_without_matplotlib_is_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.dict(sys.modules, {"matplotlib.figure": None}):
        assert "pip install 'lightning-sparse[plot]'" in refusal(capsys, *MODEL, *NETWORK, "--picture=plan.png")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Lightning's own parser calls what jsonargparse has renamed
@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--bandwidth=1gib"], "bandwidth='1gib'"),
        (["--latency=100"], "latency='100'"),
        (["--workers=1"], "workers=1"),
        (["--ranks-per-node=3"], "--ranks-per-node"),
        (["--densities", "0.1", "7"], "density=7.0"),
        (["--model=tests.cli.plan.models.Frozen"], "no parameter of the model requires a gradient"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    args: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert named in refusal(capsys, *MODEL, *NETWORK, *args)


def test_a_network_has_to_be_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--bandwidth, --latency, --workers" in refusal(capsys, *MODEL)
