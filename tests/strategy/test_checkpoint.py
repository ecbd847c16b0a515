import os
import re
import shutil
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins import AsyncCheckpointIO, TorchCheckpointIO

from lightning_sparse.loop import state as state_module
from lightning_sparse.loop.state import CheckpointError
from lightning_sparse.strategy import checkpoint as checkpoint_module
from lightning_sparse.testing.tensors import assert_same
from tests.helpers.fits import fit, fits, refusals
from tests.helpers.resuming import Numbered, files_in

DGC = {"compressor": "dgc", "density": 0.05}
RANKS = ["rank_00000.pt", "rank_00001.pt"]


class Noting(TorchCheckpointIO):
    written: ClassVar[list[Any]] = []

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.written.append(path)
        super().save_checkpoint(checkpoint, path, storage_options)


class Saves(Numbered):
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
    for resumed, whole in zip(fits(pool, Numbered, DGC, str(path), **arguments), expected):
        assert_same(resumed.batches, whole.batches[first - 1 :])


def with_ranks(*names):
    return sorted([*names, *(f"{name}.sparse/{rank}" for name in names for rank in RANKS)])


CALLBACKS = {
    "the last one": ({}, "step=16.ckpt", with_ranks("step=16.ckpt")),
    "all": ({"save_top_k": -1}, "step=8.ckpt", with_ranks(*(f"step={step}.ckpt" for step in (4, 8, 12, 16)))),
    "and last": ({"save_last": True}, "last.ckpt", with_ranks("step=16.ckpt", "last.ckpt")),
    "by its address": ({"save_last": "link"}, "last.ckpt", ["last.ckpt", *with_ranks("step=16.ckpt")]),
    "weights only": ({"save_weights_only": True}, "", ["step=16.ckpt"]),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("settings", "name", "expected"), CALLBACKS.values(), ids=CALLBACKS)
def test_what_the_ranks_kept_is_kept_and_deleted_with_its_checkpoint(pair, tmp_path, settings, name, expected):
    callback = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, **settings)
    saved = fits(pair, Numbered, DGC, callbacks=[callback], enable_checkpointing=True, max_epochs=3)
    assert files_in(tmp_path) == expected
    if name:
        assert_went_on(pair, tmp_path / name, saved, 9 if name == "step=8.ckpt" else 17, max_epochs=3)
    content = torch.load(tmp_path / "step=16.ckpt", weights_only=True)
    assert ("lightning_sparse" in content) == bool(name)


@pytest.mark.parametrize("plugin", [None, AsyncCheckpointIO, Noting, partial(AsyncCheckpointIO, Noting())])
def test_a_new_save_takes_the_place_of_the_old_one(pair, tmp_path, plugin):
    path = str(tmp_path / "same.ckpt")
    actions = {batch: partial(save, path) for batch in (2, 5, 8)}
    saved = fits(pair, partial(Saves, actions), DGC, plugins=[plugin()] if plugin else [])
    assert sorted(set(files_in(tmp_path))) == with_ranks("same.ckpt")
    # After an asynchronous save, the file may name the last folder or the one before.
    assert len(list((tmp_path / "same.ckpt.sparse").iterdir())) == (1 if plugin in (None, Noting) else 2)
    assert_went_on(pair, path, saved, 9)


def test_weights_alone_leave_nothing_of_a_save_before_them(pair, tmp_path):
    path = tmp_path / "same.ckpt"
    pair.run(act, {2: partial(save, path), 8: partial(save, path, weights_only=True)})
    assert files_in(tmp_path) == ["same.ckpt"]


def test_the_users_plugin_writes_lightnings_file_by_the_path_that_the_user_gave(pair, tmp_path):
    path = tmp_path / "given.ckpt"
    answers = fits(pair, partial(Saves, {batch: partial(save, path) for batch in (4, 8)}), DGC, plugins=[Noting()])
    assert [each.notes for each in answers] == [[path] * 2, []]


def write_half(content, path):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
    os.truncate(path, os.path.getsize(path) // 2)
    os._exit(1)


def dies(rank, path, point):
    def die(model):
        if point == "folder" and rank == 1:
            state_module._write = write_half
        if point == "file":
            TorchCheckpointIO.save_checkpoint = lambda *_, **__: os._exit(1)
        if point == "cleaning":
            checkpoint_module._remove = lambda *_: os._exit(1)
        save(path, model)

    act(rank, {4: partial(save, path), 8: die})


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("point", "first"), [("folder", 5), ("file", 5), ("cleaning", 9)])
def test_a_crash_leaves_the_old_checkpoint_or_the_new_one(forked, tmp_path, point, first):
    path = str(tmp_path / "crash.ckpt")
    failures = [failure for failure, _ in forked[2].answers(dies, path, point)]
    assert "the process died" in failures
    assert_went_on(forked[2], path, fits(forked[2], Numbered, DGC), first)
    forked[2].run(act, {4: partial(save, path)})
    assert files_in(tmp_path) == with_ranks("crash.ckpt")


def fill_disk(rank, path, part):
    raised = []

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    def fail(model):
        owner, name = (state_module, "_write") if part == "folder" else (TorchCheckpointIO, "save_checkpoint")
        with mock.patch.object(owner, name, full) if rank == 1 or part == "file" else nullcontext():
            try:
                save(path, model)
            except CheckpointError as error:
                raised.append(f"{type(error).__name__}: {error}")

    batches = act(rank, {4: partial(save, path), 8: fail})
    return raised[0], batches


@pytest.mark.parametrize(("part", "failing"), [("folder", 1), ("file", 0)])
def test_a_full_disk_is_an_error_on_every_rank_and_spares_the_old_checkpoint(pair, tmp_path, part, failing):
    path = str(tmp_path / "full.ckpt")
    answers = pair.run(fill_disk, path, part)
    for message, _ in answers:
        assert message.startswith("CheckpointError")
        assert f"was not written: rank {failing} has failed with OSError" in message
        assert "No space left" in message
    for resumed, (_, expected) in zip(fits(pair, Numbered, DGC, path), answers):
        assert_same(resumed.batches, expected[4:])


@pytest.fixture(scope="module")
def saved(pools, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    pools[2].run(act, {4: partial(save, str(folder / "model.ckpt"))})
    return folder


@pytest.fixture
def copied(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def shards_in(folder):
    return sorted(folder.rglob("rank_*.pt"))


def truncate(folder):
    os.truncate(shards_in(folder)[1], 1000)


def change(edit, folder):
    state = torch.load(shards_in(folder)[1], weights_only=True)
    edit(state)
    torch.save(state, shards_in(folder)[1])


def change_header(folder, **changes):
    checkpoint = torch.load(folder / "model.ckpt", weights_only=True)
    checkpoint["lightning_sparse"].update(changes)
    torch.save(checkpoint, folder / "model.ckpt")


def exchange_folder(folder):
    (save,) = folder.glob("model.ckpt.sparse/*")
    save.rename(save.with_name("0" * 32))


BROKEN = {
    "truncated": (truncate, r"rank_00001.* cannot be read"),
    "missing": (lambda folder: shards_in(folder)[1].unlink(), r"rank_00001.* is missing: each rank"),
    "mixed": (partial(change, lambda state: state["header"].update(save="0" * 32)), r"of several saves"),
    "another folder": (exchange_folder, r"rank_0000[01].* is missing"),
    "turned": (
        partial(change, lambda state: state["layouts"]["network.0.weight"][0].reverse()),
        r"'network.0.weight' was saved with the shape and strides \[\[32, 64\]",
    ),
    "the format before": (partial(change_header, version=7), r"format 7.*Weights and optimizers load as usual"),
    "a state of another format": (partial(change, lambda state: state["header"].update(version=99)), r"format 99"),
    "part of a header": (partial(change, lambda state: state["header"].pop("save")), r"rank_00001.*format None"),
    "a path as name": (partial(change_header, save="../../elsewhere"), r"rank_0000\d.pt is missing"),
}


@pytest.mark.parametrize(("damage", "message"), BROKEN.values(), ids=BROKEN)
def test_what_is_broken_is_refused_with_a_cure(pair, copied, damage, message):
    damage(copied)
    answers = refusals(pair, Numbered, DGC, str(copied / "model.ckpt"))
    assert any(re.search(message, text, re.DOTALL) and "resume_compression=False" in text for text in answers)
    assert all(text.startswith("CheckpointError") for text in answers)


def test_it_goes_on_without_what_is_broken_if_told_to(pair, copied):
    truncate(copied)
    path = str(copied / "model.ckpt")
    for settings in ({**DGC, "resume_compression": False}, None):  # plain DDP reads the file
        assert [len(each.batches) for each in fits(pair, Numbered, settings, path)] == [8, 8]
    assert Numbered.load_from_checkpoint(path, map_location="cpu").network[0].weight.any()


def go_on_warned(rank, path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = fit(rank, Numbered, DGC, path, {}).batches
    return " ".join(str(each.message) for each in caught), len(batches)


def test_the_file_alone_goes_on_with_empty_residuals_and_says_so(pair, tmp_path, saved):
    path = shutil.copy(saved / "model.ckpt", tmp_path / "alone.ckpt")
    (first, batches), (_, others) = pair.run(go_on_warned, str(path))
    assert re.search(r"residuals start empty, because there is no .*alone.ckpt.sparse", first)
    assert batches == others == 8


def parts_read(rank, path):
    names = []
    read = state_module._read

    def read_noted(path):
        names.append(Path(path).name)
        return read(path)

    with mock.patch.object(state_module, "_read", read_noted):
        fit(rank, Numbered, DGC, path, {"max_epochs": 1})
    return names


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_parts_are_shared_out_among_the_ranks_that_go_on(pools, tmp_path, ranks):
    path = str(tmp_path / "model.ckpt")
    pools[4 if ranks < 3 else 2].run(act, {4: partial(save, path)})
    answers = pools[ranks].run(parts_read, path)
    read = [int(re.findall(r"\d+", name)[0]) for names in answers for name in names]
    count = 4 if ranks < 3 else 2
    assert set(read) == set(range(count))
    assert len(read) <= count + 2 * ranks  # each rank also reads a file's header, and rank 0's file
