"""The command ``lightning-sparse plan``."""

import json
import shlex

import pytest

from lightning_sparse.cli import main
from lightning_sparse.strategy.names import systems
from tests.helpers.commands import refusal
from tests.helpers.pages import DOCS, shown_commands

MODEL = ["--parameters=1M", "--compute=1s"]
NETWORK = ["--bandwidth=1gbit", "--workers=4"]


def told(capsys, *words):
    """Return what the command prints as numbers."""
    main(["plan", *words, "--json=-"])
    return json.loads(capsys.readouterr().out)


def test_r_the_advice_and_a_row_for_each_strategy(capsys, tmp_path):
    words = ["--bandwidth=10gbit", "--latency=100us", "--workers=4", "--parameters=124M", "--compute=100ms"]
    main(["plan", *words, f"--json={tmp_path / 'plan.json'}"])
    ratio, table, note = capsys.readouterr().out.split("\n\n")
    assert ratio in (DOCS / "which-strategy.md").read_text()
    assert "An estimate" in note
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["r"] == pytest.approx((1.5 * 124e6 * 32 / 1e10 + 6e-4) / 0.1)
    assert plan["advice"] == "sparse_lags"
    names = ["ddp", "ddp + bf16 hook", *(system.name for system in systems() if system.name != "sparse_auto")]
    assert [row["name"] for row in plan["rows"]] == names
    assert [line.split("  ")[0] for line in table.splitlines()[1:]] == names


def test_the_page_shows_rows_of_what_its_command_prints(capsys):
    page = (DOCS / "plan.md").read_text()
    (command,) = [each for each in shown_commands("plan") if each in page]
    main(["plan", *shlex.split(command)])
    said = capsys.readouterr().out.splitlines()
    shown = page.partition("```\nstrategy")[2].partition("```")[0].splitlines()
    assert len(shown) > 5
    assert set(shown[1:]) <= set(said)


@pytest.mark.parametrize("command", shown_commands("plan"))
def test_the_commands_of_the_pages_run(command, capsys):
    main(["plan", *shlex.split(command)])
    assert capsys.readouterr().out


@pytest.mark.parametrize(("r", "strategy"), [(0.1, "ddp"), (3, "sparse_lags"), (30, "local steps")])
def test_where_r_is_known_the_advice_is_all(r, strategy, capsys):
    main(["plan", f"--r={r}"])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"Take {strategy} (")


def test_replicas_of_shards_exchange_equal_shares_and_hide_nothing(capsys):
    model = ["--parameters=700k", "--compute=60ms", "--shards=2", "--densities", "1", "0.01"]
    plan = told(capsys, *model, "--bandwidth=100mbit", "--latency=1ms", "--workers=4")
    network = {name: plan["network"][name] for name in ("bandwidth", "latency", "workers")}
    assert network == {"bandwidth": 5e7, "latency": 1e-3, "workers": 2}
    assert [row["name"] for row in plan["rows"]] == ["hsdp", "sparse_hsdp", "sparse_hsdp"]
    assert "r" not in plan
    dense, whole, sparse = plan["rows"]
    # 1.4 MB of a shard take 224 ms, and two messages, at half of 100 Mbit/s.
    assert dense["step_seconds"] == pytest.approx(0.06 + 0.224 + 2e-3)
    assert dense["sent_bytes"] == 1.4e6
    assert whole["sent_bytes"] == pytest.approx(1.4e6, rel=1e-4)
    assert whole["exposed_seconds"] > 0.224  # all of it, where backward is over
    assert sparse["exposed_seconds"] == pytest.approx(sparse["step_seconds"] - 0.06)
    assert sparse["sent_bytes"] < dense["sent_bytes"] / 15  # Adam's mean gradients among them


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (MODEL, "--bandwidth, --workers"),
        ([*NETWORK, "--parameters=124M"], "--compute"),
        ([*NETWORK, *MODEL, "--bandwidth=1gib"], "bandwidth='1gib'"),
        ([*NETWORK, *MODEL, "--bandwidth=10"], "bandwidth='10'"),
        ([*NETWORK, *MODEL, "--latency=100"], "latency='100'"),
        ([*NETWORK, *MODEL, "--node-latency=1"], "node-latency='1'"),
        ([*NETWORK, *MODEL, "--json=no/such/folder/plan.json"], "no/such/folder"),
        ([*NETWORK, *MODEL, "--workers=1"], "workers=1"),
        ([*NETWORK, *MODEL, "--ranks-per-node=3"], "--ranks-per-node"),
        ([*NETWORK, *MODEL, "--shards=0"], "--shards 0"),
        ([*NETWORK, *MODEL, "--shards=3"], "--shards 3 with --workers 4"),
        ([*NETWORK, *MODEL, "--shards=2", "--ranks-per-node=4"], "--shards 2"),
        ([*NETWORK, *MODEL, "--shards=4"], "--shards 4 with --workers 4"),
        ([*NETWORK, *MODEL, "--densities", "0.1", "7"], "density=7.0"),
        ([*NETWORK, *MODEL, "--compute=100"], "compute='100'"),
        ([*NETWORK, *MODEL, "--compute=0ms"], "compute='0ms'"),
        ([*NETWORK, *MODEL, "--parameters=many"], "parameters='many'"),
        ([*NETWORK, *MODEL, "--parameters=0"], "parameters='0'"),
        ([*NETWORK, *MODEL, "--config=fit.yaml"], "--config=fit.yaml"),
        (["--r=3", *MODEL], "--r 3"),
        (["--r=0"], "--r 0"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(args, named, capsys):
    assert named in refusal(capsys, "plan", *args)[-1]
