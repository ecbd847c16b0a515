"""``fit(ckpt_path="last")`` goes on from the newest checkpoint that is whole, the same on all ranks, and says so."""

import os
import shutil
import warnings
from pathlib import Path

from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.strategy.checkpoints import AtomicCheckpointIO
from tests.helpers.trainers import Small, make_trainer


class Elsewhere(AtomicCheckpointIO):
    """What rank 1 of two hosts sees without a shared file system: not what the other one has written."""

    def __init__(self, missing):
        self.missing = missing

    def load_checkpoint(self, path, *args, **kwargs):
        if os.environ["LOCAL_RANK"] == "1" and self.missing in str(path):
            raise FileNotFoundError(path)
        return super().load_checkpoint(path, *args, **kwargs)


def fit(rank, folder, steps, missing="", saves=None):
    """Train up to a step, from "last"; return the step that it began after, the warnings, and what was raised."""
    begun: list[int] = []

    class Begins(Small):
        def on_train_start(self):
            begun.append(self.trainer.global_step)

    plugins = [Elsewhere(missing)] if missing else []
    saving = ModelCheckpoint(folder, **{"every_n_train_steps": 2, "save_top_k": -1, **(saves or {})})
    trainer = make_trainer(
        rank,
        SparseDDPStrategy("topk", density=0.1),
        plugins=plugins,
        max_steps=steps,
        callbacks=[saving],
        enable_checkpointing=True,
        limit_val_batches=0,
    )
    raised = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(Begins(), ckpt_path="last")
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
    said = [str(each.message) for each in caught if "passes over" in str(each.message)]
    return -1 if raised else [*begun, trainer.global_step][0], said, raised


def path_of(folder, step):
    return folder / f"epoch=0-step={step}.ckpt"


def part_of(folder, step, rank):
    (path,) = Path(f"{path_of(folder, step)}.sparse").glob(f"*/rank_{rank:05d}.*")
    return path


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_damaged_checkpoints_are_passed_over_on_all_ranks(pools, tmp_path):
    began = pools[2].run(fit, str(tmp_path), 8)
    assert began == [(0, [], ""), (0, [], "")]  # where there is none yet
    assert [begins for begins, *_ in pools[2].run(fit, str(tmp_path), 8)] == [8, 8]
    path_of(tmp_path, 8).touch()  # a copy whose end never came
    halve(path_of(tmp_path, 8))
    part_of(tmp_path, 6, 1).unlink()  # of another host
    (first, said, _), second = pools[2].run(fit, str(tmp_path), 4)
    assert (first, second) == (4, (4, [], ""))
    assert [str(path_of(tmp_path, step)) in line for step, line in zip((8, 6), said)] == [True, True]
    assert "rank 1 says" in said[1]
    # Three ranks read the parts of two among them.
    halve(part_of(tmp_path, 4, 0))
    assert [begins for begins, *_ in pools[3].run(fit, str(tmp_path), 2)] == [2, 2, 2]
    shutil.rmtree(f"{path_of(tmp_path, 2)}.sparse")
    for begins, _, raised in pools[2].run(fit, str(tmp_path), 4):
        assert begins == -1
        assert raised.startswith("CheckpointError: ckpt_path='last': none of the 4 checkpoints")


def test_a_file_that_one_host_lacks_and_one_of_weights_only_are_passed_over(pools, tmp_path):
    pools[2].run(fit, str(tmp_path), 4)
    assert [begins for begins, *_ in pools[2].run(fit, str(tmp_path), 4, "step=4")] == [2, 2]
    pools[2].run(fit, str(tmp_path), 6, "", {"save_weights_only": True})
    (begins, said, _), _ = pools[2].run(fit, str(tmp_path), 8)
    assert begins == 4
    assert ["weights only" in line for line in said] == [True]
