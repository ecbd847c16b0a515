import re
import shlex

import pytest

from lightning_sparse.cli import main
from lightning_sparse.cli.estimate import PASSES, REASONS, Estimate, read_rate, read_seconds
from lightning_sparse.schedule.costs import Line, dense_bytes
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


def estimated(r, ranks=4, gpu=29 * 4e-12 * 124e6, startup=0.0):
    """Return the page's example at another r: 124 M parameters, 100 ms, GPU memory of 1000 GB/s."""
    return Estimate(124e6, ranks, 0.1, Line(startup, (0.1 * r - startup) / dense_bytes(124e6, ranks)), gpu, gpu)


def test_steps_follow_the_formula_of_the_page():
    steps = estimated(r=40.0).steps()
    rate = 0.1 * 40 / (1.5 * 4 * 124e6)
    exchange = rate * 3 * 0.01 * 5.8 * 124e6
    changes = rate * 3 * 0.05 * 3.1 * 124e6
    gpu = 29 * 4e-12 * 124e6
    assert steps["ddp"] == pytest.approx(0.1 + 4 - 2 / 3 * 0.1)
    assert steps["bf16 hook"] == pytest.approx(0.1 + 2 - 2 / 3 * 0.1)
    assert steps["sparse_lags"] == pytest.approx(0.1 + gpu + exchange - 2 / 3 * 0.1)
    assert steps["local steps"] == pytest.approx(1.5 * (0.1 + (gpu + changes) / 5))
    assert steps["sparse_lags"] == pytest.approx(estimated(r=40.0).steps(hidden=0.0)["sparse_lags"] - 2 / 3 * 0.1)


def test_backward_hides_no_more_than_the_whole_exchange():
    for latency in (0.0, 0.01):  # the last message begins when backward has ended
        steps = estimated(r=0.5, gpu=0.02, startup=latency).steps()
        assert steps["ddp"] == steps["bf16 hook"] == pytest.approx(0.1 + latency)
        assert steps["sparse_lags"] == pytest.approx(0.1 + latency + 0.02)


def test_owners_limit_the_bytes_of_many_ranks():
    assert estimated(50.0, ranks=64).steps()["sparse_lags"] == pytest.approx(
        estimated(50.0, ranks=1024).steps()["sparse_lags"], rel=0.02
    )
    assert estimated(50.0, ranks=8).steps()["sparse_lags"] > 1.5 * estimated(50.0).steps()["sparse_lags"]


@pytest.mark.parametrize(
    ("r", "more", "strategy"),
    [
        (3.0, {}, "sparse_lags"),
        (3.0, {"gpu": 0.1}, "bf16 hook"),
        (0.6, {"gpu": 0.1}, "ddp"),
        (5.0, {"gpu": 0.3}, "local steps"),
        (3.0, {"startup": 0.25}, "local steps"),
    ],
)
def test_the_costs_of_compression_and_of_messages_decide(r, more, strategy):
    found = estimated(r, **more)
    assert found.strategy == strategy
    assert found.steps()[strategy] == min(found.steps().values())
    assert f"Take {strategy}: {REASONS[strategy]}" in str(found)


@pytest.mark.parametrize(("ratio", "is_near"), [(1.1, True), (1.2, False)])
def test_a_way_that_may_be_as_fast_is_named(ratio, is_near):
    found = estimated(3.0)
    steps = found.steps()
    more = (ratio * steps["sparse_lags"] - steps["local steps"]) / 1.5 * 5
    assert ("Also try local steps:" in str(found._replace(round_gpu=found.round_gpu + more))) == is_near


def test_one_process_needs_no_exchange():
    assert Estimate(124e6, 1, 0.1, Line(), 0.01).strategy == "ddp"


def test_the_page_has_the_thresholds_of_the_formula():
    table = rows(PAGE, "## By r")
    edges = [float(limits.split()[0]) for limits, _ in table[1:]]
    assert table[0][0] == f"below {edges[0]:g}"
    ways = [way.strip("`") for _, way in table]
    for edge, below, above in zip(edges, ways, ways[1:]):
        assert [estimated(r * edge).strategy for r in (0.96, 1.04)] == [below, above]


def test_the_readme_works_r_out_by_this_formula_and_recommends_by_it():
    peaks, bandwidths = re.findall(r"RTX 3090 [^.]*", PAGE.read_text())
    for gpu, *cells in rows(ROOT / "README.md", "## When to use it"):
        peak = float(re.search(rf"{gpu} (\d+)", peaks)[1]) * 1e12
        for gbit, cell in zip((1, 10, 25, 100), cells):
            parameters = 124e6  # any number
            compute = 6 * parameters * 8192 / (0.4 * peak)
            bandwidth = float(re.search(rf"{gpu} (\d+)", bandwidths)[1]) * 1e9
            passes = PASSES["adamw"] * 4 * parameters / bandwidth
            found = Estimate(parameters, 4, compute, Line(0.0, 8e-9 / gbit), passes, passes)
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
