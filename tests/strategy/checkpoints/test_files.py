"""Checkpoints as files: complete or not there, deleted together, and refused with a cure where they are broken."""

import os
import re
import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO

from lightning_sparse.strategy.checkpoints import AtomicCheckpointIO, Checkpointer, CheckpointError
from lightning_sparse.strategy.checkpoints.shards import read_header, read_shard
from lightning_sparse.testing.tensors import assert_same
from tests.helpers.fits import fit, fits, strategy_of
from tests.helpers.resuming import Numbered, files_in, fit_numbered

DGC = {"compressor": "dgc", "density": 0.05}
RANKS = ["rank_00000.pt", "rank_00001.pt"]


class Noting(TorchCheckpointIO):
    """A plugin of the user's own, which notes what it is given to write."""

    written: ClassVar[list[Any]] = []

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.written.append(path)
        super().save_checkpoint(checkpoint, path, storage_options)


class Saves(Numbered):
    """A model that does something after some of its batches, with notes of what a plugin has written."""

    def __init__(self, actions):
        super().__init__()
        self.actions = actions
        Noting.written.clear()

    @property
    def notes(self):
        return list(Noting.written)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        action = self.actions.get(max(self.history))
        if action is not None:
            action(self)


def save(path, model, weights_only=False):
    model.trainer.save_checkpoint(path, weights_only=weights_only)


def act(rank, actions, *plugins):
    return fit(rank, partial(Saves, actions), DGC, None, {"plugins": plugins}).batches


def assert_went_on(pool, path, expected, first, **arguments):
    """Go on from a checkpoint, and ask for the same bits from a batch on."""
    for resumed, whole in zip(fits(pool, Numbered, DGC, str(path), **arguments), expected):
        assert_same(resumed.batches, whole.batches[first - 1 :])


def with_ranks(*names):
    return sorted([*names, *(f"{name}.sparse/{rank}" for name in names for rank in RANKS)])


CALLBACKS = {
    "the last one": ({}, "step=16.ckpt", with_ranks("step=16.ckpt")),
    "all": ({"save_top_k": -1}, "step=8.ckpt", with_ranks(*(f"step={step}.ckpt" for step in (4, 8, 12, 16)))),
    "and last": ({"save_last": True}, "last.ckpt", with_ranks("step=16.ckpt", "last.ckpt")),
    "by its address": ({"save_last": "link"}, "file://last.ckpt", ["last.ckpt", *with_ranks("step=16.ckpt")]),
    "weights only": ({"save_weights_only": True}, "", ["step=16.ckpt"]),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("settings", "name", "expected"), CALLBACKS.values(), ids=CALLBACKS)
def test_what_the_ranks_kept_is_kept_and_deleted_with_its_checkpoint(pair, tmp_path, settings, name, expected):
    callback = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, **settings)
    saved = fits(pair, Numbered, DGC, callbacks=[callback], enable_checkpointing=True, max_epochs=3)
    assert files_in(tmp_path) == expected
    if name:
        _, address, file = name.rpartition("file://")
        first = 9 if name == "step=8.ckpt" else 17
        assert_went_on(pair, f"{address}{tmp_path / file}", saved, first, max_epochs=3)
    content = torch.load(tmp_path / "step=16.ckpt", weights_only=True)
    assert ("lightning_sparse" in content) == bool(name)


@pytest.mark.parametrize("plugin", [None, AsyncCheckpointIO, Noting, partial(AsyncCheckpointIO, Noting())])
def test_a_new_save_takes_the_place_of_the_old_one(pair, tmp_path, plugin):
    path = str(tmp_path / "same.ckpt")
    actions = {batch: partial(save, path) for batch in (2, 5, 8)}
    saved = fits(pair, partial(Saves, actions), DGC, plugins=[plugin()] if plugin else [])
    assert sorted(set(files_in(tmp_path))) == with_ranks("same.ckpt")
    # Of an asynchronous plugin, what the last file but one has named is removed at the next save.
    assert len(list((tmp_path / "same.ckpt.sparse").iterdir())) == (1 if plugin in (None, Noting) else 2)
    assert_went_on(pair, path, saved, 9)


def test_weights_alone_leave_nothing_of_a_save_before_them(pair, tmp_path):
    path = tmp_path / "same.ckpt"
    pair.run(act, {2: partial(save, path), 8: partial(save, path, weights_only=True)})
    assert files_in(tmp_path) == ["same.ckpt"]


def test_the_users_plugin_writes_everything_by_the_path_that_the_user_gave(pair, tmp_path):
    path = tmp_path / "given.ckpt"
    answers = fits(pair, partial(Saves, {batch: partial(save, path) for batch in (4, 8)}), DGC, plugins=[Noting()])
    for rank, written in enumerate(each.notes for each in answers):
        parts = [os.path.basename(each) for each in written if isinstance(each, str)]
        # By its name alone torch tells downloads apart, among those that it has on its disk.
        assert len(parts) == len(set(parts)) == 2
        assert [re.sub(r"\.[0-9a-f]{32}", "", part) for part in parts] == [RANKS[rank]] * 2
        assert [each for each in written if isinstance(each, Path)] == ([] if rank else [path] * 2)


def write_half(original, part):
    """Return a ``torch.save`` that ends the process in the middle of a file whose name has a part."""

    def save(content, path):
        original(content, path)
        if part in path:
            os.truncate(path, os.path.getsize(path) // 2)
            os._exit(1)

    return save


def dies(rank, path, point):
    def die(model):
        if point == "cleaning":
            Checkpointer._remove_saves = lambda *_, **__: os._exit(1)
        else:
            torch.save = write_half(torch.save, point)
        save(path, model)

    act(rank, {4: partial(save, path), 8: die})


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("point", "first"), [("rank_00001", 5), ("crash.ckpt.partial", 5), ("cleaning", 9)])
def test_a_crash_leaves_the_old_checkpoint_or_the_new_one(forked, tmp_path, point, first):
    path = str(tmp_path / "crash.ckpt")
    failures = [failure for failure, _ in forked[2].answers(dies, path, point)]
    assert "the process died" in failures
    assert_went_on(forked[2], path, fits(forked[2], Numbered, DGC), first)
    # What the crash left behind goes with the next save.
    forked[2].run(act, {4: partial(save, path)})
    assert files_in(tmp_path) == with_ranks("crash.ckpt")


class FullDisk(AtomicCheckpointIO):
    """A plugin that runs out of space in one kind of file after a few of them."""

    def __init__(self, part):
        self.part = part
        self.is_full = False

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        if self.is_full and self.part in str(path):
            raise OSError(28, "No space left on device")
        super().save_checkpoint(checkpoint, path, storage_options)


def fill_disk(rank, path, part):
    """Fail to save over a checkpoint and train on; return what was raised, what comes of it, and the files then."""
    plugin, raised = FullDisk(part), []

    def fail(model):
        plugin.is_full = True
        try:
            save(path, model)
        except (OSError, CheckpointError) as error:
            raised.append(f"{type(error).__name__}: {error}")
        dist.barrier()
        raised.append(files_in(Path(path).parent))

    batches = act(rank, {4: partial(save, path), 8: fail}, plugin)
    return raised[0], batches, raised[1]


@pytest.mark.parametrize(("part", "failing"), [("rank_00001", 1), ("full.ckpt", 0)])
def test_a_full_disk_is_told_on_every_rank_and_spares_the_old_checkpoint(pair, tmp_path, part, failing):
    path = str(tmp_path / "full.ckpt")
    answers = pair.run(fill_disk, path, part)
    for rank, (message, _, files) in enumerate(answers):
        assert files == with_ranks("full.ckpt")
        has_failed = rank == failing or part == "full.ckpt"
        assert ("No space left" if has_failed else "another rank could not write its part") in message
    for resumed, (_, expected, _) in zip(fits(pair, Numbered, DGC, path), answers):
        assert_same(resumed.batches, expected[4:])


def go_on_elsewhere(rank, path, settings=DGC):
    """Go on with a strategy; return what was raised or warned of, and how many batches were gone through."""
    model = Numbered()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", message=".*residuals start empty")
        try:
            fit_numbered(rank, strategy_of(settings), model, path)
        except CheckpointError as error:
            return str(error), len(model.history)
    return " ".join(str(each.message) for each in caught), len(model.history)


@pytest.fixture(scope="module")
def saved(pools, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    pools[2].run(act, {4: partial(save, str(folder / "model.ckpt"))})
    return folder


@pytest.fixture
def copied(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def shards_in(folder):
    return sorted(folder.glob("model.ckpt.sparse/*/rank_*.pt"))


def truncate(folder):
    os.truncate(shards_in(folder)[1], 1000)


def change(edit, folder):
    shard = torch.load(shards_in(folder)[1], weights_only=True)
    edit(shard, shard["models"]["model"])
    torch.save(shard, shards_in(folder)[1])


def change_header(folder, **changes):
    checkpoint = torch.load(folder / "model.ckpt", weights_only=True)
    checkpoint["lightning_sparse"].update(changes)
    torch.save(checkpoint, folder / "model.ckpt")


def exchange_folder(folder):
    (shards_in(folder)[0].parent).rename(folder / "model.ckpt.sparse" / ("0" * 32))


change_shape = partial(
    change, lambda _, kept: kept["rank"]["memory"]["residual"].update({"network.0.weight": torch.zeros(7)})
)
BROKEN = {
    "truncated": (truncate, r"rank_00001.* cannot be read"),
    "missing": (lambda folder: shards_in(folder)[1].unlink(), r"rank_00001.* is missing: .* 2 ranks"),
    "mixed": (
        partial(change, lambda shard, _: shard["lightning_sparse"].update(name="0" * 32)),
        r"rank_00001.* not belong",
    ),
    "another folder": (exchange_folder, r"rank_0000[01].* is missing"),
    "shape": (change_shape, r"residual of 7 elements .*'network.0.weight', which has 2048"),
    "turned": (
        partial(change, lambda _, kept: kept["layouts"]["network.0.weight"][0].reverse()),
        r"'network.0.weight': it was saved with the shape \[32, 64\]",
    ),
    "another version": (partial(change_header, version=4), r"format 4"),
    "a path as name": (partial(change_header, name="../../elsewhere"), r"not as this package writes it"),
}


@pytest.mark.parametrize(("damage", "message"), BROKEN.values(), ids=BROKEN)
def test_what_is_broken_is_refused_with_a_cure(pair, copied, damage, message):
    damage(copied)
    answers = pair.run(go_on_elsewhere, str(copied / "model.ckpt"))
    assert any(re.search(message, text, re.DOTALL) and "resume_compression=False" in text for text, _ in answers)
    assert all(batches == 0 for _, batches in answers)


def test_it_goes_on_without_what_is_broken_if_told_to(pair, copied):
    truncate(copied)
    path = str(copied / "model.ckpt")
    assert pair.run(go_on_elsewhere, path, {**DGC, "resume_compression": False}) == [("", 8)] * 2
    assert pair.run(go_on_elsewhere, path, None) == [("", 8)] * 2  # plain DDP reads the file
    assert Numbered.load_from_checkpoint(path, map_location="cpu").network[0].weight.any()


def test_the_file_alone_goes_on_with_empty_residuals_and_says_so(pair, tmp_path, saved):
    path = shutil.copy(saved / "model.ckpt", tmp_path / "alone.ckpt")
    (first, batches), (_, others) = pair.run(go_on_elsewhere, str(path))
    assert re.search(r"residuals start empty, because what 2 ranks kept is not in .*alone.ckpt.sparse", first)
    assert batches == others == 8


def parts_read(rank, path):
    """Go on from a checkpoint; return the names of the parts that this rank has read."""
    read = []
    load = AtomicCheckpointIO.load_checkpoint

    def load_noted(plugin, path, *arguments, **named):
        read.extend([Path(path).name] * (".sparse" in str(path)))
        return load(plugin, path, *arguments, **named)

    with mock.patch.object(AtomicCheckpointIO, "load_checkpoint", load_noted):
        fit(rank, Numbered, DGC, path, {"max_epochs": 1})
    return read


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_parts_are_shared_out_among_the_ranks_that_go_on(pools, tmp_path, ranks):
    path = str(tmp_path / "model.ckpt")
    pools[4 if ranks < 3 else 2].run(act, {4: partial(save, path)})
    answers = pools[ranks].run(parts_read, path)
    read = [int(re.findall(r"\d+", name)[0]) for names in answers for name in names]
    # Whoever is left without a share looks into somebody else's, for its form.
    assert sorted(read) == ([0, 1, 2, 3] if ranks < 3 else [0, 0, 1])


def remove(path, model):
    model.trainer.strategy.remove_checkpoint(path)


class Old(CheckpointIO):
    def save_checkpoint(self, checkpoint, path, storage_options=None):
        torch.save(checkpoint, path)

    def load_checkpoint(self, path, map_location=None):
        return torch.load(path, map_location)

    def remove_checkpoint(self, path):
        os.remove(path)


def test_a_plugin_that_cannot_read_safely_is_refused(saved):
    header = read_header(torch.load(saved / "model.ckpt", weights_only=True), "model.ckpt")
    with pytest.raises(CheckpointError, match=r"Old.load_checkpoint takes no argument weights_only"):
        read_shard(Old(), str(shards_in(saved)[0]), header)


def test_a_file_is_written_whole_where_lightning_has_no_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("here.ckpt", f"file://{tmp_path}/scheme.ckpt", tmp_path / "deep" / "er" / "path.ckpt"):
        AtomicCheckpointIO().save_checkpoint({"value": 1}, path)
        assert AtomicCheckpointIO().load_checkpoint(path, weights_only=True) == {"value": 1}
    assert files_in(tmp_path) == ["deep/er/path.ckpt", "here.ckpt", "scheme.ckpt"]
    with pytest.raises(TypeError, match="storage_options"):
        AtomicCheckpointIO().save_checkpoint({}, "here.ckpt", storage_options={"key": "value"})
    assert AtomicCheckpointIO().load_checkpoint("here.ckpt", weights_only=True) == {"value": 1}
