import copy
import gc
import warnings
import weakref
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import distribute_module
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_sparse import AdamCorrection, sparsify_gradients
from lightning_sparse.compressors import DGC
from lightning_sparse.testing.tensors import assert_same, differences
from lightning_sparse.testing.wrapping import Edges, batch
from tests.helpers.devices import DEVICE
from tests.helpers.entry_points import pickled, tensors_of
from tests.helpers.fits import refuse
from tests.helpers.trainers import OPTIMIZERS, weights

CORRECTED = {"optimizer_correction": AdamCorrection(warmup_steps=2, density_decay_steps=0, second_moment_interval=2)}
SPARSE = {"density": 0.05, "warmup_steps": 0}


class Following(nn.Module):
    def __init__(self, rank=0):
        super().__init__()
        torch.manual_seed(rank)
        self.edges = Edges()
        self.register_buffer("seen", torch.full((64,), float(rank)))

    def forward(self, rows):
        if self.training:
            self.seen = 0.5 * self.seen + rows.mean(dim=0)
        return self.edges(rows + self.seen)


def built(rank, form):
    module = Following(rank).to(DEVICE)
    return (module if form == "bare" else DistributedDataParallel(module)), module


def train(rank, model, optimizer, steps, apart=nullcontext, after=lambda step: None):
    for step in steps:
        with apart():
            model(batch(rank, 100 * step)).backward()
        model(batch(rank, 100 * step + 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        after(step)


def overflow_beside_what_nobody_owns(rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).to(DEVICE)
    optimizer = OPTIMIZERS["SGD"](model[2].parameters())
    residuals, sent, lines = [], [], []
    logged = patch("lightning_sparse.loop.handle._log", lines.append)
    with logged, sparsify_gradients(model, optimizer, **SPARSE) as handle:
        assert tuple(handle.engine.numels) == ("2.weight", "2.bias")
        for step in range(6):
            scale = float("inf") if (rank, step) == (1, 2) else 1.0
            before = model[0].weight.grad
            (model(batch(rank, step)).square().mean() * scale).backward()
            assert before is None or model[0].weight.grad is before  # this rank's own sum
            if all(each.grad.isfinite().all() for each in model[2].parameters()):
                optimizer.step()
            optimizer.zero_grad()
            residuals.append(handle.engine.state_dict()["memory"]["residual"]["2.weight"].clone())
            sent.append(handle.compression_stats()["wire_bytes"])
    assert any("no optimizer holds '0.weight', '0.bias'" in line for line in lines)
    return residuals, sent, weights(model), model[0].weight.grad


def test_the_gradients_that_no_optimizer_has_are_each_ranks_own(pair):
    (residuals, sent, one, own), (_, _, other, infinite) = pair.run(overflow_beside_what_nobody_owns)
    assert_same(one, other)
    assert own.isfinite().all()
    assert not infinite.isfinite().all()
    assert max(sent) < 1.5 * min(sent)  # per step, not in total
    assert torch.equal(residuals[2], residuals[1])
    assert all(not torch.equal(*each) for each in pairwise(residuals[2:]))


def renew_the_optimizer(rank, kind):
    model, _ = built(rank, "bare")
    settings = {"SGD": {"compressor": DGC()}, "AdamW": CORRECTED, "plain": {}}[kind]
    build = OPTIMIZERS.get(kind, partial(torch.optim.SGD, lr=0.01))
    optimizer = build(model.parameters())
    given = {**SPARSE, **settings}
    with warnings.catch_warnings(record=True) as told, sparsify_gradients(model, optimizer, **given) as handle:
        warnings.simplefilter("always")
        train(rank, model, optimizer, range(10), handle.no_sync)
        train(rank, model, build(model.parameters()), range(10, 22), handle.no_sync)
    return [str(each.message) for each in told if "without a step of a registered optimizer" in str(each.message)]


@pytest.mark.parametrize("kind", [*OPTIMIZERS, "plain"])
def test_a_new_optimizer_that_nobody_has_told_of_is_warned_of(pair, kind):
    told, others = pair.run(renew_the_optimizer, kind)
    assert (len(told), others) == (1, [])


def step_by_own_gradients(rank, form, kind, is_inside):
    model, module = built(rank, form)
    optimizer = OPTIMIZERS[kind](model.parameters())
    with sparsify_gradients(model, optimizer, **SPARSE, **(CORRECTED if kind == "AdamW" else {})) as handle:
        train(rank, model, optimizer, range(4), handle.no_sync)
        before = copy.deepcopy(list(model.parameters()))
        with handle.no_sync():
            model(batch(rank, 10)).backward()
        around = handle.no_sync() if is_inside else nullcontext()
        with around, pytest.raises(RuntimeError, match="outside of no_sync"):
            optimizer.step()
        assert all(map(torch.equal, before, model.parameters()))
        optimizer.zero_grad()
        train(rank, model, optimizer, range(4, 6), handle.no_sync)
    return list(module.parameters())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_inside", [True, False], ids=["inside", "after"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("form", ["bare", "wrapped"])
def test_a_step_by_a_ranks_own_gradients_is_refused(pair, form, kind, is_inside):
    one, other = pair.run(step_by_own_gradients, form, kind, is_inside)
    assert all(map(torch.equal, one, other))


def train_a_copy(rank, again):
    """Train copies of a trained and of a closed model. Return the copies and the original.

    A closed model raises an error until sparsify_gradients or DDP wraps it ``again``.
    """
    model, module = built(rank, "bare")
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    copies = []

    def train_copy():
        for each in (copy.deepcopy(model), pickled(model)):
            before = tensors_of(model)
            train(rank, each, OPTIMIZERS["SGD"](each.parameters()), range(1))
            assert_same(tensors_of(model), before)
            copies.append(tensors_of(each))

    handle = sparsify_gradients(model, optimizer, **SPARSE)
    train(rank, model, optimizer, range(2))
    train_copy()
    handle.close()
    handle.close()
    train_copy()
    with pytest.raises(RuntimeError, match="closed"):
        handle.save_state("closed")
    with pytest.raises(RuntimeError, match="call sparsify_gradients on the model again"):
        model(batch(rank, 0))
    with torch.no_grad():
        model(batch(rank, 0))
    if again == "sparsify_gradients":
        with sparsify_gradients(model, optimizer, **SPARSE):
            train(rank, model, optimizer, range(2, 4))
    else:
        train(rank, DistributedDataParallel(model), optimizer, range(2, 4))
    return copies, {name: each for name, each in tensors_of(module).items() if name != "seen"}


@pytest.mark.parametrize("again", ["sparsify_gradients", "DDP"])
def test_a_copy_trains_alone_and_a_closed_model_once_it_is_attended_to_again(pair, again):
    (copies, ends), (others, other_ends) = pair.run(train_a_copy, again)
    assert all(differences(one, other) for one, other in zip(copies, others))
    assert_same(ends, other_ends)


def give_twice(rank, first, second):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(DEVICE)
    forms = {
        "bare": lambda: model,
        "wrapped": lambda: DistributedDataParallel(model),
        "a part": lambda: model[0],
        "with others": lambda: nn.Sequential(nn.Linear(4, 4), model).to(DEVICE),
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sparsify_gradients(forms[first](), optimizer, **SPARSE):
        sparsify_gradients(forms[second](), optimizer, **SPARSE)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "forms", [("bare", "bare"), ("wrapped", "bare"), ("bare", "wrapped"), ("bare", "a part"), ("a part", "with others")]
)
def test_a_model_is_given_once(pools, ranks, forms):
    for refusal in pools[ranks].run(refuse, give_twice, *forms):
        assert refusal.startswith("RuntimeError: model=")
        assert "close()" in refusal


def sharded_as_fsdp1(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP warns on one rank
        return FullyShardedDataParallel(module, device_id=DEVICE)


def cut_otherwise(module):
    return distribute_module(module, init_device_mesh(DEVICE.type, (dist.get_world_size(),)))


def give_a_wrapper_inside(rank, wrap):
    model = nn.Sequential(nn.Linear(4, 4), wrap(nn.Linear(4, 4))).to(DEVICE)
    sparsify_gradients(model, torch.optim.SGD(model.parameters(), lr=0.1), **SPARSE)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("wrap", [DistributedDataParallel, DataParallel, sharded_as_fsdp1, cut_otherwise])
def test_a_wrapper_inside_is_refused_by_its_name(pools, ranks, wrap):
    for refusal in pools[ranks].run(refuse, give_a_wrapper_inside, wrap):
        assert refusal.startswith("ValueError: model=Sequential")
        assert "'1" in refusal


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        keeps = use_reentrant is None
        self.through = self.second if keeps else partial(checkpoint, self.second, use_reentrant=use_reentrant)

    def forward(self, inputs):
        return self.through(torch.tanh(self.first(inputs)))


def train_checkpointed(rank, use_reentrant):
    model = Checkpointed(use_reentrant).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sparsify_gradients(model, optimizer, **SPARSE):
        for step in range(3):
            model(torch.full((2, 4), 1.0 + rank + step, device=DEVICE)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [each.detach() for each in model.parameters()]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_is_as_none(pair, use_reentrant):
    expected, ends = (pair.run(train_checkpointed, each) for each in (None, use_reentrant))
    assert_same(ends, expected)


class Laid(nn.Module):
    def __init__(self):
        super().__init__()
        self.picture = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
        self.turned = nn.Linear(8, 64)
        self.turned.weight = nn.Parameter(torch.randn(8, 64).t())
        self.scale = nn.Parameter(torch.ones(()))
        self.gaps = nn.Parameter(torch.randn(8, 10)[:, :1])

    def forward(self, rows):
        pictures = self.picture(rows.view(-1, 4, 4, 4)).amax(dim=(2, 3)) * self.gaps.view(8)
        return (self.turned(pictures) * self.scale).square().mean()


def train_dense_steps(rank, is_ours):
    torch.manual_seed(0)
    model = Laid().to(DEVICE)
    wrapped = model if is_ours else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if is_ours:
        sparsify_gradients(model, optimizer, "topk", density=0.05, optimizer_correction=AdamCorrection(warmup_steps=9))
    gradients = []
    for step in range(4):
        wrapped(batch(rank, step)).backward()
        gradients += [each.grad.detach().clone() for each in model.parameters()]
        optimizer.step()
        optimizer.zero_grad(set_to_none=step < 2)
    return gradients, tensors_of(model)


def test_dense_steps_have_ddps_gradients_however_parameters_lie(pair):
    for ours, ddps in zip(pair.run(train_dense_steps, True), pair.run(train_dense_steps, False)):
        assert_same(ours, ddps)


def close(rank, optimizer, settings):
    """Return whether a close frees the memory without a garbage collection."""
    model = Edges().to(DEVICE)
    optimizer = optimizer(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(DEVICE.type, enabled=False)
    handle = sparsify_gradients(model, optimizer, **{"schedule": "single", "scaler": scaler, **SPARSE, **settings})
    train(rank, model, optimizer, range(3), handle.no_sync)
    memory = weakref.ref(handle.engine.memory)
    gc.collect()
    gc.disable()
    try:
        handle.close()
        return memory() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        (torch.optim.SGD, {"schedule": "auto"}),
        (torch.optim.AdamW, {}),
        (torch.optim.SGD, {"compressor": "dgc", "schedule": "merged"}),
        (torch.optim.SGD, {"local_steps": 2}),
    ],
    ids=["SGD", "AdamW", "momentum", "rounds"],
)
def test_what_was_kept_takes_no_memory_once_it_is_closed(pair, optimizer, settings):
    assert pair.run(close, optimizer, settings) == [True, True]


class Factors(nn.Module):
    """Two large parameters with gradients that are swapped with residuals.

    Torch gives both the same gradient memory, unless one is cloned.
    """

    def __init__(self, shares):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Parameter(torch.randn(300, 200)), nn.Parameter(torch.randn(200, 300))
        self.shares = shares

    def forward(self, factors):
        second = self.second
        if not self.shares:
            second = second.clone()
            second.register_hook(torch.clone)
        return ((self.first.view(-1) + second.view(-1)) * factors).square().sum() * 1e-3


def train_factors(rank, compressor, shares, creates_graph=False, backwards=1, look=lambda parameter: None, **zeroing):
    model = Factors(shares).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    gradients = []
    with sparsify_gradients(model, optimizer, compressor, **SPARSE) as handle, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's warning about ``create_graph``
        model.first.register_post_accumulate_grad_hook(look)
        for step in range(4):
            for each in range(backwards):
                generator = torch.Generator().manual_seed(100 * step + 10 * each + rank)
                factors = torch.randn(60_000, generator=generator).to(DEVICE)
                model(factors).backward(create_graph=creates_graph)
            gradients += [each.grad.detach().clone() for each in model.parameters()]
            optimizer.step()
            optimizer.zero_grad(**zeroing)
        kept = {name: each.clone() for name, each in handle.engine.memory.state_dict()["residual"].items()}
    return gradients, tensors_of(model), kept


@pytest.mark.parametrize("compressor", ["topk", "dgc"])
def test_gradients_in_one_memory_are_two_and_may_keep_their_memory(pair, compressor):
    apart = pair.run(train_factors, compressor, False)
    assert_same(pair.run(train_factors, compressor, True), apart)
    assert_same(pair.run(partial(train_factors, compressor=compressor, shares=False, set_to_none=False)), apart)
    assert_same(apart[0][:2], apart[1][:2])


def test_a_mean_that_arrived_before_stays_in_a_gradient_that_backward_makes_anew(pair):
    anew, in_place = (pair.run(train_factors, "topk", False, creates_graph, 2) for creates_graph in (True, False))
    assert_same(anew, in_place)


def train_looked_at(rank):
    held = []

    def look(parameter):
        if held:
            held.pop().zero_()
        held.append(parameter.grad)

    return train_factors(rank, "topk", False, look=look)


def test_whoever_keeps_a_gradient_keeps_no_residual(pair):
    assert_same(pair.run(train_looked_at), pair.run(train_factors, "topk", False))
