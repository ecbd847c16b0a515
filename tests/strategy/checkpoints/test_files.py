"""Checkpoints as files: complete or not there, deleted together, and refused with a cure where they are broken."""

import errno
import os
import pickle
import re
import shutil
import signal
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Optional
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO
from pytorch_lightning.strategies import DDPStrategy

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.strategy.checkpoints import AtomicCheckpointIO, Checkpointer, CheckpointError
from lightning_sparse.testing.equality import differences
from lightning_sparse.testing.pool import Pool
from tests.helpers.resuming import Numbered, files_in, fit_numbered

build = partial(SparseDDPStrategy, "dgc", density=0.05)
RANKS = ["rank_00000.pt", "rank_00001.pt"]


class Saves(Numbered):
    """A model that does something after some of its batches."""

    def __init__(self, actions: dict[int, Callable[["Saves"], None]]) -> None:
        super().__init__()
        self.actions = actions

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Take a note, and do what is to be done."""
        super().on_train_batch_end(outputs, batch, batch_idx)
        action = self.actions.get(max(self.history))
        if action is not None:
            action(self)


def saving(path: str, weights_only: bool = False) -> Callable[[Saves], None]:
    """Return an action that saves."""
    return lambda model: model.trainer.save_checkpoint(path, weights_only=weights_only)


def go_on(rank: int, path: str, **arguments: Any) -> dict[int, Any]:
    """Go on from a checkpoint; return the weights after each batch."""
    model = Numbered()
    fit_numbered(rank, build(), model, path, **arguments)
    return model.history


def fit_with_callback(rank: int, folder: Path, settings: dict[str, Any], name: str) -> tuple[list[str], list[str]]:
    """Fit with ModelCheckpoint, then go on from a file of a name; return the files, and what differs."""
    callback = ModelCheckpoint(folder, "{step}", every_n_train_steps=4, **settings)
    model = Numbered()
    fit_numbered(rank, build(), model, callbacks=[callback], enable_checkpointing=True, max_epochs=3)
    files = files_in(folder)
    if not name:
        return files, []
    _, address, file = name.rpartition("file://")
    history = go_on(rank, f"{address}{folder / file}", max_epochs=3)
    return files, differences({seen: model.history[seen] for seen in history}, history)


def with_ranks(*names: str) -> list[str]:
    """Return the files that belong to full checkpoints."""
    return sorted([*names, *(f"{name}.sparse/{rank}" for name in names for rank in RANKS)])


CALLBACKS = {
    "the last one": ({}, "step=16.ckpt", with_ranks("step=16.ckpt")),
    "all": (
        {"save_top_k": -1},
        "step=8.ckpt",
        with_ranks("step=4.ckpt", "step=8.ckpt", "step=12.ckpt", "step=16.ckpt"),
    ),
    "and last": ({"save_last": True}, "last.ckpt", with_ranks("step=16.ckpt", "last.ckpt")),
    "and a link": ({"save_last": "link"}, "last.ckpt", ["last.ckpt", *with_ranks("step=16.ckpt")]),
    "by its address": ({"save_last": "link"}, "file://last.ckpt", ["last.ckpt", *with_ranks("step=16.ckpt")]),
    "weights only": ({"save_weights_only": True}, "", ["step=16.ckpt"]),
}


@pytest.mark.parametrize(("settings", "name", "expected"), CALLBACKS.values(), ids=CALLBACKS)
def test_what_the_ranks_kept_is_kept_and_deleted_with_its_checkpoint(
    pair: Pool, tmp_path: Path, settings: dict[str, Any], name: str, expected: list[str]
) -> None:
    for files, found in pair.run(fit_with_callback, tmp_path, settings, name):
        assert files == expected
        assert found == []
    (weights_only,) = {str(path) for path in tmp_path.glob("step=16.ckpt")}
    assert ("lightning_sparse" in torch.load(weights_only, weights_only=True)) == bool(name)


def fit_actions(rank: int, plugin: Any, actions: dict[int, Callable[[Saves], None]]) -> dict[int, Any]:
    """Fit a model with actions; return the weights after each batch."""
    model = Saves(actions)
    fit_numbered(rank, build(), model, plugins=[] if plugin is None else [plugin()])
    return model.history


def overwrite(rank: int, folder: Path, plugin: Any, last_weights_only: bool) -> tuple[list[str], list[str]]:
    """Save three times under one name; return the files, and what differs after going on from there."""
    path = str(folder / "same.ckpt")
    actions = {2: saving(path), 5: saving(path), 8: saving(path, last_weights_only)}
    history = fit_actions(rank, plugin, actions)
    dist.barrier()  # only rank 0 knows when an asynchronous plugin has written the last file
    files = sorted(set(files_in(folder)))
    if last_weights_only:
        return files, []
    resumed = go_on(rank, path)
    return files, differences({seen: history[seen] for seen in (9, 10, 11, 12)}, resumed)


class Noting(TorchCheckpointIO):
    """A plugin of the user's own, which notes what it is given to write."""

    written: ClassVar[list[Any]] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Optional[Any] = None) -> None:
        self.written.append(path)
        super().save_checkpoint(checkpoint, path, storage_options)


@pytest.mark.parametrize("plugin", [None, AsyncCheckpointIO, Noting, partial(AsyncCheckpointIO, Noting())])
def test_a_new_save_takes_the_place_of_the_old_one(pair: Pool, tmp_path: Path, plugin: Any) -> None:
    for files, found in pair.run(overwrite, tmp_path, plugin, False):
        assert files == with_ranks("same.ckpt")
        assert found == []
    # Of an asynchronous plugin, what the last file but one has named is removed at the next save.
    assert len(list((tmp_path / "same.ckpt.sparse").iterdir())) == (1 if plugin in (None, Noting) else 2)


def test_weights_alone_leave_nothing_of_a_save_before_them(pair: Pool, tmp_path: Path) -> None:
    for files, _ in pair.run(overwrite, tmp_path, None, True):
        assert files == ["same.ckpt"]


def save_over_another(rank: int, folder: Path, plugin: Any) -> tuple[list[str], list[str]]:
    """Save, save under that name from another Trainer, use the first one again; return the files before and after."""
    path, plugins = str(folder / "same.ckpt"), [plugin()] if plugin else []
    model = Saves({5: saving(path)})
    first = fit_numbered(rank, build(), model, plugins=plugins)
    first.save_checkpoint(path)
    first.strategy.checkpoint_io.teardown()  # for an asynchronous plugin
    fit_actions(rank, None, {8: saving(path)})
    before = [str(each) for each in sorted(folder.rglob("*.pt"))]
    dist.barrier()
    first.validate(model, verbose=False)
    dist.barrier()
    return before, [str(each) for each in sorted(folder.rglob("*.pt"))]


@pytest.mark.parametrize("plugin", [None, AsyncCheckpointIO])
def test_what_another_trainer_has_saved_since_is_left_alone(pair: Pool, tmp_path: Path, plugin: Any) -> None:
    for before, after in pair.run(save_over_another, tmp_path, plugin):
        assert len(before) == 2
        assert after == before


def written_by(rank: int, path: Path) -> list[Any]:
    """Save two times under one name; return what the plugin was given to write."""
    Noting.written.clear()
    save: Any = partial(saving, path)  # type: ignore[arg-type]
    fit_actions(rank, Noting, {4: save(), 8: save()})
    return Noting.written


def test_the_users_plugin_writes_everything_by_the_path_that_the_user_gave(pair: Pool, tmp_path: Path) -> None:
    path = tmp_path / "given.ckpt"
    for rank, written in enumerate(pair.run(written_by, path)):
        parts = [os.path.basename(each) for each in written if isinstance(each, str)]
        # By its name alone torch tells downloads apart, among those that it has on its disk.
        assert len(parts) == len(set(parts)) == 2
        assert [re.sub(r"\.[0-9a-f]{32}", "", part) for part in parts] == [RANKS[rank]] * 2
        assert [each for each in written if isinstance(each, Path)] == ([] if rank else [path] * 2)


def write_half(original: Callable[..., None], part: str) -> Callable[..., None]:
    """Return a ``torch.save`` that ends the process in the middle of a file whose name has a part."""

    def save(content: Any, path: str) -> None:
        original(content, path)
        if part in path:
            os.truncate(path, os.path.getsize(path) // 2)
            os._exit(1)

    return save


def dies(rank: int, path: str, point: str, notes: str) -> None:
    """Save after batch 4, train on, and die when saving after batch 8; leave notes of what should have come."""

    def die(model: Saves) -> None:
        if point == "cleaning":
            Checkpointer._remove_saves = lambda *_, **__: os._exit(1)  # type: ignore[method-assign]
        else:
            torch.save = write_half(torch.save, point)
        model.trainer.save_checkpoint(path)

    history = fit_actions(rank, None, {4: saving(path)})
    torch.save(history, f"{notes}-{rank}")
    fit_actions(rank, None, {4: saving(path), 8: die})


def goes_on_as_noted(rank: int, path: str, notes: str) -> tuple[list[int], list[str]]:
    """Go on; return which batches were gone through, and what differs from the notes."""
    resumed = go_on(rank, path)
    history = torch.load(f"{notes}-{rank}", weights_only=True)
    return sorted(resumed), differences({seen: history[seen] for seen in resumed}, resumed)


@pytest.mark.parametrize(("point", "first"), [("rank_00001", 5), ("crash.ckpt.partial", 5), ("cleaning", 9)])
def test_a_crash_leaves_the_old_checkpoint_or_the_new_one(
    forked: dict[int, Pool], tmp_path: Path, point: str, first: int
) -> None:
    folder, notes = tmp_path / "checkpoints", str(tmp_path / "notes")
    path = str(folder / "crash.ckpt")
    failures = [failure for failure, _ in forked[2].answers(dies, path, point, notes)]
    assert "the process died" in failures
    for resumed, found in forked[2].run(goes_on_as_noted, path, notes):
        assert resumed == list(range(first, 13))
        assert found == []
    # What the crash left behind goes with the next save.
    forked[2].run(fit_actions, None, {4: partial(_save, path)})
    assert files_in(folder) == with_ranks("crash.ckpt")


def _save(path: str, model: Saves) -> None:
    model.trainer.save_checkpoint(path)


class FullDisk(AtomicCheckpointIO):
    """A plugin that runs out of space in one kind of file after a few of them."""

    def __init__(self, part: str) -> None:
        self.part = part
        self.is_full = False

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Optional[Any] = None) -> None:
        if self.is_full and self.part in str(path):
            raise OSError(28, "No space left on device")
        super().save_checkpoint(checkpoint, path, storage_options)


def fill_disk(rank: int, path: str, part: str) -> tuple[str, list[str]]:
    """Fail to save over a checkpoint and train on; return what was raised, and how resuming the old one differs."""
    plugin, raised = FullDisk(part), []

    def fail(model: Saves) -> None:
        plugin.is_full = True
        try:
            model.trainer.save_checkpoint(path)
        except (OSError, CheckpointError) as error:
            raised.append(f"{type(error).__name__}: {error}")
        dist.barrier()
        assert files_in(Path(path).parent) == with_ranks("full.ckpt")

    history = fit_actions(rank, lambda: plugin, {4: saving(path), 8: fail})
    resumed = go_on(rank, path)
    return raised[0], differences({seen: history[seen] for seen in range(5, 13)}, resumed)


@pytest.mark.parametrize(("part", "failing"), [("rank_00001", 1), ("full.ckpt", 0)])
def test_a_full_disk_is_told_on_every_rank_and_spares_the_old_checkpoint(
    pair: Pool, tmp_path: Path, part: str, failing: int
) -> None:
    path = str(tmp_path / "full.ckpt")
    for rank, (message, found) in enumerate(pair.run(fill_disk, path, part)):
        assert found == []
        if rank == failing or part == "full.ckpt":
            assert "No space left" in message
        else:
            assert "another rank could not write its part" in message


def requeue(rank: int, folder: Path) -> tuple[dict[int, Any], dict[int, Any]]:
    """Save as SLURM's signal makes Lightning do, with the traces of a save that was cut short, and go on."""

    def interrupt(model: Saves) -> None:
        connector = model.trainer._signal_connector
        with mock.patch("pytorch_lightning.trainer.connectors.signal_connector.call", return_value=0) as call:
            connector._slurm_sigusr_handler_fn(signal.SIGUSR1, None)
        assert call.called == (rank == 0)

    first, second = Saves({4: interrupt}), Numbered()
    with mock.patch.dict(os.environ, SLURM_JOB_ID="1"):
        fit_numbered(rank, build(), first, default_root_dir=str(folder))
    leftover = folder / "hpc-ckpt-2.ckpt.sparse" / ("0" * 32)
    leftover.mkdir(parents=True, exist_ok=True)
    (folder / "hpc-ckpt-2.ckpt.partial").touch()
    fit_numbered(rank, build(), second, "hpc", default_root_dir=str(folder))
    return {seen: first.history[seen] for seen in range(5, 13)}, second.history


def test_a_job_that_slurm_requeues_goes_on_to_the_bit(pair: Pool, tmp_path: Path) -> None:
    for expected, resumed in pair.run(requeue, tmp_path):
        assert differences(expected, resumed) == []
    assert (tmp_path / "hpc_ckpt_1.ckpt").exists()


def go_on_elsewhere(rank: int, strategy: Any, path: str) -> tuple[str, int]:
    """Go on with a strategy; return what was raised or warned of, and how many batches were gone through."""
    model = Numbered()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", message=".*residuals start empty")
        try:
            fit_numbered(rank, strategy(), model, path)
        except CheckpointError as error:
            return str(error), len(model.history)
    return " ".join(str(each.message) for each in caught), len(model.history)


@pytest.fixture(scope="module")
def saved(pools: dict[int, Pool], tmp_path_factory: Any) -> Path:
    """Return a folder with a checkpoint of two ranks."""
    folder: Path = tmp_path_factory.mktemp("saved")
    pools[2].run(fit_actions, None, {4: partial(_save, str(folder / "model.ckpt"))})
    return folder


def shards_in(folder: Path) -> list[Path]:
    """Return the parts of the ranks."""
    return sorted(folder.glob("model.ckpt.sparse/*/rank_*.pt"))


class Evil:
    """What a pickle may ask for."""

    def __reduce__(self) -> Any:
        return os.mkdir, (str(Path(os.environ["TMPDIR_OF_TEST"]) / "executed"),)


def truncate(folder: Path) -> None:
    os.truncate(shards_in(folder)[1], 1000)


def replace(content: Any, folder: Path) -> None:
    """Put something else in the place of a rank's part."""
    shard = shards_in(folder)[1]
    if isinstance(content, bytes):
        shard.write_bytes(content)
    else:
        torch.save(content, shard)


def change(edit: Callable[[Any], Any], folder: Path) -> None:
    """Change what a rank's part holds."""
    shard = torch.load(shards_in(folder)[1], weights_only=True)
    edit(shard)
    torch.save(shard, shards_in(folder)[1])


def take_away(folder: Path) -> None:
    shards_in(folder)[1].unlink()


def exchange_folder(folder: Path) -> None:
    (shards_in(folder)[0].parent).rename(folder / "model.ckpt.sparse" / ("0" * 32))


change_shape = partial(
    change, lambda shard: shard["engine"]["memory"]["residual"].update({"network.0.weight": torch.zeros(7)})
)


def change_header(folder: Path, **changes: Any) -> None:
    checkpoint = torch.load(folder / "model.ckpt", weights_only=True)
    checkpoint["lightning_sparse"].update(changes)
    torch.save(checkpoint, folder / "model.ckpt")


def turn(shard: Any) -> None:
    """Say that a parameter had its dimensions the other way round."""
    shard["layouts"]["network.0.weight"][0].reverse()


def mix(shard: Any) -> None:
    """Say that the part is of another save."""
    shard["lightning_sparse"].update(save="0" * 32)


BROKEN = {
    "truncated": (truncate, r"rank_00001.* cannot be read"),
    "empty": (partial(replace, b""), r"rank_00001.* cannot be read"),
    "pickle": (lambda folder: replace(pickle.dumps(Evil()), folder), r"rank_00001.* cannot be read"),
    "foreign": (partial(replace, {"weights": torch.ones(3)}), r"rank_00001.* does not belong to the save [0-9a-f]{32}"),
    "missing": (take_away, r"rank_00001.* is missing: .* 2 ranks"),
    "mixed": (partial(change, mix), r"rank_00001.* does not belong to the save"),
    "another folder": (exchange_folder, r"rank_0000[01].* is missing"),
    "shape": (change_shape, r"residual of 7 elements .*'network.0.weight', which has 2048"),
    "turned": (
        partial(change, turn),
        r"'network.0.weight': it was saved with the shape \[32, 64\]",
    ),
    "another version": (partial(change_header, version=3), r"format 3"),
    "a path as name": (partial(change_header, save="../../elsewhere"), r"not as this package writes it"),
}


@pytest.mark.parametrize(("damage", "message"), BROKEN.values(), ids=BROKEN)
def test_what_is_broken_is_refused_with_a_cure(
    pair: Pool, tmp_path: Path, saved: Path, damage: Any, message: str, monkeypatch: Any
) -> None:
    monkeypatch.setenv("TMPDIR_OF_TEST", str(tmp_path))
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    damage(folder)
    answers = pair.run(go_on_elsewhere, build, str(folder / "model.ckpt"))
    assert not (tmp_path / "executed").exists()
    assert any(re.search(message, text, re.DOTALL) and "resume_compression=False" in text for text, _ in answers)
    assert all(batches == 0 for _, batches in answers)


def test_it_goes_on_without_what_is_broken_if_told_to(pair: Pool, tmp_path: Path, saved: Path) -> None:
    shutil.copytree(saved, tmp_path / "copy")
    truncate(tmp_path / "copy")
    told = partial(build, resume_compression=False)
    assert pair.run(go_on_elsewhere, told, str(tmp_path / "copy" / "model.ckpt")) == [("", 8)] * 2


def test_the_file_alone_goes_on_with_empty_residuals_and_says_so(pair: Pool, tmp_path: Path, saved: Path) -> None:
    path = shutil.copy(saved / "model.ckpt", tmp_path / "alone.ckpt")
    (first, batches), (_, others) = pair.run(go_on_elsewhere, build, str(path))
    assert re.search(r"residuals start empty, because what 2 ranks kept is not in .*alone.ckpt.sparse", first)
    assert batches == others == 8


def parts_read(rank: int, path: str) -> list[str]:
    """Go on from a checkpoint; return the names of the parts that this rank has read."""
    read: list[str] = []
    load = AtomicCheckpointIO.load_checkpoint

    def load_noted(plugin: Any, path: Any, *arguments: Any, **named: Any) -> Any:
        read.extend([Path(path).name] * (".sparse" in str(path)))
        return load(plugin, path, *arguments, **named)

    with mock.patch.object(AtomicCheckpointIO, "load_checkpoint", load_noted):
        go_on(rank, path, max_epochs=1)
    return read


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_parts_are_shared_out_among_the_ranks_that_go_on(pools: dict[int, Pool], tmp_path: Path, ranks: int) -> None:
    path = str(tmp_path / "model.ckpt")
    pools[4 if ranks < 3 else 2].run(fit_actions, None, {4: partial(_save, path)})
    answers = pools[ranks].run(parts_read, path)
    read = [int(re.findall(r"\d+", name)[0]) for names in answers for name in names]
    # Whoever is left without a share looks into somebody else's, for its form.
    assert sorted(read) == ([0, 1, 2, 3] if ranks < 3 else [0, 0, 1])


def test_parts_of_different_shapes_are_refused_on_all_ranks(
    pools: dict[int, Pool], tmp_path: Path, saved: Path
) -> None:
    shutil.copytree(saved, tmp_path / "copy")
    change_shape(tmp_path / "copy")
    for text, batches in pools[3].run(go_on_elsewhere, build, str(tmp_path / "copy" / "model.ckpt")):
        assert "keep tensors of different shapes" in text
        assert batches == 0


def test_plain_ddp_reads_the_file(pair: Pool, saved: Path) -> None:
    assert pair.run(go_on_elsewhere, DDPStrategy, str(saved / "model.ckpt")) == [("", 8)] * 2
    assert Numbered.load_from_checkpoint(saved / "model.ckpt", map_location="cpu").network[0].weight.any()


class Old(CheckpointIO):
    """A plugin that does not know how to read safely."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Optional[Any] = None) -> None:
        torch.save(checkpoint, path)

    def load_checkpoint(self, path: Any, map_location: Any = None) -> dict[str, Any]:  # type: ignore[override]
        return torch.load(path, map_location)

    def remove_checkpoint(self, path: Any) -> None:
        os.remove(path)


def save_under_names_of_their_own(rank: int, folder: str) -> list[str]:
    """Save as a callback that puts the number of its process into the name; return what differs after going on."""
    history = fit_actions(rank, None, {4: partial(_save, f"{folder}/{rank}.ckpt")})
    resumed = go_on(rank, f"{folder}/0.ckpt")
    return differences({seen: history[seen] for seen in resumed}, resumed)


def test_the_path_of_rank_0_counts(pair: Pool, tmp_path: Path) -> None:
    assert pair.run(save_under_names_of_their_own, str(tmp_path)) == [[], []]
    assert files_in(tmp_path) == with_ranks("0.ckpt")


class Sharded(Saves):
    """A model whose ranks share out the state of their optimizer."""

    def configure_optimizers(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of what is imported beside it
            from torch.distributed.optim import ZeroRedundancyOptimizer
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)


def save_sharded(rank: int, folder: str) -> float:
    """Fit and save with topk; return what rank 0 has saved of the optimizer's momentum."""
    path = f"{folder}/sharded.ckpt"
    fit_numbered(rank, SparseDDPStrategy("topk", density=0.05), Sharded({4: partial(_save, path)}))
    state = torch.load(path, weights_only=True)["optimizer_states"][0]["state"]
    return float(sum(each["momentum_buffer"].abs().sum() for each in state.values()))


def test_an_optimizer_whose_state_is_shared_out_is_saved(pair: Pool, tmp_path: Path) -> None:
    assert min(pair.run(save_sharded, str(tmp_path))) > 0


class Reluctant(TorchCheckpointIO):
    """A file system on which folders cannot be removed, as NFS while somebody reads them."""

    def remove_checkpoint(self, path: Any) -> None:
        if Path(path).is_dir():
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        super().remove_checkpoint(path)


def _remove(path: str, model: Saves) -> None:
    model.trainer.strategy.remove_checkpoint(path)


def save_twice(rank: int, path: str, second: Any) -> tuple[int, list[str]]:
    """Save, then do something else under that name; return how far training went, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = fit_actions(rank, Reluctant, {4: partial(_save, path), 8: second(path)})
    return max(history), [str(each.message) for each in caught if "could not be removed" in str(each.message)]


@pytest.mark.parametrize(
    "second",
    [partial(partial, _save), partial(saving, weights_only=True), partial(partial, _remove)],
    ids=["saved again", "weights only", "removed"],
)
def test_an_old_save_that_cannot_be_removed_is_warned_of_and_holds_up_nobody(
    pair: Pool, tmp_path: Path, second: Any
) -> None:
    (last, warned), (other, silent) = pair.run(save_twice, str(tmp_path / "twice.ckpt"), second)
    assert last == other == 12
    assert len(warned) == 1
    assert "Stale file handle" in warned[0]
    assert silent == []


def test_a_plugin_that_cannot_read_safely_is_refused(saved: Path) -> None:
    from lightning_sparse.strategy.checkpoints.shards import read_header, read_shard

    save = read_header(torch.load(saved / "model.ckpt", weights_only=True), "model.ckpt")
    assert save is not None
    with pytest.raises(CheckpointError, match=r"Old.load_checkpoint takes no argument weights_only"):
        read_shard(Old(), str(shards_in(saved)[0]), save)


def test_a_file_is_written_whole_where_lightning_has_no_temporary_folder(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("here.ckpt", f"file://{tmp_path}/scheme.ckpt", tmp_path / "deep" / "er" / "path.ckpt"):
        AtomicCheckpointIO().save_checkpoint({"value": 1}, path)
        assert AtomicCheckpointIO().load_checkpoint(path, weights_only=True) == {"value": 1}
    assert files_in(tmp_path) == ["deep/er/path.ckpt", "here.ckpt", "scheme.ckpt"]
    with pytest.raises(TypeError, match="storage_options"):
        AtomicCheckpointIO().save_checkpoint({}, "here.ckpt", storage_options={"key": "value"})
    assert AtomicCheckpointIO().load_checkpoint("here.ckpt", weights_only=True) == {"value": 1}


def test_memory_paths_go_lightnings_way() -> None:
    AtomicCheckpointIO().save_checkpoint({"value": 2}, "memory://folder/remote.ckpt")
    assert AtomicCheckpointIO().load_checkpoint("memory://folder/remote.ckpt", weights_only=True) == {"value": 2}
