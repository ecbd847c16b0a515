import copy
import os
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.plugins import MixedPrecision
from lightning_fabric.strategies import STRATEGY_REGISTRY

from lightning_sparse import AdamCorrection, LocalSteps, SparseFabricStrategy
from lightning_sparse.strategy.names import VARIANTS, systems
from lightning_sparse.testing.tensors import assert_same
from lightning_sparse.testing.wrapping import Edges, batch
from tests.helpers.commands import train_as_on_page
from tests.helpers.devices import DEVICE
from tests.helpers.trainers import OPTIMIZERS, accelerator, expect, weights

CORRECTION = AdamCorrection(warmup_steps=2, density_decay_steps=0, second_moment_interval=2)


@contextmanager
def launched(rank, strategy, precision=None):
    arguments = {}
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0")
    expect()
    if precision == "scaled":  # by number of bits, Fabric scales on a GPU only
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**10)
        arguments["plugins"] = [MixedPrecision("16-mixed", DEVICE.type, scaler)]
    elif precision is not None:
        arguments["precision"] = precision
    fabric = Fabric(strategy=strategy, accelerator=accelerator(), devices=dist.get_world_size(), **arguments)
    fabric.launch()
    try:
        yield fabric
    finally:
        if isinstance(fabric.strategy, SparseFabricStrategy):
            fabric.strategy.close()


def sparse(kind="SGD", **settings):
    correction = CORRECTION if kind == "AdamW" else "auto"
    return SparseFabricStrategy(**{"warmup_steps": 0, "optimizer_correction": correction, **settings})


def set_up(fabric, kind):
    torch.manual_seed(0)
    model = Edges()
    return fabric.setup(model, OPTIMIZERS[kind](model.parameters()))


def train(fabric, model, optimizer, steps, clip):
    for step in steps:
        for micro in range(2):
            with fabric.no_backward_sync(model, enabled=micro == 0):
                fabric.backward(model(batch(fabric.global_rank, 100 * step + micro)))
        if clip:
            fabric.clip_gradients(model, optimizer, **clip)
        optimizer.step()
        optimizer.zero_grad()


def train_both(rank, kind, precision, clip):
    ends = []
    for strategy in (sparse(density=1.0), "ddp"):
        with launched(rank, strategy, precision=precision) as fabric:
            model, optimizer = set_up(fabric, kind)
            train(fabric, model, optimizer, range(5), clip)
            ends.append(weights(model.module))
    return ends


@pytest.mark.parametrize(
    ("optimizer", "precision", "clip"),
    [("AdamW", "bf16-mixed", {"clip_val": 0.02}), ("SGD", "scaled", {"max_norm": 0.1})],
)
def test_density_one_equals_ddp(pair, optimizer, precision, clip):
    for ours, twin in pair.run(train_both, optimizer, precision, clip):
        for name in twin:
            torch.testing.assert_close(ours[name], twin[name], rtol=1e-5, atol=1e-6)


ROUNDS = {"local_steps": LocalSteps(2), "optimizer_correction": "auto"}


def train_in_two(rank, kind, settings, path):
    """Train two models with and without a rebuild in the middle. Return both results.

    The state is loaded twice: before training, and after two more steps while the shared models are swapped in.
    """
    ends, stats = [], []
    for start in (0, 3):
        with launched(rank, sparse(kind, **copy.deepcopy(settings))) as fabric:
            pairs = {f"{number}": set_up(fabric, kind) for number in range(2)}
            state = {key + "model": model for key, (model, _) in pairs.items()}
            state |= {key + "optimizer": optimizer for key, (_, optimizer) in pairs.items()}
            if start:
                rest = fabric.load(path, {**state, "step": 0})
                assert rest == {}
                for model, optimizer in pairs.values():
                    train(fabric, model, optimizer, range(start, start + 2), {"max_norm": 0.1})
                with fabric.strategy.shared_model():
                    fabric.load(path, {**state, "step": 0})
            for step in range(start, 6):
                for model, optimizer in pairs.values():
                    train(fabric, model, optimizer, range(step, step + 1), {"max_norm": 0.1})
                if step == 2 and not start:
                    fabric.save(path, {**state, "step": step})
                    fabric.save(f"{path}.weights", {key: each for key, each in state.items() if "model" in key})
            fabric.strategy.synchronize()
            ends.append([weights(model.module) for model, _ in pairs.values()])
            stats = [fabric.strategy.compression_stats(model) for model, _ in pairs.values()]
            assert stats[0] == fabric.strategy.compression_stats(pairs["0"][0].module)
    return *ends, stats


def load_alone(rank, path):
    with launched(rank, sparse()) as fabric:
        model, optimizer = set_up(fabric, "SGD")
        fabric.load(path, {"0model": model, "0optimizer": optimizer})
        return fabric.strategy.compression_stats(model)


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        ("AdamW", {"compressor": "exdyna", "density": 0.05, "wire": "bfloat16"}),
        ("SGD", {"compressor": "dgc", "density": 0.05, "warmup_steps": 4}),
        ("AdamW", {"density": 0.05, **ROUNDS}),
    ],
    ids=["exdyna with AdamW", "dgc", "local steps"],
)
def test_loaded_it_goes_on_to_the_bit(pools, tmp_path, optimizer, settings):
    path = tmp_path / "half.ckpt"
    answers = pools[2].run(train_in_two, optimizer, settings, str(path))
    for whole, resumed, stats in answers:
        assert_same(resumed, whole)
        assert_same(whole, answers[0][0])
        assert_same(whole[0], whole[1])  # the models stay separate
        assert all(each["total_wire_bytes"] > 0 for each in stats)
    assert {each.name for each in tmp_path.iterdir()} == {"half.ckpt", "half.ckpt.sparse", "half.ckpt.weights"}
    assert pools[1].run(load_alone, str(path)) == [{}]


def misuse(rank):
    said = []

    def refused(mistake):
        with pytest.raises((RuntimeError, ValueError)) as refusal:
            mistake()
        said.append(str(refusal.value))

    with launched(rank, sparse(compressor="dgc", density=0.05, warmup_steps=4)) as fabric:
        model = fabric.setup(Edges())
        refused(lambda: model(batch(rank, 0)))
        with torch.no_grad():
            model(batch(rank, 0))
        refused(lambda: fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1)))
        set_up(fabric, "SGD")
        refused(lambda: fabric.strategy.compression_stats(Edges()))
        set_up(fabric, "SGD")
        refused(fabric.strategy.compression_stats)
    with launched(rank, sparse(compressor="dgc", optimizer_correction=None)) as fabric:
        refused(lambda: set_up(fabric, "AdamW"))
    return said


def test_mistakes_are_refused_with_their_cure(pair):
    for said in pair.run(misuse):
        expected = (
            "was set up without an optimizer: use fabric.setup(model, *optimizers)",
            "SGD has no model: use fabric.setup(model, *optimizers)",
            "model=Edges matches 0 of 1 trained models",
            "model=NoneType matches 2 of 2 trained models, not one",
            "AdamW needs gradients instead",
        )
        for part, message in zip(expected, said, strict=True):
            assert part in message


def test_a_misspelt_argument_is_refused():
    with pytest.raises(TypeError, match=r"denstiy=0.01 .*density"):
        SparseFabricStrategy(denstiy=0.01)


def test_every_name_of_the_trainer_is_known():
    for system in systems():
        for suffix, more in VARIANTS.items():
            entry = STRATEGY_REGISTRY[system.name + suffix]
            assert entry["strategy"] is SparseFabricStrategy
            assert (entry["description"], entry["init_params"]) == (system.description, {**system.arguments, **more})
    fabric = Fabric(strategy="sparse_lags_find_unused_parameters_true", accelerator="cpu", devices=2)
    assert isinstance(fabric.strategy, SparseFabricStrategy)
    with pytest.raises(ValueError, match="lets replicas drift apart"):
        Fabric(strategy="sparse_a2sgd", accelerator="cpu")


@pytest.mark.exhaustive
def test_the_example_of_the_page_runs(interpreter, tmp_path):
    result = train_as_on_page(interpreter, "## Fabric", tmp_path)
    assert "SparseFabricStrategy: LAGS sends 0.01 of each gradient" in result.stderr
    assert (tmp_path / "half.ckpt.sparse").is_dir()
