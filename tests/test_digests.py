import warnings
from pathlib import Path

import pytest
import torch

from tests.digests import broken_promises, cases, digest, train

SHORT = ["topk, layerwise, float32", "topk, single, float32", "topk, layerwise, bfloat16", "topk, resumed"]
CHOSEN = [case for case in cases() if case.name in SHORT]


def train_chosen(rank, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {case.name: train(rank, case, Path(folder) / str(place)) for place, case in enumerate(CHOSEN)}


@pytest.mark.exhaustive
def test_a_training_that_is_repeated_resumed_or_grouped_otherwise_has_the_same_digests(pair, tmp_path):
    first, _ = pair.run(train_chosen, str(tmp_path / "first"))
    second, _ = pair.run(train_chosen, str(tmp_path / "second"))
    assert first == second
    assert broken_promises(CHOSEN, first) == []
    plain, rounded = first["topk, layerwise, float32"], first["topk, layerwise, bfloat16"]
    assert plain["parameters"][0] == plain["parameters"][1] != rounded["parameters"][0]
    assert len(plain["kept"]) == 20  # two ranks with ten parameters each
    assert broken_promises(CHOSEN, {**first, "topk, single, float32": rounded})
    names = [case.name for case in cases()]
    assert len(names) == len(set(names))
    assert {case.like for case in cases()} <= {"", *names}


def test_a_digest_sees_every_bit():
    ones = torch.ones(4, dtype=torch.bfloat16)
    assert digest(ones) == digest(ones.clone()) != digest(ones.nextafter(2 * ones))
