"""What is advised by r, against a formula worked out by hand, and against the page."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from lightning_sparse.cli import main
from lightning_sparse.cli.plan import BackwardProfile, Network
from lightning_sparse.cli.plan.advice import BANDS, FAR, Ratio
from tests.helpers.pages import DOCS, rows

PAGE = DOCS / "which-strategy.md"
# 2 (4 - 1) / 4 of 1 MB at 1 Mbit/s: 12 s, of which nothing is latency.
SLOW = Network(1e6, 0.0, 4)


def ratio(r: float, latency_of_step: float = 0.0) -> Ratio:
    """Return one of this r, whose messages take some part of a step without exchange one way."""
    seconds = 12 / (r - 6 * latency_of_step)
    return Ratio(1e6, SLOW._replace(latency=latency_of_step * seconds), seconds)


def test_r_is_that_of_the_formula() -> None:
    network = Network(1e9, 1e-3, 16)
    found = Ratio(400e6, network, 0.5)
    assert found.exchange_seconds == pytest.approx(2 * 15 / 16 * 400e6 * 8 / 1e9 + 2 * 15 * 1e-3)
    assert found.r == pytest.approx(found.exchange_seconds / 0.5)
    # A ring crosses a node's link once; where all workers are on one node it crosses none.
    assert Ratio(400e6, network._replace(node_ranks=8), 0.5).r == found.r
    inside = network._replace(node_ranks=16, node_bandwidth=1e11, node_latency=1e-5)
    assert Ratio(400e6, inside, 0.5).exchange_seconds == pytest.approx(2 * 15 / 16 * 400e6 * 8 / 1e11 + 2 * 15 * 1e-5)


@pytest.mark.parametrize("at", range(len(BANDS) - 1))
def test_each_threshold_parts_two_strategies(at: int) -> None:
    threshold = BANDS[at][0]
    for r, strategy in ((0.999 * threshold, BANDS[at][1]), (1.001 * threshold, BANDS[at + 1][1])):
        assert ratio(r).advice == strategy
        assert f"Take {strategy} " in str(ratio(r))


@pytest.mark.parametrize(
    ("r", "round_trip", "strategy"),
    [(4, 0.99, "sparse_lags"), (4, 1.01, "local steps"), (0.9, 1.01, "sparse_auto"), (30, 0.99, "local steps")],
)
def test_a_long_round_trip_asks_for_local_steps_where_compression_pays(
    r: float, round_trip: float, strategy: str
) -> None:
    assert ratio(r, FAR * round_trip / 2).advice == strategy


def test_the_page_has_these_thresholds() -> None:
    edges = [f"{below:g}" for below, *_ in BANDS[:-1]]
    between = [f"{low} to {high}" for low, high in pairwise(edges)]
    told = rows(PAGE, "## By r")
    assert [cells[0] for cells in told] == [f"below {edges[0]}", *between, f"{edges[-1]} and more"]
    assert [cells[1].partition(";")[0].strip("`") for cells in told] == [strategy for _, strategy, _ in BANDS]
    assert f"{FAR:g} of a step" in told[2][1]


def test_the_page_works_r_out_by_this_formula() -> None:
    for gpu, *told in rows(PAGE, "## Nothing to run yet"):
        peak = float(gpu.split()[-2]) * 1e12
        for gbit, r in zip((1, 10, 25, 100), told):
            parameters = 124e6  # any
            network = Network(gbit * 1e9, 0.0, 4)
            found = Ratio(4 * parameters, network, 6 * parameters * 8192 / (0.4 * peak)).r
            assert float(r) == pytest.approx(found, rel=0.03), (gpu, gbit)


NETWORK = ["--bandwidth=10gbit", "--latency=100us", "--workers=4"]


def test_parameters_and_seconds_are_enough(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["plan", "--parameters=124M", "--compute=100ms", *NETWORK]
    main([*words, f"--json={tmp_path / 'r.json'}"])
    said = capsys.readouterr().out
    assert said in PAGE.read_text()
    found = json.loads((tmp_path / "r.json").read_text())["ratio"]
    assert found["r"] == pytest.approx((1.5 * 124e6 * 32 / 1e10 + 6e-4) / 0.1)
    assert (found["gradient_bytes"], found["compute_seconds"]) == (496e6, 0.1)
    assert found["advice"] == "sparse_lags"


@pytest.mark.parametrize(("more", "seconds", "origin"), [([], 0.06, "measured"), (["--compute=6s"], 6.0, "given")])
def test_a_model_comes_with_its_seconds_or_is_told_them(
    more: list[str],
    seconds: float,
    origin: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    profile = BackwardProfile(("head", "body"), (500_000, 200_000), (0.01, 0.02), 0.03, element_bytes=2)
    monkeypatch.setattr("lightning_sparse.cli.plan.command.profile_model", lambda args: profile)
    main(["plan", *NETWORK, *more, "--densities", "0.01", f"--json={tmp_path / 'plan.json'}"])
    said = capsys.readouterr().out
    assert said.startswith("r = ")
    assert f" {origin}" in said.splitlines()[2]
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["ratio"]["compute_seconds"] == pytest.approx(seconds)
    assert plan["ratio"]["r"] == pytest.approx((1.5 * 700_000 * 16 / 1e10 + 6e-4) / seconds)
    assert plan["profile"]["backward_seconds"] == pytest.approx(seconds / 2)
    assert plan["rows"][0]["step_seconds"] == pytest.approx(seconds, rel=0.1)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--parameters=124M"], "--compute"),
        (["--parameters=many", "--compute=1s"], "parameters='many'"),
        (["--parameters=0", "--compute=1s"], "parameters='0'"),
        (["--parameters=1M", "--compute=0"], "compute='0'"),
        (["--parameters=1M", "--compute=0ms"], "compute='0ms'"),
        (["--compute=100"], "compute='100'"),
        (["--parameters=1M", "--compute=1s", "--model=Mine"], "--model=Mine"),
        (["--parameters=1M", "--compute=1s", "--picture=plan.png"], "--picture"),
    ],
)
def test_what_gives_no_r_is_refused(args: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["plan", *NETWORK, *args])
    assert stop.value.code == 2
    assert named in capsys.readouterr().err.splitlines()[-1]
