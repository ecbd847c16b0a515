"""The conformance kit holds a compressor of the user's own to the laws, and the right one fails."""

import os
import re
from pathlib import Path

import pytest

from lightning_sparse.testing.laws import edges, finiteness, mass, replicas
from lightning_sparse.testing.subjects import subject_of
from tests.helpers.commands import run_pytest
from tests.helpers.kit import run_kit

LAWS = {
    "mass": lambda pools, name: mass.test_mass_is_conserved(pools, 2, name, "merged", "float32"),
    "grouping": lambda pools, name: replicas.test_replicas_are_identical_and_no_schedule_changes_a_bit(
        pools, 2, name, "float32"
    ),
    "finiteness": lambda pools, name: finiteness.test_a_gradient_that_is_not_finite_moves_nothing_that_is_kept(
        pools[2], name, "merged", "float32"
    ),
    "zeros": lambda pools, name: edges.test_zero_stays_zero(pools[2], name, "float32"),
}
ROW = "not layerwise and not single and not bfloat16 and not float16 and not 2bit and not 4bit"
LAWS_BY_NAME = {
    "mass_is_conserved",
    "a_parameter_is_written_where_any_rank_used_it",
    "replicas_are_identical_and_no_schedule_changes_a_bit",
    "the_observer_changes_nothing",
    "a_gradient_that_is_not_finite_moves_nothing_that_is_kept",
    "edges",
    "whatever_the_default_type",
    "zero_stays_zero",
    "a_model_that_is_one_edge",
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(
    ("compressor", "broken"),
    [
        ("HidesNaN", "finiteness"),
        ("HidesLastNaN", "finiteness"),
        ("LosesMass", "mass"),
        ("LooksAround", "grouping"),
        ("MovesZeros", "zeros"),
    ],
)
def test_a_broken_compressor_fails_the_law_that_it_breaks_and_no_other(pools, compressor, broken, law):
    subject = f"tests.compressors.lawless:{compressor}"
    if law != broken:
        LAWS[law](pools, subject)
        return
    with pytest.raises(AssertionError):
        LAWS[law](pools, subject)


def as_on_the_page(folder):
    """Write the compressor that docs/writing-a-compressor.md shows to a module, beside a test of a user's own."""
    text = (Path(__file__).parents[2] / "docs" / "writing-a-compressor.md").read_text()
    (folder / "shared_random.py").write_text(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[1])
    (folder / "test_mine.py").write_text("def test_mine():\n    pass\n")
    return "shared_random:SharedRandom"


@pytest.mark.exhaustive
def test_the_compressor_of_the_page_keeps_the_laws(forked, tmp_path, capsys):
    # Some rows of each law; all of them is what the page's reader runs.
    code = run_kit(forked, tmp_path, as_on_the_page(tmp_path), "-k", ROW, "-vv")
    output = capsys.readouterr().out
    assert code == 0, output
    assert {law for law in LAWS_BY_NAME if f"::test_{law}[" in output} == LAWS_BY_NAME, output


@pytest.mark.exhaustive
def test_the_command_of_the_page_collects_laws_alone(tmp_path):
    options = ("-p", "lightning_sparse.testing.plugin", "--compressor", as_on_the_page(tmp_path))
    code, output = run_pytest(tmp_path, *options, "--collect-only")
    assert code == 0, output
    assert {law for law in LAWS_BY_NAME if f"::test_{law}[" in output} == LAWS_BY_NAME, output
    assert "test_mine" not in output


@pytest.mark.exhaustive
def test_the_plugin_leaves_other_runs_alone(tmp_path):
    as_on_the_page(tmp_path)
    (tmp_path / "test_mine.py").write_text(
        "import sys\n\ndef test_mine():\n    assert not any('torch' in name for name in sys.modules)\n"
    )
    code, output = run_pytest(tmp_path)
    assert code == 0, output
    assert "1 passed" in output


def seed_found(rank):
    """Leave a seed in the environment, as ``seed_everything`` of Lightning does; return the one that was there."""
    found, os.environ["PL_GLOBAL_SEED"] = os.environ.get("PL_GLOBAL_SEED"), "1"
    return found


def test_what_a_function_leaves_in_the_environment_is_not_the_next_ones(pair):
    assert [pair.run(seed_found) for _ in range(2)] == [[None, None]] * 2


def hash_of_a_word(rank):
    return hash("word")


def test_the_first_rank_orders_its_sets_unlike_the_others(pair):
    one, other = pair.run(hash_of_a_word)
    assert one != other


@pytest.mark.parametrize("name", ["tests.compressors.lawless:Missing", "nowhere:Missing", "topp"])
def test_what_is_no_compressor_is_refused(name):
    with pytest.raises(ValueError, match=f"compressor='{name}'"):
        subject_of(name)
    with pytest.raises(TypeError, match="compressor="):
        subject_of("tests.compressors.lawless:NOT_A_COMPRESSOR")
