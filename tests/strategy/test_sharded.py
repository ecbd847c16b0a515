import copy
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.plugins import MixedPrecision
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from lightning_sparse import (
    AdamCorrection,
    LocalSteps,
    SparseDDPStrategy,
    SparseModelParallelStrategy,
)
from lightning_sparse.callbacks import CompressionMonitor, ReplicaSentinel
from lightning_sparse.engine.requirements import refuse as refuse_reasons
from lightning_sparse.functional.elements import local_tensor
from lightning_sparse.loop.checks import of_the_model
from lightning_sparse.testing.invariants import assert_mass_is_conserved
from lightning_sparse.testing.tensors import assert_same, differences
from lightning_sparse.testing.wrapping import residuals_like
from tests.helpers.fits import fits, refusals
from tests.helpers.issued import recording, stuck_at
from tests.helpers.loggers import rows_of
from tests.helpers.resuming import Numbered
from tests.helpers.trainers import forget_groups, make_trainer, weights

HSDP = {"strategy": partial(SparseModelParallelStrategy, replicas=2)}
SPARSE = {**HSDP, "compressor": "topk", "density": 0.05}
NATIVE = {"strategy": partial(ModelParallelStrategy, data_parallel_size=4, tensor_parallel_size=1)}
KINDS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "adamw, torch's rate": torch.optim.AdamW,
}


def cut(model, mesh):
    for layer in (*model.network, model.last, model):
        fully_shard(layer, mesh=mesh)
    return model


class Sharded(Numbered):
    """A model with layers of odd sizes, sharded as in Lightning's documentation.

    The last layer has one row, so the second rank of a replica has an empty shard.
    """

    def __init__(self, kind="sgd", *saving):
        super().__init__(*saving)
        self.kind = kind
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(32, 63), nn.ReLU(), nn.Linear(63, 32))
        self.last = nn.Linear(32, 1)

    def configure_model(self):
        if self.device_mesh is not None:  # another strategy has no mesh
            cut(self, self.device_mesh["data_parallel"])

    def forward(self, rows):
        out = self.network(rows)
        return (out - rows).square().mean() + self.last(out).square().mean()

    def training_step(self, batch, batch_index):
        return self(self.rows(batch_index))

    def configure_optimizers(self):
        return KINDS[self.kind](self.parameters())

    def entry(self, shards, name, name_of_residuals):
        """Return copies of the shards that are not empty, and of the residuals."""
        shards = {each: shard.flatten().clone() for each, shard in shards.items() if shard.numel()}
        return {name: shards, name_of_residuals: residuals_like(self.trainer.strategy.engine, shards)}


class Native(Sharded):
    def configure_model(self):
        cut(self, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def whole(answers, step):
    shards = [answer.batches[step] for answer in answers[:2]]
    return {name: torch.cat([each[name] for each in shards]) for name in shards[0]}


def assert_replicas_are_one(answers):
    assert_same(answers[0].batches, answers[2].batches)
    assert_same(answers[1].batches, answers[3].batches)


# At torch's default rate, a rounding difference may move a parameter of AdamW by up to the rate.
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "trainer"),
    [("sgd", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}), ("adamw, torch's rate", {})],
    ids=["accumulated, clipped", "AdamW"],
)
def test_density_1_is_native_hsdp(pools, kind, trainer):
    dense = fits(pools[4], partial(Native, kind), NATIVE, **trainer)
    sparse = fits(pools[4], partial(Sharded, kind), {**HSDP, "compressor": "dense"}, **trainer)
    assert_replicas_are_one(sparse)
    for one, other in zip(dense, sparse):
        torch.testing.assert_close(other.end, one.end, rtol=0, atol=1e-6)


class Booked(Sharded):
    def __init__(self, kind="sgd", overflows_at=-1):
        super().__init__(kind)
        self.notes = []
        self.overflows_at = overflows_at

    def training_step(self, batch, batch_index):
        loss = super().training_step(batch, batch_index)
        return loss * torch.inf if batch_index == self.overflows_at and self.global_rank == 3 else loss

    def on_train_start(self):
        strategy = self.trainer.strategy
        stream = strategy.engine.reducer
        # With overlap, means may arrive before the note.
        stream._context = stream._context._replace(overlaps_backward=False)
        finish = stream.finalize_backward

        def gradients():
            return {name: local_tensor(each.grad) for name, each in self.named_parameters()}

        def book():
            before = self.entry(gradients(), "gradient", "before")
            finish()
            self.notes.append(before | self.entry(gradients(), "applied", "after"))

        stream.finalize_backward = book


# Of nine steps two are dense, the density decays in two, and the second moment refreshes sometimes.
ADAMW = {
    "sgd": {},
    "adamw": {"optimizer_correction": AdamCorrection(warmup_steps=2, density_decay_steps=2, second_moment_interval=2)},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("compressor", ["topk", "lags", "omgs", "dgc"])
def test_mass_is_conserved_and_replicas_are_one(pools, compressor):
    momentum = {"compressor": compressor, "warmup_steps": 0}
    answers = fits(pools[4], Booked, {**SPARSE, **momentum}, max_epochs=1)
    assert_replicas_are_one(answers)
    for shard in (0, 1) if compressor != "dgc" else ():
        books = [answer.notes for answer in answers[shard::2]]
        assert_mass_is_conserved(books)
        for one, other in zip(*books):
            assert differences(one["gradient"], one["applied"])
            assert_same(one["applied"], other["applied"])
    numels = [sum(each.numel() for each in answer.end.values()) for answer in answers]
    for answer, numel in zip(answers, numels):
        assert sum(each.numel() for each in answer.notes[-1]["after"].values()) == numel
        assert answer.total["dense_bytes"] == 4 * numel  # an all-reduce between two replicas
        assert answer.total["wire_bytes"] < answer.total["dense_bytes"] / 4


def test_what_overflows_on_a_rank_moves_nothing_on_any(pools):
    scaled = {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))]}
    answers = fits(pools[4], partial(Booked, "sgd", 3), SPARSE, max_epochs=1, **scaled)
    assert_replicas_are_one(answers)
    for answer in answers:
        step, history = answer.notes[3], answer.batches
        assert_same(step["before"], step["after"])
        assert_same(history[2], history[3])
        assert differences(history[3], history[4])
        assert any(each.any() for each in step["after"].values())


class Saving(Sharded):
    """A model that saves after a step, with notes of the state at the start, at the save and at the end."""

    def __init__(self, path, kind="sgd", save_after=5):
        super().__init__(kind, save_after, path)
        self.notes = {}

    def note(self, when):
        memory = copy.deepcopy(self.trainer.strategy.engine.memory.state_dict())
        self.notes[when] = {**memory, "parameters": weights(self)}

    def on_train_batch_start(self, *batch):
        if not self.history:
            self.note("start")

    def on_train_batch_end(self, *batch):
        super().on_train_batch_end(*batch)
        if max(self.history) == self.save_after:
            self.note("saved")

    def on_train_end(self):
        self.note("end")


ROUNDS = {
    "sparse": {**SPARSE, "local_steps": LocalSteps(4, residual_decay=0.9)},
    "diloco": {
        **HSDP,
        "compressor": "dense",
        "local_steps": LocalSteps(4, outer_lr=0.7, outer_momentum=0.9, nesterov=True),
    },
}
RESUMED = {
    "SGD": ("sgd", SPARSE, True),
    "AdamW": ("adamw", {**SPARSE, **ADAMW["adamw"]}, True),
    "SparseLoCo": ("adamw", ROUNDS["sparse"], True),
    "SparseLoCo, one file": ("adamw", ROUNDS["sparse"], False),
    "DiLoCo": ("adamw", ROUNDS["diloco"], True),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "settings", "is_distributed"), RESUMED.values(), ids=RESUMED)
def test_a_resume_goes_on_to_the_bit(pools, tmp_path, kind, settings, is_distributed):
    path = str(tmp_path / "mid.ckpt")
    settings = {**settings, "save_distributed_checkpoint": is_distributed}
    straight = fits(pools[4], partial(Saving, path, kind), settings, max_steps=9)
    again = fits(pools[4], partial(Saving, "", kind, None), settings, path, max_steps=9)
    if "local_steps" not in settings:
        assert_replicas_are_one(straight)
    for one, other in zip(straight, again):
        assert_same(one.batches[5:], other.batches)
        assert_same(one.notes["end"], other.notes["end"])
        assert not any("start empty" in line for line in other.said)
    if "local_steps" in settings and not is_distributed:  # the file has the shared model of the last round
        saved = torch.load(path, weights_only=True)["state_dict"]
        for name, weights in whole(straight, 3).items():
            assert torch.equal(saved[name], weights)


NOT_RESUMED = {
    "whole": ({**SPARSE, "save_distributed_checkpoint": False}, {**SPARSE, "strategy": SparseDDPStrategy}, "2 shards"),
    "other shards": (SPARSE, {**SPARSE, "replicas": 4}, "data_parallel_size"),
}


@pytest.mark.parametrize(("before", "after", "words"), NOT_RESUMED.values(), ids=NOT_RESUMED)
def test_shards_that_cannot_be_taken_up_are_refused(pools, tmp_path, before, after, words):
    path = str(tmp_path / "mid.ckpt")
    fits(pools[4], partial(Saving, path), before, max_steps=5)
    for failure in refusals(pools[4], partial(Saving, "", save_after=None), after, path, max_steps=9):
        assert "CheckpointError" in failure
        assert words in failure


# Residual kind, with one shard. The fit then returns to two ranks.
MOVED = {
    "replicas": ("update", {**SPARSE, **ADAMW["adamw"]}),
    "replicas, in a round": ("residual", ROUNDS["sparse"]),
    "replicas, DiLoCo": ("parameters", ROUNDS["diloco"]),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("waits", "settings"), MOVED.values(), ids=MOVED)
def test_on_other_numbers_of_replicas_the_mean_stays(pools, tmp_path, waits, settings):
    before, source = None, None
    for replicas, steps in ((2, 5), (3, 7), (2, 9)):
        path = str(tmp_path / f"{steps}.ckpt")
        module = partial(Saving, path, "adamw", steps)
        after = fits(pools[replicas], module, {**settings, "replicas": replicas}, source, max_steps=steps)
        for answer in after if source else ():
            for name, each in answer.notes["start"][waits].items():
                saved = torch.stack([had.notes["saved"][waits][name] for had in before])
                torch.testing.assert_close(each, saved.mean(dim=0))
            assert any(each.any() for each in answer.notes["start"][waits].values())
            assert_same(answer.end, after[0].end)
        before, source = after, path


class ByHand(Sharded):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Unsharded(Sharded):
    def configure_model(self):
        return


class PartlySharded(Sharded):
    def configure_model(self):
        fully_shard(self.network, mesh=self.device_mesh["data_parallel"])


class OldFSDP(Sharded):
    def configure_model(self):
        self.last = FullyShardedDataParallel(self.last, device_id=torch.device("cpu"))


def test_statistics_are_logged(pools, tmp_path):
    logger = CSVLogger(tmp_path, name="", version="")
    more = {"logger": logger, "callbacks": [CompressionMonitor()], "log_every_n_steps": 1}
    fits(pools[4], Sharded, SPARSE, max_epochs=1, **more)
    rows = rows_of(tmp_path, "sparse/residual_to_gradient")
    assert len(rows) == 6
    assert all(float(row["sparse/compression_ratio"]) > 4 for row in rows)


REFUSED = {
    "over the world": (Native, {}, {}, "over other ranks than"),
    "not at all": (Unsharded, {}, {}, "fully_shard has sharded nothing"),
    "one layer whole": (PartlySharded, {}, {}, "fully_shard has sharded all but 'last.weight'"),
    "FSDP1": (OldFSDP, {}, {}, "FSDP2"),
    "by hand": (ByHand, {}, {}, "automatic_optimization=False"),
    "replicas that do not fit": (Sharded, {"replicas": 3}, {}, "replicas=3"),
    "shards that do not fit": (Sharded, {"data_parallel_size": 4}, {}, "data_parallel_size=4"),
    "looked at whole": (Sharded, {}, {"callbacks": [ReplicaSentinel()]}, "needs whole parameters"),
    "shown whole": (Sharded, {}, {"callbacks": [CompressionMonitor(by_parameter=True)]}, "needs whole parameters"),
}


@pytest.mark.parametrize(("module", "settings", "trainer", "words"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_shards_of_a_replica_or_needs_whole_ones_is_refused_on_all_ranks(
    pools, module, settings, trainer, words
):
    for failure in refusals(pools[4], module, {**SPARSE, **settings}, **trainer):
        assert words in failure, failure


class Cut:
    """A model with the given shards of parameters."""

    def __init__(self, shards):
        self.shards = shards

    def named_parameters(self):
        mesh = SimpleNamespace(mesh=torch.tensor([0]))
        for name, shard in self.shards.items():
            yield name, SimpleNamespace(requires_grad=True, device_mesh=mesh, to_local=lambda shard=shard: shard)


@pytest.mark.parametrize(
    ("shards", "word"),
    [({"w": torch.zeros(2, device="meta")}, "CPUOffloadPolicy"), ({"w": torch.zeros(0)}, "data_parallel_size")],
    ids=["offloaded", "no element"],
)
def test_shards_that_cannot_be_exchanged_are_refused(shards, word):
    with pytest.raises(ValueError, match=word):
        refuse_reasons(of_the_model(Cut(shards), [0], torch.device("cpu")))
    refuse_reasons(of_the_model(Cut({"w": torch.zeros(1), "none": torch.zeros(0)}), [0], torch.device("cpu")))


class Sampled(Sharded):
    def __init__(self):
        super().__init__()
        self.notes = []

    def configure_model(self):
        super().configure_model()
        with torch.no_grad():
            local_tensor(self.network[0].weight).add_(self.global_rank / 100)

    def training_step(self, batch, batch_index):
        self.notes.append(batch)
        return self(batch)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sizes", [{}, {"replicas": 4}], ids=str)
def test_data_are_divided_between_all_ranks(pools, sizes):
    answers = fits(pools[4], Sampled, {**SPARSE, **sizes}, max_epochs=1)
    rows = [torch.cat(answer.notes) for answer in answers]
    assert not any(torch.equal(rows[0], other) for other in rows[1:])
    replica = 4 // sizes.get("replicas", 2)
    for rank in range(4):
        assert_same(answers[rank].batches, answers[rank % replica].batches)


class Idle(Sharded):
    def __init__(self):
        super().__init__()
        self.never = nn.Linear(4, 4)

    def configure_model(self):
        fully_shard(self.never, mesh=self.device_mesh["data_parallel"])
        super().configure_model()

    def forward(self, rows):
        out = self.network(rows)
        loss = (out - rows).square().mean()
        return loss if self.global_rank > 1 and len(self.history) % 2 else loss + self.last(out).square().mean()


def test_what_a_replica_does_not_use_is_exchanged_all_the_same(pools):
    answers = fits(pools[4], Idle, SPARSE, max_epochs=1)
    assert_replicas_are_one(answers)
    for answer in answers:
        first, last = answer.batches[0], answer.batches[-1]
        assert torch.equal(first["never.weight"], last["never.weight"])


class Freezing(Sharded):
    def __init__(self, frozen):
        super().__init__()
        self.frozen = frozen

    def configure_model(self):
        super().configure_model()
        self.network[0].requires_grad_(0 not in self.frozen)

    def on_train_batch_start(self, batch, batch_idx):
        self.network[0].requires_grad_(batch_idx not in self.frozen)


@pytest.mark.parametrize("frozen", [(2, 3), (0, 1)], ids=["frozen", "unfrozen"])
def test_layers_may_be_frozen_and_unfrozen_between_steps(pools, frozen):
    answers = fits(pools[4], partial(Freezing, frozen), SPARSE, max_epochs=1)
    assert_replicas_are_one(answers)
    history = [each["network.0.weight"] for each in answers[0].batches]
    assert torch.equal(history[frozen[0]], history[frozen[1]])
    assert not torch.equal(history[frozen[1]], history[5])


class Accounted(Sharded):
    """A model with a book of its parameters, which a round moves as a step moves gradients."""

    def __init__(self):
        super().__init__()
        self.notes = []

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(self.note)
        return optimizer

    def negative(self):
        return {name: -each for name, each in weights(self).items()}

    def note(self, *step):
        self.notes.append(self.entry(self.negative(), "gradient", "before"))

    def on_train_batch_end(self, *batch):
        super().on_train_batch_end(*batch)
        self.notes[-1] |= self.entry(self.negative(), "applied", "after")


def test_a_round_conserves_mass_and_makes_replicas_one(pools):
    settings = {**HSDP, "compressor": "lags", "density": 0.1, "warmup_steps": 0, "local_steps": 4}
    answers = fits(pools[4], Accounted, settings)
    for shard in (0, 1):
        books = [[answer.notes[step] for step in (3, 7, 11)] for answer in answers[shard::2]]
        for one, other in zip(*books):
            assert_same(one["applied"], other["applied"])
        assert_mass_is_conserved(books)
        one, other = (answer.notes for answer in answers[shard::2])
        assert differences(one[4]["applied"], other[4]["applied"])
        assert all(note["after"]["network.0.weight"].any() for note in one[3:])
    stats = answers[0].total
    assert stats["total_wire_bytes"] < stats["total_dense_bytes"] / 3
    assert stats["local_steps"] == 4


class Slow(Sharded):
    def configure_model(self):
        super().configure_model()
        if self.global_rank == 0:
            for parameter in self.parameters():
                parameter.register_hook(lambda gradient: time.sleep(0.002))


def issue(rank, kind, settings):
    forget_groups()
    with recording(seconds=0.002 if rank == 1 else 0) as issued:
        strategy = SparseModelParallelStrategy(replicas=2, density=0.1, **settings)
        make_trainer(rank, strategy, limit_train_batches=4, limit_val_batches=0).fit(Slow(kind))
    return issued


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "settings"), [("sgd", {}), ("adamw", {}), ("sgd", {"local_steps": 2})])
def test_fsdps_collectives_and_ours_come_in_one_order(pools, kind, settings):
    recordings = pools[4].run(issue, kind, settings)
    assert {"reduce_scatter_base", "alltoall_base"} <= {each.operation for each in recordings[0]}
    assert stuck_at(recordings) is None
