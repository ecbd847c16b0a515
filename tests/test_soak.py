"""The soak in its short form, and that it would tell."""

from pathlib import Path

import torch

from lightning_sparse.testing.pool import Pool
from tests.helpers.soak import Usage, soak, verdict


def test_three_hundred_steps_leave_nothing_behind(pair: Pool, tmp_path: Path) -> None:
    answers = pair.run(soak, 300, str(tmp_path), timeout=120, patience=10)
    assert [[look.step for look in seen] for seen, _, _ in answers] == [[30, 150, 300]] * 2
    assert verdict(answers) == []
    assert list(tmp_path.glob("checkpoints/last.ckpt.sparse/*/rank_0000?.*.pt"))


def test_what_grows_or_comes_apart_is_told() -> None:
    flat = [Usage(30, 400.0, 9, 20), Usage(300, 401.0, 9, 20)]
    whole = (flat, 3, {"weight": torch.ones(2)})
    assert verdict([whole, whole]) == []
    for changes, message in (
        ({"megabytes": 450.0}, "memory grew"),
        ({"threads": 10}, "threads=10"),
        ({"files": 21}, "files=21"),
    ):
        (found,) = verdict([whole, ([flat[0], flat[1]._replace(**changes)], 3, whole[2])])
        assert message in found
    assert "differs" in verdict([whole, (flat, 3, {"weight": torch.zeros(2)})])[0]
    assert "nothing was planned" in verdict([(flat, 1, whole[2])])[0]
