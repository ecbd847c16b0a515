"""Digests repeat, and one bit changes them."""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sparse.testing.pool import Pool
from tests.digests import broken_promises, cases, compare, digest, main, train

SHORT = ["topk, layerwise, float32", "topk, single, float32", "topk, layerwise, bfloat16", "topk, resumed"]
CHOSEN = [case for case in cases() if case.name in SHORT]


def train_chosen(rank: int, folder: str) -> dict[str, Any]:
    """Train on the pool's processes, of whose warnings others speak."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {case.name: train(rank, case, Path(folder) / str(place)) for place, case in enumerate(CHOSEN)}


def test_a_training_that_is_repeated_resumed_or_grouped_otherwise_has_the_same_digests(
    pair: Pool, tmp_path: Path
) -> None:
    first, _ = pair.run(train_chosen, str(tmp_path / "first"))
    second, _ = pair.run(train_chosen, str(tmp_path / "second"))
    assert first == second
    assert broken_promises(CHOSEN, first) == []
    plain, rounded = first["topk, layerwise, float32"], first["topk, layerwise, bfloat16"]
    assert plain["parameters"][0] == plain["parameters"][1] != rounded["parameters"][0]
    assert len(plain["kept"]) == 20  # of two ranks, ten parameters each
    assert broken_promises(CHOSEN, {**first, "topk, single, float32": rounded})


def test_names_are_distinct_and_those_of_others_exist() -> None:
    names = [case.name for case in cases()]
    assert len(names) == len(set(names))
    assert {case.like for case in cases()} <= {"", *names}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_a_digest_sees_every_bit_and_no_shape(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    assert digest(tensor) == digest(tensor.flatten())
    assert digest(tensor) != digest(torch.tensor([0, 1, 1, 1]).to(dtype))


def record(parameters: str = "a", kept: tuple[str, ...] = ("b", "b"), machine: str = "mine") -> dict[str, Any]:
    """Return what a file holds."""
    digests = {"topk": {"parameters": [parameters], "optimizer": [], "kept": list(kept)}}
    return {"made_with": {"machine": machine}, "digests": digests}


def test_differences_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(record(), record()) == []
    assert compare(record(), record(parameters="c")) == ["topk: parameters"]
    assert compare(record(), record(kept=("b", "c"))) == ["topk: kept: 1 of 2 tensors gone, 1 new (b, c)"]
    assert compare(record(), record(machine="yours")) == ["machine: mine, but yours"]
    assert compare(record(), {**record(), "digests": {}}) == ["topk: only in one of the two"]
    paths = [str(tmp_path / name) for name in ("old.json", "new.json")]
    for path, content, code, words in zip(
        paths, (record(), record("c")), (0, 1), ("1 trainings ended with the same bits", "topk: parameters")
    ):
        Path(path).write_text(json.dumps(content))
        monkeypatch.setattr(sys, "argv", ["digests", "--compare", paths[0], path])
        assert main() == code
        assert capsys.readouterr().out == f"{words}\n"
