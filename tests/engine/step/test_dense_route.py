"""Parameters with density 1 are sent dense: fewer bytes, equal results, and a way back if the density falls."""

import pytest
import torch

from lightning_sparse.compressors import DGC, LAGS, OMGS, TopK
from lightning_sparse.schedule import FixedSize
from lightning_sparse.testing.invariants import (
    assert_mass_is_conserved,
    balance,
    train_with_gaps,
)
from lightning_sparse.testing.tensors import assert_same
from tests.helpers.sparse_ddp import WIRES, Edges, backpropagate, batch, sparse_ddp


class Wavering:
    """Densities that change in each step, so that parameters alternate between sparse and dense messages."""

    step = 0

    def density_of(self, name, density):
        """Send every second name dense, the others in the next step, and sometimes all or none."""
        turn = (len(name) + self.step) % 2
        return {0: turn, 1: turn, 2: 1, 3: 0}[self.step % 4] or density

    def finish_step(self, names, means, finite, all_gather):
        self.step += 1
        return super().finish_step(names, means, finite, all_gather)


class WaveringTopK(Wavering, TopK):
    """Top-k that wavers."""


class WaveringOMGS(Wavering, OMGS):
    """OMGS that wavers."""


class WaveringDGC(Wavering, DGC):
    def __init__(self):
        super().__init__(momentum=0.9)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("schedule", "wire"), [("layerwise", "bfloat16"), ("merged", "float32"), ("single", "float16"), ("single", "4bit")]
)
@pytest.mark.parametrize("compressor", [WaveringTopK, WaveringOMGS])
def test_mass_is_conserved_while_densities_come_and_go(pools, compressor, schedule, wire):
    settings = {"compressor": compressor(), "density": 0.05, "schedule": schedule, "wire": wire}
    books = pools[3].run(balance, settings, 8)
    assert_mass_is_conserved(books)
    are_whole = []
    for entries in zip(*books):
        assert_same(entries[1]["applied"], entries[0]["applied"])
        assert_same(entries[2]["applied"], entries[0]["applied"])
        applied = entries[0]["applied"].values()
        # Three ranks select at most 0.15 of a large tensor. Narrow wires round some elements of a dense tensor to zero.
        are_whole += [bool(each.count_nonzero() > 0.2 * each.numel()) for each in applied]
    assert min(sum(are_whole), len(are_whole) - sum(are_whole)) > 10


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("compressor", "wire"), [*((WaveringTopK, wire) for wire in WIRES), (WaveringDGC, "bfloat16")])
def test_no_schedule_changes_a_bit_while_densities_come_and_go(pools, compressor, wire):
    outcomes = []
    for schedule in ("layerwise", "single", FixedSize(1000)):
        settings = {"compressor": compressor(), "density": 0.05, "schedule": schedule, "wire": wire}
        outcomes.append([entry["applied"] for book in pools[3].run(balance, settings, 6) for entry in book])
    for outcome in outcomes[1:]:
        assert_same(outcome, outcomes[0])


def test_what_is_not_finite_is_seen_whichever_way_it_goes(pair):
    settings = {"compressor": WaveringTopK(), "density": 0.05, "schedule": "single"}
    pair.run(train_with_gaps, settings, 1)


def stats_of_a_step(rank, settings):
    torch.manual_seed(0)
    with sparse_ddp(Edges(), **settings) as (ddp, engine):
        engine.begin_backward()
        backpropagate(ddp, engine, ddp(batch(rank, 0)))
        return engine.compression_stats()


def measured(pool, compressor, density):
    return pool.run(stats_of_a_step, {"compressor": compressor, "density": density})[0]


@pytest.mark.parametrize("compressor", ["topk", "lags", "dgc", "omgs"])
def test_density_one_costs_what_dense_costs(forked, compressor):
    stats = measured(forked[4], compressor, 1.0)
    assert stats["wire_bytes"] == measured(forked[4], "dense", None)["wire_bytes"]
    assert stats["density"] == 1.0


def test_a_whole_layer_among_others_leaves_nothing_out(pair):
    stats, _ = pair.run(stats_of_a_step, {"compressor": LAGS({"matrix": 1.0}), "density": 0.05})
    sent = {"scale": 1, "pair": 1, "prime": 50, "matrix": 64 * 40, "encoder": 80, "decoder": 2}
    numel = sum(parameter.numel() for parameter in Edges().parameters())
    assert stats["density"] == sum(sent.values()) / numel
