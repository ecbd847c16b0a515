"""Every row of the table in docs/compatibility.md with every strategy."""

import re
from typing import NamedTuple

import pytest
import torch
from pytorch_lightning.callbacks import LearningRateFinder

from tests.compatibility.rows import ROWS
from tests.compatibility.running import IN_EVERY_ROW, ROUND, STRATEGIES, Feature, run_cell
from tests.helpers.fits import refuse
from tests.helpers.pages import DOCS, section
from tests.helpers.tiers import exhaustive

FEATURES = {feature.name: feature for feature in ROWS}
PAGE = DOCS / "compatibility.md"
STEPS_TO_CHANGE_HANDS = 4
COUNTED = re.compile("dense_bytes|steps")  # statistics without times and buffer sizes
IN_TURN = [name for name in STRATEGIES if name not in IN_EVERY_ROW]
# `make test` runs each row with one strategy, which changes from row to row.
CELLS, OTHER_CELLS = [], []
for place, name in enumerate(FEATURES):
    others = [(name, strategy) for strategy in (*IN_EVERY_ROW, IN_TURN[place // 5 % len(IN_TURN)])]
    CELLS.append(others.pop(place % len(others)))
    OTHER_CELLS += others


class Compression(NamedTuple):
    """Bounds of a compressed step: density, and bytes as a share of dense fp32."""

    densities: tuple[float, float]
    bytes: float


COMPRESSION = {
    "sparse_topk": Compression((0.045, 0.055), 0.08),
    "sparse_exdyna": Compression((0.001, 0.2), 0.6),
    "sparse_sdagc": Compression((0.0009, 0.4), 0.5),
    "sparse_omgs": Compression((0.045, 0.055), 0.08),
    "sparse_a2sgd": Compression((1.0, 1.0), 0.001),
    "sparse_auto": Compression((0.045, 0.055), 0.08),
    "sparse_loco": Compression((0.045, 0.055), 0.08),
}


def run(rank, strategy, name, folder):
    return run_cell(rank, strategy, FEATURES[name], folder)


@pytest.mark.parametrize("cell", [*CELLS, *exhaustive(OTHER_CELLS)], ids=" with ".join)
def test_a_cell_of_the_table(pair, cell, tmp_path):
    name, strategy = cell
    feature = FEATURES[name]
    refusal = feature.refusal_by(strategy)
    if refusal is not None:
        for message in pair.run(refuse, run, strategy, name, str(tmp_path)):
            assert refusal in message
        return
    first, second = pair.run(run, strategy, name, str(tmp_path))
    assert_one_model(feature, strategy, first, second)
    # Dense gradients are for Adam, which sees all gradients anyway if each rank steps on its own.
    is_corrected = "optimizer_correction" in feature.strategy and strategy not in ("ddp", "sparse_a2sgd", "sparse_loco")
    assert_compressed(strategy, first, 0.0 if strategy == "sparse_loco" else feature.sent_whole, is_corrected)
    feature.check(first, second)


def assert_one_model(feature, strategy, first, second):
    assert first.after.keys() == second.after.keys()
    for name, parameter in first.after.items():
        assert parameter.isfinite().all()
        assert torch.equal(parameter, second.after[name])
        assert torch.equal(parameter, first.before[name]) == (name in feature.untrained)
    if strategy not in ("sparse_a2sgd", "sparse_loco"):
        assert [batch.checksum for batch in first.batches] == [batch.checksum for batch in second.batches]


def assert_compressed(strategy, outcome, sent_whole, is_corrected):
    """Assert that steps were compressed. Adam's first steps and some steps of ``sparse_auto`` are dense."""
    if strategy not in COMPRESSION or (strategy == "sparse_loco" and outcome.batches[-1].step < ROUND):
        return  # the first round sends at its end
    expected = COMPRESSION[strategy]
    sparse = [batch.stats for batch in outcome.batches if batch.stats and not (batch.is_dense or batch.is_whole)]
    # ExDyna's threshold needs several steps to settle.
    least, most = (bound * (1 - sent_whole) + sent_whole for bound in expected.densities)
    assert least <= sparse[-1]["density"] <= most
    # Dense parameters are sent as with DDP. With Adam, one step may refresh half of the few second moments.
    shares = [stats["wire_bytes"] / stats["dense_bytes"] for stats in sparse]
    bytes_sent, refreshed = (min(shares), 0.25) if is_corrected else (shares[-1], 0.0)
    assert 0 < bytes_sent <= expected.bytes + sent_whole + refreshed
    has_time = outcome.batches[-1].step >= STEPS_TO_CHANGE_HANDS
    assert any(batch.is_dense for batch in outcome.batches) == (
        is_corrected or (strategy == "sparse_auto" and has_time)
    )


def fit_with_a_rate(rank, strategy, searches, folder):
    finder = LearningRateFinder(min_lr=1e-3, max_lr=0.5, num_training_steps=20, update_attr=False)
    feature = Feature(
        "",
        lambda first, second: None,
        lambda path: {"callbacks": [finder] * searches, "default_root_dir": path, "max_epochs": 3},
        strategy={"schedule": "single"},  # a single bucket needs no measurement
    )
    outcome = run_cell(rank, strategy, feature, folder)
    told = [{name: each for name, each in batch.stats.items() if COUNTED.search(name)} for batch in outcome.batches]
    return outcome.after, [update.rate for update in outcome.updates], told


@pytest.mark.parametrize(
    "strategy", ["sparse_loco", "sparse_topk", *exhaustive(["sparse_sdagc", "sparse_exdyna", "sparse_a2sgd"])]
)
def test_a_search_for_a_rate_in_fit_leaves_nothing_behind(pair, strategy, tmp_path):
    (searched, rates, told), _ = pair.run(fit_with_a_rate, strategy, True, str(tmp_path))
    (expected, expected_rates, expected_told), _ = pair.run(fit_with_a_rate, strategy, False, str(tmp_path))
    assert rates == expected_rates == [0.1] * 24
    assert told == expected_told
    assert all(torch.equal(searched[name], expected[name]) for name in expected)


def test_the_table_on_the_page_is_that_of_the_rows():
    page = section(PAGE, "## Features")
    table = [[cell.strip() for cell in line.split("|")[1:-2]] for line in page.splitlines() if line.startswith("| ")]
    assert table[0][1:] == ["every step", *[f"`{name}`" for name in IN_EVERY_ROW[1:]]]
    assert table[2:] == [[row.name, *[word(row, strategy) for strategy in IN_EVERY_ROW]] for row in ROWS]
    for row in ROWS:
        for strategy, message in row.refusals.items():
            assert f"- {row.name} with `{strategy}` raises an error: *... {message} ...*" in page


def word(feature, strategy):
    if strategy in feature.refusals:
        return "no"
    return "GPU" if feature.needs_gpu else "yes"
