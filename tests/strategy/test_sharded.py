"""Shards: FSDP inside a replica and our exchange between replicas, two of two ranks each."""

import copy
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.plugins import MixedPrecision
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import debug
from torch.utils.data import DataLoader

from lightning_sparse import AdamCorrection, SparseDDPStrategy, SparseModelParallelStrategy
from lightning_sparse.callbacks import CompressionMonitor, ReplicaSentinel
from lightning_sparse.engine.settings import refuse as refuse_rows
from lightning_sparse.functional.elements import held_of
from lightning_sparse.strategy.sharded import of_the_shards
from lightning_sparse.testing.pool import Pool
from lightning_sparse.testing.tensors import assert_same
from tests.helpers.fits import NotingLogger, listening
from tests.helpers.trainers import Rows, make_trainer

Tensors = dict[str, Tensor]
KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
}


class Sharded(LightningModule):
    """A model with layers of odd sizes, sharded as Lightning's documentation has it, which notes what comes of steps.

    Of its last layer, which has one row, the second rank of a replica holds nothing.
    """

    def __init__(self, kind: str = "sgd") -> None:
        super().__init__()
        self.kind = kind
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(32, 63), nn.ReLU(), nn.Linear(63, 32))
        self.last = nn.Linear(32, 1)
        self.history: list[Tensors] = []

    def configure_model(self) -> None:
        if self.device_mesh is None:  # for another strategy
            return
        mesh = self.device_mesh["data_parallel"]
        for layer in (*self.network, self.last):
            fully_shard(layer, mesh=mesh)
        fully_shard(self, mesh=mesh)

    def forward(self, rows: Tensor) -> Tensor:
        out = self.network(rows)
        return (out - rows).square().mean() + self.last(out).square().mean()

    def rows(self, batch_index: int) -> Tensor:
        seed = 1000 * self.global_rank + 100 * self.current_epoch + batch_index
        return torch.randn(4, 32, generator=torch.Generator().manual_seed(seed))

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        return self(self.rows(batch_index))

    def on_train_batch_end(self, *batch: Any) -> None:
        self.history.append(held(self))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return KINDS[self.kind](self.parameters())

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Rows(1024), batch_size=4)


class Native(Sharded):
    """The same over both dimensions of a mesh: torch's HSDP."""

    def configure_model(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for layer in (*self.network, self.last):
            fully_shard(layer, mesh=mesh)
        fully_shard(self, mesh=mesh)


def forget_groups() -> None:
    """Have torch forget how it redistributed tensors over process groups that a pool has since replaced."""
    debug._clear_python_sharding_prop_cache()
    debug._clear_fast_path_sharding_prop_cache()


def held(module: nn.Module) -> Tensors:
    return {name: held_of(each).clone() for name, each in module.named_parameters()}


def fit(
    rank: int, module: Callable[..., Sharded], settings: Optional[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Fit a few steps on two replicas of two ranks; without settings as Lightning's own strategy does."""
    forget_groups()
    model = module()
    if settings is None:
        strategy: Any = ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1)
    else:
        strategy = SparseModelParallelStrategy(**{"replicas": 2, **copy.deepcopy(dict(settings))})
    with listening() as said:
        trainer = make_trainer(rank, strategy, **{"limit_train_batches": 20, **arguments})
        trainer.fit(model)
    return {
        "history": model.history,
        "end": held(model),
        "stats": strategy.compression_stats() if settings is not None else {},
        "said": said,
        "notes": getattr(model, "notes", None),
        "told": getattr(trainer.logger, "told", None),
    }


def fits(
    pool: Pool, module: Callable[..., Sharded], settings: Optional[Mapping[str, Any]] = None, **arguments: Any
) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = pool.run(fit, module, settings, arguments)
    return answers


def refuse(rank: int, function: Callable[..., Any], *arguments: Any) -> str:
    """Return kind and message of the error of what must be refused."""
    try:
        function(rank, *arguments)
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "was not refused"


def assert_replicas_are_one(answers: list[dict[str, Any]]) -> None:
    assert_same(answers[0]["history"], answers[2]["history"])
    assert_same(answers[1]["history"], answers[3]["history"])


DENSE = {"plain": {}, "accumulated, clipped": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trainer", DENSE.values(), ids=DENSE)
def test_density_1_is_native_hsdp(pools: dict[int, Pool], kind: str, trainer: dict[str, Any]) -> None:
    arguments = {**trainer, "limit_train_batches": 20 * trainer.get("accumulate_grad_batches", 1)}
    dense = fits(pools[4], partial(Native, kind), None, **arguments)
    sparse = fits(pools[4], partial(Sharded, kind), {"compressor": "dense"}, **arguments)
    assert_replicas_are_one(sparse)
    for one, other in zip(dense, sparse):
        for name, expected in one["end"].items():
            assert (other["end"][name] - expected).abs().max() <= 1e-6 if expected.numel() else True
        assert one["end"]["network.0.weight"].shape == other["end"]["network.0.weight"].shape


class Booked(Sharded):
    """It notes what goes into each exchange and what comes out: gradients and residuals, and may overflow on a rank."""

    def __init__(self, kind: str = "sgd", overflows_at: int = -1) -> None:
        super().__init__(kind)
        self.notes: list[dict[str, Tensors]] = []
        self.overflows_at = overflows_at

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        loss = super().training_step(batch, batch_index)
        return loss * torch.inf if batch_index == self.overflows_at and self.global_rank == 3 else loss

    def on_train_start(self) -> None:
        strategy = self.trainer.strategy
        assert isinstance(strategy, SparseModelParallelStrategy)
        assert strategy.engine is not None
        stream: Any = strategy.engine.stream
        exchange, memory = stream.exchange, strategy.engine.memory

        def books() -> dict[str, Tensors]:
            parameters = dict(self.named_parameters())
            kept = memory.state_dict().get("residual", {})
            gradients = {name: held_of(each.grad).clone().view(-1) for name, each in parameters.items() if each.numel()}
            waiting = {name: kept[name].clone() if name in kept else 0 * each for name, each in gradients.items()}
            return {"gradient": gradients, "residual": waiting}

        def book() -> None:
            before = {f"{kind} before": each for kind, each in books().items()}
            exchange()
            self.notes.append({**before, **{f"{kind} after": each for kind, each in books().items()}})

        stream.exchange = book


SPARSE = {"compressor": "topk", "density": 0.05}
# Of nine steps two are sent whole, in two the density falls, and the second moment learns now and then.
ADAMW = {"sgd": {}, "adamw": {"optimizer_correction": AdamCorrection(dense_steps=2, fall_steps=2, refresh_steps=2)}}


@pytest.mark.parametrize("compressor", ["topk", "lags", "omgs", "dgc"])
def test_mass_is_conserved_and_replicas_are_one(pools: dict[int, Pool], compressor: str) -> None:
    momentum = {"compressor": compressor, "warmup_epochs": 0}
    answers = fits(pools[4], Booked, {**SPARSE, **momentum}, limit_train_batches=6)
    assert_replicas_are_one(answers)
    for shard in (0, 1) if compressor != "dgc" else ():
        for one, other in zip(answers[shard]["notes"], answers[shard + 2]["notes"]):
            for name, arrived in one["gradient after"].items():
                sent = [
                    each["residual before"][name] + each["gradient before"][name] - each["residual after"][name]
                    for each in (one, other)
                ]
                torch.testing.assert_close(arrived, (sent[0] + sent[1]) / 2, atol=1e-6, rtol=1e-5)
                assert torch.equal(arrived, other["gradient after"][name])
    numels = [sum(each.numel() for each in answer["end"].values()) for answer in answers]
    for answer, numel in zip(answers, numels):
        assert sum(each.numel() for each in answer["notes"][-1]["residual after"].values()) == numel
        assert answer["stats"]["dense_bytes"] == 4 * numel  # of an all-reduce between two
        assert answer["stats"]["wire_bytes"] < answer["stats"]["dense_bytes"] / 4


def test_what_overflows_on_a_rank_moves_nothing_on_any(pools: dict[int, Pool]) -> None:
    scaled = {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))]}
    answers = fits(pools[4], partial(Booked, "sgd", 3), SPARSE, limit_train_batches=6, **scaled)
    assert_replicas_are_one(answers)
    for answer in answers:
        step, weights = answer["notes"][3], answer["history"]
        assert_same(step["residual before"], step["residual after"])
        assert_same(weights[2], weights[3])
        assert any((weights[3][name] != weights[4][name]).any() for name in weights[3])
        assert any(each.any() for each in step["residual after"].values())


class Saving(Sharded):
    """It saves after a step, and notes what waits at the end."""

    def __init__(self, path: str, kind: str = "sgd", save_after: int = 5) -> None:
        super().__init__(kind)
        self.path, self.save_after = path, save_after
        self.first: dict[str, Any] = {}
        self.notes: dict[str, Any] = {}

    def on_train_batch_end(self, *batch: Any) -> None:
        super().on_train_batch_end(*batch)
        if self.trainer.global_step == self.save_after:
            self.trainer.save_checkpoint(self.path)

    def kept(self) -> dict[str, Any]:
        strategy = self.trainer.strategy
        assert isinstance(strategy, SparseModelParallelStrategy)
        assert strategy.engine is not None
        return copy.deepcopy(strategy.engine.memory.state_dict())

    def on_train_batch_start(self, *batch: Any) -> None:
        self.first = self.first or self.kept()

    def on_train_end(self) -> None:
        self.notes = self.kept()


def resumed(
    rank: int, kind: str, settings: Mapping[str, Any], path: str, steps: int = 9, later: str = ""
) -> dict[str, Any]:
    """Go on from a checkpoint, up to a number of steps, and save there if a path is given."""
    forget_groups()
    model = Saving(later, kind, steps if later else -1)
    arguments = copy.deepcopy(dict(settings))
    kind_of = arguments.pop("strategy", partial(SparseModelParallelStrategy, replicas=2))
    strategy = kind_of(**arguments)
    warnings.filterwarnings("ignore", message=".*dataloader is not resumable.*")
    with listening() as said:
        trainer = make_trainer(rank, strategy, max_steps=steps)
        trainer.fit(model, ckpt_path=path)
    return {"history": model.history, "end": held(model), "notes": model.notes, "said": said, "first": model.first}


@pytest.mark.parametrize("is_distributed", [True, False], ids=["a folder", "one file"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_goes_on_to_the_bit(pools: dict[int, Pool], tmp_path: Path, kind: str, is_distributed: bool) -> None:
    path = str(tmp_path / "mid.ckpt")
    settings = {**SPARSE, **ADAMW[kind], "save_distributed_checkpoint": is_distributed}
    straight = fits(pools[4], partial(Saving, path, kind), settings, max_steps=9)
    again = pools[4].run(resumed, kind, settings, path)
    for one, other in zip(straight, again):
        assert_same(one["history"][5:], other["history"])
        assert_same(one["notes"], other["notes"])
        assert not any("start empty" in line for line in other["said"])


def as_of_four_replicas(path: str) -> None:
    """Have a checkpoint of two replicas of two ranks say that it is of four, of which two are copies."""
    meta = Path(path) / "meta.pt"
    parts = sorted(Path(f"{path}.sparse").rglob("rank_*.pt"))
    for rank, part in enumerate([*parts, meta]):
        content = torch.load(part, weights_only=False)
        content["lightning_sparse"]["ranks"] = 8
        torch.save(content, part)
        if part is not meta:
            torch.save(content, part.with_name(part.name.replace(f"{rank:05d}", f"{rank + 4:05d}")))


def test_another_number_of_replicas_takes_up_the_mean(pools: dict[int, Pool], tmp_path: Path) -> None:
    path = str(tmp_path / "mid.ckpt")
    settings = {**SPARSE, **ADAMW["adamw"]}
    saved = fits(pools[4], partial(Saving, path, "adamw"), settings, max_steps=5)
    as_of_four_replicas(path)
    answers = pools[4].run(resumed, "adamw", settings, path)
    assert_replicas_are_one(answers)
    for shard in (0, 1):
        before = [saved[rank]["notes"]["update"] for rank in (shard, shard + 2)]
        for rank in (shard, shard + 2):
            for name, update in answers[rank]["first"]["update"].items():
                torch.testing.assert_close(update, (before[0][name] + before[1][name]) / 2)
            assert any(update.any() for update in answers[rank]["first"]["update"].values())
    assert any("takes up the mean" in line for line in answers[0]["said"])


def test_replicas_may_become_more_and_fewer_again(pools: dict[int, Pool], tmp_path: Path) -> None:
    path, later = str(tmp_path / "of_two.ckpt"), str(tmp_path / "of_three.ckpt")
    settings = {**SPARSE, **ADAMW["adamw"]}
    two = fits(pools[4].first(2), partial(Saving, path, "adamw"), settings, max_steps=5)
    three = pools[4].first(3).run(resumed, "adamw", {**settings, "replicas": 3}, path, 7, later)
    again = pools[4].first(2).run(resumed, "adamw", settings, later)
    for before, after in ((two, three), (three, again)):
        for answer in after:
            assert_same(answer["history"], after[0]["history"])
            for name, update in answer["first"]["update"].items():
                waiting = torch.stack([each["notes"]["update"][name] for each in before])
                torch.testing.assert_close(update, waiting.mean(dim=0))
            assert any(update.any() for update in answer["first"]["update"].values())


@pytest.mark.parametrize("settings", [{"replicas": 4}, {"strategy": SparseDDPStrategy}], ids=["other shards", "whole"])
def test_what_was_cut_otherwise_is_refused(pools: dict[int, Pool], tmp_path: Path, settings: dict[str, Any]) -> None:
    path = str(tmp_path / "mid.ckpt")
    fits(pools[4], partial(Saving, path), {**SPARSE, "save_distributed_checkpoint": False}, max_steps=5)
    for failure in pools[4].run(refuse, resumed, "sgd", {**SPARSE, **settings}, path):
        assert "CheckpointError" in failure
        assert "data_parallel_size" in failure


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clipped, accumulated": ({}, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2, "max_steps": 12}),
    "clipped by value": ({}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "owners": ({"exchange": "owners"}, {}),
    "bfloat16": ({"wire": "bfloat16"}, {"precision": "bf16-true"}),
    "four replicas": ({"replicas": 4}, {}),
}


@pytest.mark.parametrize(("settings", "trainer"), CASES.values(), ids=CASES)
def test_adamw_is_corrected_on_shards(
    pools: dict[int, Pool], settings: dict[str, Any], trainer: dict[str, Any]
) -> None:
    answers = fits(pools[4], partial(Scored, "adamw"), {**SPARSE, **ADAMW["adamw"], **settings}, **trainer)
    replicas = settings.get("replicas", 2)
    shards = 4 // replicas
    for rank in range(4):
        assert_same(answers[rank]["history"], answers[rank % shards]["history"])
        assert sum(answers[rank]["notes"][-4:]) < sum(answers[rank]["notes"][:4])
    assert any("updates before selection" in line for line in answers[0]["said"])


class Scored(Sharded):
    """It learns the same rows again and again, and notes its losses."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.notes: list[float] = []

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        loss = self(self.rows(0).to(self.dtype))
        self.notes.append(float(loss.detach()))
        return loss


class ByHand(Sharded):
    """It steps by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Unsharded(Sharded):
    """It is left as it is."""

    def configure_model(self) -> None:
        return


class PartlySharded(Sharded):
    """Of it one layer is left whole."""

    def configure_model(self) -> None:
        fully_shard(self.network, mesh=self.device_mesh["data_parallel"])


class OldFSDP(Sharded):
    """Part of it is wrapped by the FSDP of before."""

    def configure_model(self) -> None:
        self.last = FullyShardedDataParallel(self.last, device_id=torch.device("cpu"))


def test_statistics_are_logged(pools: dict[int, Pool]) -> None:
    shown = {"logger": NotingLogger(), "callbacks": [CompressionMonitor()], "log_every_n_steps": 1}
    for answer in fits(pools[4], Sharded, SPARSE, limit_train_batches=4, **shown):
        assert all(each["sparse/compression_ratio"] > 4 for each in answer["told"] if "sparse/density" in each)
        assert any("sparse/residual_to_gradient" in each for each in answer["told"])


@pytest.mark.parametrize(
    "callback", [ReplicaSentinel(), CompressionMonitor(by_parameter=True)], ids=lambda each: type(each).__name__
)
def test_callbacks_that_look_at_whole_parameters_are_refused(pools: dict[int, Pool], callback: Any) -> None:
    for failure in pools[4].run(refuse, fit, Sharded, SPARSE, {"callbacks": [callback]}):
        assert "looks at whole parameters" in failure


REFUSED: dict[str, tuple[Callable[..., Sharded], dict[str, Any], str]] = {
    "over the world": (Native, {}, "over other ranks than"),
    "not at all": (Unsharded, {}, "configure_model has sharded nothing"),
    "one layer whole": (PartlySharded, {}, "configure_model has sharded all but 'last.weight'"),
    "FSDP1": (OldFSDP, {}, "FSDP2"),
    "by hand": (ByHand, {}, "automatic_optimization=False"),
    "replicas that do not fit": (Sharded, {"replicas": 3}, "replicas=3"),
    "shards that do not fit": (Sharded, {"data_parallel_size": 4}, "data_parallel_size=4"),
}


@pytest.mark.parametrize(("module", "settings", "words"), REFUSED.values(), ids=REFUSED)
def test_models_without_shards_of_a_replica_are_refused_on_all_ranks(
    pools: dict[int, Pool], module: Callable[..., Sharded], settings: dict[str, Any], words: str
) -> None:
    for failure in pools[4].run(refuse, fit, module, {**SPARSE, **settings}, {}):
        assert words in failure, failure


BAD: dict[str, dict[str, Any]] = {
    "compressor": {"compressor": "a2sgd"},
    "compressor=SDAGC": {"compressor": "sdagc"},
    "compressor=MiCRO": {"compressor": "micro"},
    "compressor=ExDyna": {"compressor": "exdyna"},
    "local_steps": {"local_steps": 5},
    "replicas": {"replicas": 0},
    "data_parallel_size": {"data_parallel_size": 1.5},
    "tensor_parallel_size": {"tensor_parallel_size": 2},
    "density": {"density": 2},
}


@pytest.mark.parametrize(("name", "arguments"), BAD.items(), ids=BAD)
def test_bad_arguments_are_refused(name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=name):
        SparseModelParallelStrategy(**arguments)


@pytest.mark.parametrize(
    ("shards", "word"),
    [({"w": torch.zeros(2, device="meta")}, "CPUOffloadPolicy"), ({"w": torch.zeros(0)}, "data_parallel_size")],
    ids=["offloaded", "no element"],
)
def test_shards_that_cannot_be_exchanged_are_refused(shards: Tensors, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        refuse_rows(*of_the_shards(shards, torch.device("cpu")))
    refuse_rows(*of_the_shards({"w": torch.zeros(1), "none": torch.zeros(0)}, torch.device("cpu")))


class Sampled(Sharded):
    """It notes the rows that it is given, and starts from other numbers on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Tensor] = []

    def configure_model(self) -> None:
        super().configure_model()
        with torch.no_grad():
            held_of(self.network[0].weight).add_(self.global_rank / 100)

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        self.notes.append(batch)
        return self(batch)


@pytest.mark.parametrize("sizes", [{}, {"replicas": 4}], ids=str)
def test_data_are_divided_between_all_ranks(pools: dict[int, Pool], sizes: dict[str, Any]) -> None:
    answers = fits(pools[4], Sampled, {**SPARSE, **sizes}, limit_train_batches=5)
    rows = [torch.cat(answer["notes"]) for answer in answers]
    assert not any(torch.equal(rows[0], other) for other in rows[1:])
    replica = 4 // sizes.get("replicas", 2)
    for rank in range(4):
        assert_same(answers[rank]["history"], answers[rank % replica]["history"])


def test_one_replica_is_said_to_have_nobody_to_exchange_with(pools: dict[int, Pool]) -> None:
    for answer in fits(pools[4].first(2), Sharded, {**SPARSE, "replicas": "nodes"}, limit_train_batches=3):
        assert answer["stats"] == {}
    assert any("one replica" in line for line in answer["said"]) or answer["said"] == []


class Idle(Sharded):
    """Of two replicas the second leaves a layer out now and then, and nobody uses another one."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(4, 4)

    def configure_model(self) -> None:
        fully_shard(self.never, mesh=self.device_mesh["data_parallel"])
        super().configure_model()

    def forward(self, rows: Tensor) -> Tensor:
        out = self.network(rows)
        loss = (out - rows).square().mean()
        return loss if self.global_rank > 1 and len(self.history) % 2 else loss + self.last(out).square().mean()


@pytest.mark.parametrize("trainer", [{}, {"gradient_clip_val": 0.1}], ids=["plain", "clipped"])
def test_what_a_replica_does_not_use_is_exchanged_all_the_same(pools: dict[int, Pool], trainer: dict[str, Any]) -> None:
    answers = fits(pools[4], Idle, SPARSE, limit_train_batches=6, **trainer)
    assert_replicas_are_one(answers)
    for answer in answers:
        first, last = answer["history"][0], answer["history"][-1]
        assert torch.equal(first["never.weight"], last["never.weight"])


class Freezing(Sharded):
    """Its first layer is frozen for some steps."""

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.network[0].requires_grad_(batch_idx not in (2, 3))


def test_layers_may_be_frozen_between_steps(pools: dict[int, Pool]) -> None:
    answers = fits(pools[4], Freezing, SPARSE, limit_train_batches=6)
    assert_replicas_are_one(answers)
    history = answers[0]["history"]
    assert torch.equal(history[1]["network.0.weight"], history[3]["network.0.weight"])
    assert not torch.equal(history[3]["network.0.weight"], history[5]["network.0.weight"])
