"""The command ``lightning-sparse plan``."""

import json
import shlex
import sys
from pathlib import Path
from unittest import mock

import pytest

from lightning_sparse.cli import main
from lightning_sparse.cli.plan.forecast import Candidate
from lightning_sparse.cli.plan.profiler import BackwardProfile
from lightning_sparse.cli.plan.report import draw
from lightning_sparse.schedule.network import Network
from lightning_sparse.strategy.names import systems
from tests.helpers.commands import COMMAND, refusal
from tests.helpers.pages import DOCS, shown_commands

MODEL = ["--model=tests.cli.plan.models.WithData", "--trainer.accelerator=cpu"]
NETWORK = ["--bandwidth=1gbit", "--latency=100us", "--workers=4"]
PROFILE = BackwardProfile(("head", "body"), (500_000, 200_000), (0.01, 0.02), 0.03)


@pytest.fixture
def profiled(monkeypatch):
    """Take a model that is not there as profiled."""
    monkeypatch.setattr("lightning_sparse.cli.plan.command.profile_model", lambda args: PROFILE)


@pytest.mark.exhaustive
def test_from_a_model_to_a_table_and_numbers(interpreter, tmp_path):
    words = ["plan", *MODEL, *NETWORK, "--densities", "0.1", "0.01", f"--json={tmp_path / 'plan.json'}"]
    done = interpreter.run(Path(COMMAND), *words)
    assert done.returncode == 0, done.stderr
    assert "4,192 gradient elements in 4 tensors" in done.stdout
    assert done.stdout.startswith("r = ")
    assert "measured here, on cpu" in done.stdout
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["network"] == {"bandwidth": 1e9, "latency": 1e-4, "workers": 4}
    names = ["ddp", "ddp + bf16 hook", *(system.name for system in systems() if system.name != "sparse_auto")]
    assert list(dict.fromkeys(row["name"] for row in plan["rows"])) == names
    assert all(name in done.stdout for name in names)
    assert [row["density"] for row in plan["rows"] if row["name"] == "sparse_topk"] == [0.1, 0.01]


@pytest.mark.exhaustive
def test_json_may_stand_alone(profiled, capsys):
    main(["plan", "--bandwidth=100mbit", "--latency=1ms", "--workers=2", "--densities", "0.01", "--json=-"])
    plan = json.loads(capsys.readouterr().out)
    assert plan["profile"]["elements"] == 700_000
    # 2.8 MB at 100 Mbit/s take DDP 224 ms, of which backward hides less than 20.
    assert plan["rows"][plan["best"]]["speedup"] > 1.5
    assert plan["rows"][0]["step_seconds"] == pytest.approx(0.224 + 0.06, abs=0.03)
    assert plan["ratio"]["r"] == pytest.approx((0.224 + 2e-3) / 0.06)
    assert plan["ratio"]["advice"] == "sparse_lags"


def test_seconds_may_be_given(profiled, capsys, tmp_path):
    main(["plan", *NETWORK, "--compute=6s", "--densities", "0.01", f"--json={tmp_path / 'plan.json'}"])
    assert capsys.readouterr().out.startswith("r = ")
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["ratio"]["r"] == pytest.approx((1.5 * 2.8e6 * 8 / 1e9 + 6e-4) / 6)
    assert plan["profile"]["backward_seconds"] == pytest.approx(3)
    assert plan["rows"][0]["step_seconds"] == pytest.approx(6, rel=0.1)


def test_parameters_and_seconds_are_enough(capsys, tmp_path):
    words = ["--bandwidth=10gbit", "--latency=100us", "--workers=4", "--parameters=124M", "--compute=100ms"]
    main(["plan", *words, f"--json={tmp_path / 'r.json'}"])
    assert capsys.readouterr().out in (DOCS / "which-strategy.md").read_text()
    ratio = json.loads((tmp_path / "r.json").read_text())["ratio"]
    assert ratio["r"] == pytest.approx((1.5 * 124e6 * 32 / 1e10 + 6e-4) / 0.1)


@pytest.mark.exhaustive
def test_the_commands_of_the_pages_draw_a_picture(profiled, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    for command in shown_commands("plan"):
        main(["plan", *shlex.split(command)])
    picture = tmp_path / "plan.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000


def test_a_picture_of_small_differences_has_plain_numbers(tmp_path):
    pytest.importorskip("matplotlib")
    profile = BackwardProfile(("only",), (1_000_000,), (1.0,), 0.1)
    draw(profile, Network(1e10, 1e-4, 4), [Candidate("ddp"), Candidate("half", wire_bytes=2)], tmp_path / "plan.svg")
    drawn = (tmp_path / "plan.svg").read_text()
    assert "<!-- 1.1" in drawn
    assert "times" not in drawn


def test_replicas_of_shards_exchange_equal_shares_and_hide_nothing(profiled, capsys):
    shards = ["--shards=2", "--densities", "1", "0.01", "--json=-"]
    main(["plan", "--bandwidth=100mbit", "--latency=1ms", "--workers=4", *shards])
    plan = json.loads(capsys.readouterr().out)
    assert plan["network"] == {"bandwidth": 5e7, "latency": 1e-3, "workers": 2}
    assert [row["name"] for row in plan["rows"]] == ["hsdp", "sparse_hsdp", "sparse_hsdp"]
    assert "ratio" not in plan
    dense, whole, sparse = plan["rows"]
    # 1.4 MB of a shard take 224 ms at half of 100 Mbit/s, of which HSDP's backward hides less than 30.
    assert dense["step_seconds"] == pytest.approx(0.06 + 0.224, abs=0.03)
    assert dense["sent_bytes"] == 1.4e6
    assert whole["sent_bytes"] == pytest.approx(1.4e6, rel=1e-4)  # which parameters were used, too
    assert whole["exposed_seconds"] > 0.224  # all of it, where backward is over
    assert sparse["exposed_seconds"] == pytest.approx(sparse["step_seconds"] - 0.06)
    assert sparse["sent_bytes"] < dense["sent_bytes"] / 30


def test_a_picture_without_matplotlib_is_refused_at_once(capsys):
    with mock.patch.dict(sys.modules, {"matplotlib.figure": None}):
        assert "lightning-sparse[plot]" in refusal(capsys, "plan", *MODEL, *NETWORK, "--picture=plan.png")[-1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Lightning's own parser calls what jsonargparse has renamed
@pytest.mark.parametrize(
    ("args", "named"),
    [
        (MODEL, "--bandwidth, --workers"),
        ([*NETWORK, *MODEL, "--bandwidth=1gib"], "bandwidth='1gib'"),
        ([*NETWORK, *MODEL, "--latency=100"], "latency='100'"),
        ([*NETWORK, *MODEL, "--workers=1"], "workers=1"),
        ([*NETWORK, *MODEL, "--ranks-per-node=3"], "--ranks-per-node"),
        ([*NETWORK, *MODEL, "--shards=0"], "--shards 0"),
        ([*NETWORK, *MODEL, "--shards=3"], "--ranks-per-node"),
        ([*NETWORK, *MODEL, "--shards=2", "--ranks-per-node=4"], "--shards 2"),
        ([*NETWORK, *MODEL, "--shards=4"], "workers=1"),
        ([*NETWORK, "--shards=2", "--compute=1s", "--parameters=1M"], "--parameters"),
        ([*NETWORK, *MODEL, "--densities", "0.1", "7"], "density=7.0"),
        ([*NETWORK, *MODEL, "--model.flaw=frozen"], "no parameter of the model requires a gradient"),
        ([*NETWORK, *MODEL, "--compute=100"], "compute='100'"),
        ([*NETWORK, *MODEL, "--compute=0ms"], "compute='0ms'"),
        ([*NETWORK, "--parameters=124M"], "--compute"),
        ([*NETWORK, "--compute=1s", "--parameters=many"], "parameters='many'"),
        ([*NETWORK, "--compute=1s", "--parameters=0"], "parameters='0'"),
        ([*NETWORK, "--compute=1s", "--parameters=1M", *MODEL], "--model"),
        ([*NETWORK, "--compute=1s", "--parameters=1M", "--picture=plan.png"], "--picture"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(args, named, capsys):
    assert named in refusal(capsys, "plan", *args)[-1]
