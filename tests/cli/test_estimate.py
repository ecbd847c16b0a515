import re
import shlex
from itertools import pairwise

import pytest

from lightning_sparse.cli import main
from lightning_sparse.cli.estimate import BACKWARD, BANDS, FAR, PASSES, Estimate, read_rate, read_seconds
from tests.helpers.commands import refusal
from tests.helpers.pages import DOCS, ROOT, rows, shown_commands

PAGE = DOCS / "choose-a-strategy.md"
MODEL = ["--parameters=124M", "--compute=100ms"]
NETWORK = ["--bandwidth=10gbit", "--workers=4"]


def test_what_is_printed_is_on_the_page_and_follows_the_formula(capsys):
    main(["estimate", *MODEL, *NETWORK])
    said = capsys.readouterr().out
    assert said in PAGE.read_text()
    assert float(said.split()[2].rstrip(":")) == pytest.approx((1.5 * 124e6 * 32 / 1e10 + 6e-4) / 0.1, rel=1e-3)
    assert f"GPU       {29 * 4 * 124e6 / 1e12:.3g} s" in said
    main(["estimate", *MODEL, *NETWORK, "--memory-bandwidth=2000", "--optimizer=sgd"])
    assert f"GPU       {14 * 4 * 124e6 / 2e12:.3g} s" in capsys.readouterr().out


def test_the_passes_over_memory_are_those_of_the_page():
    assert f"{PASSES['adamw']:g} with AdamW, {PASSES['sgd']:g} with SGD" in PAGE.read_text()


@pytest.mark.parametrize("command", shown_commands("estimate"))
def test_the_commands_of_the_pages_run(command, capsys):
    main(["estimate", *shlex.split(command)])
    assert capsys.readouterr().out


@pytest.mark.parametrize("at", range(len(BANDS) - 1))
def test_each_threshold_parts_two_strategies(at):
    threshold = BANDS[at][0]
    for r, strategy in ((0.999 * threshold, BANDS[at][1]), (1.001 * threshold, BANDS[at + 1][1])):
        assert Estimate(r, 1.0).strategy == strategy
        assert f"Take {strategy}" in str(Estimate(r, 1.0))


@pytest.mark.parametrize(
    ("r", "round_trip", "strategy"),
    [(4, 0.99, "sparse_lags"), (4, 1.01, "local steps"), (0.9, 1.01, "sparse_auto"), (30, 0.99, "local steps")],
)
def test_a_long_round_trip_asks_for_local_steps_where_compression_pays(r, round_trip, strategy):
    assert Estimate(r, 1.0, FAR * round_trip / 2).strategy == strategy


def test_ddp_is_recommended_if_compression_costs_more_than_the_exchange_that_backward_cannot_hide():
    exposed = 0.9 - BACKWARD
    assert Estimate(0.9, 1.0, gpu_seconds=1.01 * exposed).strategy == "ddp"
    assert Estimate(0.9, 1.0, gpu_seconds=0.99 * exposed).strategy == "sparse_auto"


def test_local_steps_leave_a_share_of_the_time_to_exchanges():
    assert [Estimate(r, 1.0).local_steps for r in (0.01, 4.0, 100.0)] == [1, 80, 500]
    assert "Take local steps, for dense changes with local_steps=440:" in str(Estimate(22.0, 1.0))


def test_the_page_has_these_thresholds():
    edges = [f"{below:g}" for below, *_ in BANDS[:-1]]
    between = [f"{low} to {high}" for low, high in pairwise(edges)]
    told = rows(PAGE, "## By r")
    assert [cells[0] for cells in told] == [f"below {edges[0]}", *between, f"{edges[-1]} and more"]
    assert [cells[1].partition(";")[0].strip("`") for cells in told] == [strategy for _, strategy, _ in BANDS]
    assert f"{FAR:g} of a step" in told[2][1]


def test_the_readme_works_r_out_by_this_formula_and_recommends_by_it():
    peaks, bandwidths = re.findall(r"RTX 3090 [^.]*", PAGE.read_text())
    for gpu, *told in rows(ROOT / "README.md", "## When to use it"):
        peak = float(re.search(rf"{gpu} (\d+)", peaks)[1]) * 1e12
        for gbit, cell in zip((1, 10, 25, 100), told):
            parameters = 124e6  # any number
            exchange = 1.5 * 32 * parameters / (gbit * 1e9)
            bandwidth = float(re.search(rf"{gpu} (\d+)", bandwidths)[1]) * 1e9
            passes = PASSES["adamw"] * 4 * parameters / bandwidth
            found = Estimate(exchange, 6 * parameters * 8192 / (0.4 * peak), gpu_seconds=passes)
            r, _, strategy = cell.partition(", ")
            assert float(r) == pytest.approx(found.r, rel=0.03), (gpu, gbit)
            assert strategy.strip("`*") == found.strategy, (gpu, gbit)


def test_bandwidths_and_latencies_are_read():
    assert [read_rate(text) for text in ("1gbit", "2.5gbit", "100mbit", "64kbit")] == [1e9, 2.5e9, 1e8, 64_000]
    assert [read_rate(text) for text in ("25Gb/s", "25Gbit/s", "25Gbps", "25000Mbps", "25e9")] == [25e9] * 5
    assert [read_seconds(text) for text in ("100us", "0.5ms", "2s", "0")] == pytest.approx([1e-4, 5e-4, 2.0, 0])


@pytest.mark.parametrize(
    ("parse", "texts"),
    [
        (read_rate, ["1gib", "1", "gbit", "1 gbit", "-1gbit", "1GB/s", "25", "infgbit", "", "0mbit"]),
        (read_seconds, ["1", "100 us", "-1ms", "1min", "nan"]),
    ],
)
def test_other_texts_are_refused(parse, texts):
    for text in texts:
        with pytest.raises(ValueError, match=r"^(bandwidth|latency)="):
            parse(text)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (MODEL, "--bandwidth, --workers"),
        ([*NETWORK, "--parameters=124M"], "--compute"),
        ([*NETWORK, *MODEL, "--bandwidth=1gib"], "bandwidth='1gib'"),
        ([*NETWORK, *MODEL, "--latency=100"], "latency='100'"),
        ([*NETWORK, *MODEL, "--workers=1"], "--workers 1"),
        ([*NETWORK, *MODEL, "--memory-bandwidth=0"], "--memory-bandwidth 0"),
        ([*NETWORK, *MODEL, "--compute=100"], "compute='100'"),
        ([*NETWORK, *MODEL, "--compute=0ms"], "compute='0ms'"),
        ([*NETWORK, *MODEL, "--parameters=many"], "parameters='many'"),
        ([*NETWORK, *MODEL, "--parameters=0"], "parameters='0'"),
        ([*NETWORK, *MODEL, "--config=fit.yaml"], "--config=fit.yaml"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(args, named, capsys):
    assert named in refusal(capsys, "estimate", *args)[-1]
