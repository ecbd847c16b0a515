"""What is advised by r, against a formula worked out by hand, and against the page."""

import re
from itertools import pairwise

import pytest

from lightning_sparse.cli.plan.advice import BANDS, FAR, Advice, Ratio
from lightning_sparse.schedule.network import Network
from tests.helpers.pages import DOCS, ROOT, rows

PAGE = DOCS / "which-strategy.md"
# 2 (4 - 1) / 4 of 1 MB at 1 Mbit/s: 12 s, of which nothing is latency.
SLOW = Network(1e6, 0.0, 4)


def ratio(r, latency_of_step=0.0):
    """Return one of this r, whose messages take some part of a step without exchange one way."""
    seconds = 12 / (r - 6 * latency_of_step)
    return Ratio(1e6, SLOW._replace(latency=latency_of_step * seconds), seconds)


def test_r_is_that_of_the_formula():
    network = Network(1e9, 1e-3, 16)
    found = Ratio(400e6, network, 0.5)
    assert found.exchange_seconds == pytest.approx(2 * 15 / 16 * 400e6 * 8 / 1e9 + 2 * 15 * 1e-3)
    assert found.advice.r == pytest.approx(found.exchange_seconds / 0.5)
    # A ring crosses a node's link once; where all workers are on one node it crosses none.
    assert Ratio(400e6, network._replace(node_ranks=8), 0.5).advice == found.advice
    inside = network._replace(node_ranks=16, node_bandwidth=1e11, node_latency=1e-5)
    assert Ratio(400e6, inside, 0.5).exchange_seconds == pytest.approx(2 * 15 / 16 * 400e6 * 8 / 1e11 + 2 * 15 * 1e-5)


@pytest.mark.parametrize("at", range(len(BANDS) - 1))
def test_each_threshold_parts_two_strategies(at):
    threshold = BANDS[at][0]
    for r, strategy in ((0.999 * threshold, BANDS[at][1]), (1.001 * threshold, BANDS[at + 1][1])):
        assert ratio(r).advice.strategy == Advice(r).strategy == strategy
        assert f"Take {strategy} " in str(ratio(r))


@pytest.mark.parametrize(
    ("r", "round_trip", "strategy"),
    [(4, 0.99, "sparse_lags"), (4, 1.01, "local steps"), (0.9, 1.01, "sparse_auto"), (30, 0.99, "local steps")],
)
def test_a_long_round_trip_asks_for_local_steps_where_compression_pays(r, round_trip, strategy):
    assert ratio(r, FAR * round_trip / 2).advice.strategy == strategy


def test_the_page_has_these_thresholds():
    edges = [f"{below:g}" for below, *_ in BANDS[:-1]]
    between = [f"{low} to {high}" for low, high in pairwise(edges)]
    told = rows(PAGE, "## By r")
    assert [cells[0] for cells in told] == [f"below {edges[0]}", *between, f"{edges[-1]} and more"]
    assert [cells[1].partition(";")[0].strip("`") for cells in told] == [strategy for _, strategy, _ in BANDS]
    assert f"{FAR:g} of a step" in told[2][1]


def test_the_readme_works_r_out_by_this_formula_and_advises_by_it():
    (peaks,) = re.findall(r"RTX 3090 [^.]*", (DOCS / "which-strategy.md").read_text())
    for gpu, *told in rows(ROOT / "README.md", "## Is it for you?"):
        peak = float(re.search(rf"{gpu} (\d+)", peaks)[1]) * 1e12
        for gbit, cell in zip((1, 10, 25, 100), told):
            parameters = 124e6  # any
            network = Network(gbit * 1e9, 0.0, 4)
            advice = Ratio(4 * parameters, network, 6 * parameters * 8192 / (0.4 * peak)).advice
            r, _, strategy = cell.partition(", ")
            assert float(r) == pytest.approx(advice.r, rel=0.03), (gpu, gbit)
            assert strategy.strip("`*") == advice.strategy, (gpu, gbit)
