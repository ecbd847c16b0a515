import math
from functools import partial

import pytest
import torch

from lightning_sparse import AdamCorrection
from lightning_sparse.compressors import DGC
from lightning_sparse.engine.settings import Settings
from lightning_sparse.loop.levels import ranks_of_node
from tests.helpers.fits import fits, one_model
from tests.helpers.trainers import Small, with_optimizer

CHOICES = {
    "two nodes of two": ("topk", [0, 0, 1, 1], 2),
    "four nodes of eight": ("lags", [rank // 8 for rank in range(32)], 8),
    "one node": ("topk", [0, 0, 0, 0], 1),
    "nodes of one": ("topk", [0, 1, 2], 1),
    "ragged": ("topk", [0, 0, 1], 1),
    "in turns": ("topk", [0, 1, 0, 1], 1),
    "a method that looks at all": ("exdyna", [0, 0, 1, 1], 1),
    "replicas that drift apart": ("a2sgd", [0, 0, 1, 1], 1),
}


@pytest.mark.parametrize(("compressor", "nodes", "expected"), CHOICES.values(), ids=CHOICES)
def test_auto_takes_two_levels_where_there_are(compressor, nodes, expected):
    assert ranks_of_node(Settings.of(compressor), nodes) == expected
    assert ranks_of_node(Settings.of(compressor, levels=1), nodes) == 1


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1], [0, 0, 1], [0, 1] * 8], ids=["one", "of one", "ragged", "in turns"])
def test_two_levels_are_refused_where_there_are_none(nodes):
    with pytest.raises(ValueError, match=r"levels=2.*nodes of the ranks are 0.* GROUP_RANK"):
        ranks_of_node(Settings.of("topk", 0.01, levels=2), nodes)


CORRECTED = {"optimizer_correction": AdamCorrection(warmup_steps=3, density_decay_steps=2, second_moment_interval=2)}
ADAMW = partial(with_optimizer, torch.optim.AdamW, lr=1e-2)
FITS = {
    "AdamW, clipped": (CORRECTED, ADAMW, {"gradient_clip_val": 0.1}),
    "AdamW, owners": ({**CORRECTED, "exchange": "owners"}, ADAMW, {}),
    "clipped before": ({"compressor": DGC(clip_norm=0.5), "warmup_steps": 0}, Small, {}),
    "auto": ({"schedule": "auto"}, Small, {}),
}


SPARSE = {"compressor": "topk", "density": 0.05}
NODES = {"local_world_size": 2, "max_epochs": 4, "limit_train_batches": 8}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("settings", "module", "trainer"), FITS.values(), ids=FITS)
def test_a_fit_on_two_nodes(pools, settings, module, trainer):
    answers = fits(pools[4], module, {**SPARSE, **settings}, **{**NODES, **trainer})
    one_model(answers)
    for each in answers:
        assert each.total["inter_node_bytes"] < each.total["wire_bytes"] or math.isnan(each.total["select_seconds"])
        assert 0 < each.total["total_inter_node_bytes"] < each.total["total_wire_bytes"]
    assert any("two levels: the 2 ranks of each of 2 nodes" in line for line in answers[0].said)
    assert "to other nodes) instead of" in answers[0].said[-1]


def test_one_level_on_two_nodes_if_it_is_asked_for(pools):
    for each in fits(pools[4], Small, {**SPARSE, "levels": 1}, local_world_size=2):
        assert "inter_node_bytes" not in each.total
        assert not any("two levels" in line for line in each.said)
