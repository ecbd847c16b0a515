import copy
import re
from contextlib import nullcontext

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse import LocalSteps, sparsify_gradients
from lightning_sparse.testing.tensors import assert_same, differences
from lightning_sparse.testing.wrapping import parameters_of
from tests.helpers.devices import DEVICE
from tests.helpers.entry_points import Net, optimizer_of, pickled, rows_of, tensors_of
from tests.helpers.fits import refuse
from tests.helpers.resuming import ROUNDS

EVERY = 4
SPARSE = {"density": 0.1, "local_steps": LocalSteps(EVERY, residual_decay=0.9)}


def wrapped(net=None):
    ddp = DistributedDataParallel((Net() if net is None else net).to(DEVICE))
    return ddp, optimizer_of(ddp)[0]


def train(rank, model, optimizer, steps, after=lambda step: None):
    for step in steps:
        model(rows_of(rank, step).to(DEVICE))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        after(step)


def train_accumulating(rank, through_ddp):
    ddp, optimizer = wrapped()
    model = ddp if through_ddp else ddp.module
    with sparsify_gradients(ddp, optimizer, **SPARSE) as handle:
        for step in range(6):
            for micro in range(2):
                with nullcontext() if micro else ddp.no_sync():
                    model(rows_of(rank, 10 * step + micro).to(DEVICE))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
        middle = tensors_of(ddp.module)
    return middle, tensors_of(ddp.module), handle.compression_stats()


@pytest.mark.parametrize("through_ddp", [True, False], ids=["wrapped", "past the wrapper"])
def test_ranks_train_alone_and_end_as_one(pair, through_ddp):
    (one, ends, stats), (other, others, _) = pair.run(train_accumulating, through_ddp)
    assert differences(one, other)
    assert_same(ends, others)
    assert (stats["total_steps"], stats["local_steps"]) == (6, 2)


def train_parts(rank):
    torch.manual_seed(0)
    model = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]).to(DEVICE)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    seen = []
    with sparsify_gradients(model, optimizers, density=0.1, local_steps=8) as handle:
        for _ in range(4):
            for part, optimizer in zip(model, optimizers):
                (part(torch.ones(2, 4, device=DEVICE)) - rank).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            seen.append(tensors_of(model))
        handle.synchronize()
    return [*seen, tensors_of(model)]


def test_rounds_begin_where_parts_of_a_model_are_called(pair):
    ones, others = pair.run(train_parts)
    are_apart = [bool(differences(one, other)) for one, other in zip(ones, others)]
    assert are_apart == [*4 * [True], False]


def forget(rank, folder):
    """Return the errors of a missing ``shared_model()``, with correct use in between."""
    said = []

    def refused(act):
        with pytest.raises((RuntimeError, ValueError)) as refusal:
            act()
        said.append(str(refusal.value))

    @torch.no_grad()
    def evaluate(model):
        model.eval()
        loss = float(model(rows_of(0, 0).to(DEVICE))["loss"])
        model.train()
        return loss

    ddp, optimizer = wrapped()
    with sparsify_gradients(ddp, optimizer, **SPARSE) as handle:
        evaluate(ddp)  # before the first step all models are equal
        ddp.state_dict()
        train(rank, ddp, optimizer, range(EVERY))
        ddp.state_dict()
        train(rank, ddp, optimizer, range(EVERY, EVERY + 1))
        for each in (ddp, ddp.module):
            refused(lambda: evaluate(each))  # noqa: B023
            refused(each.state_dict)
        ddp.train()
        for forked in (copy.deepcopy(ddp.module), pickled(ddp.module)):  # local averages such as an EMA
            evaluate(forked)
            forked.state_dict()
        with handle.shared_model():
            evaluate(ddp)
            with handle.shared_model():
                ddp.module.state_dict()
            refused(lambda: train(rank, ddp, optimizer, range(1)))
        handle.synchronize()
        evaluate(ddp)
        train(rank, ddp, optimizer, range(EVERY, EVERY + 2))
        handle.save_state(folder)
    evaluate(ddp)
    refused(lambda: ddp(rows_of(0, 0).to(DEVICE)))
    with sparsify_gradients(*wrapped(), density=0.1) as handle:
        refused(lambda: handle.load_state(folder))
    return said


def test_what_is_forgotten_is_refused_with_its_cure(pair, tmp_path):
    for said in pair.run(forget, tmp_path):
        expected = ["shared_model()"] * 5 + ["new DistributedDataParallel", "gradients are"]
        assert len(said) == len(expected)
        assert all(part in message for part, message in zip(expected, said))


def adopt(rank):
    ddp, optimizer = wrapped()
    with sparsify_gradients(ddp, optimizer, **SPARSE) as handle:
        train(rank, ddp, optimizer, range(EVERY + 2))
        torch.manual_seed(1)
        for parameter in ddp.parameters():
            torch.nn.init.uniform_(parameter)
        loaded = parameters_of(ddp)
        handle.reset_shared_model()
        with handle.shared_model():
            shared = parameters_of(ddp)
    return loaded, shared


def test_weights_that_are_loaded_in_training_are_shared_when_told(pair):
    for loaded, shared in pair.run(adopt):
        assert_same(shared, loaded)


def end_inside(rank, settings, ends, inside):
    net = Net().to(DEVICE)
    optimizer = optimizer_of(net)[0]
    with sparsify_gradients(net, optimizer, **settings) as handle:
        train(rank, net, optimizer, range(EVERY + 3))
        with handle.shared_model() if inside else nullcontext():
            getattr(handle, ends)()
            there = tensors_of(net)
        if ends == "synchronize":
            train(rank, net, optimizer, range(EVERY + 3, 3 * EVERY))
    return there, tensors_of(net)


@pytest.mark.parametrize("ends", ["synchronize", "close"])
def test_a_round_ends_while_the_shared_model_is_shown_as_it_does_outside(pair, ends):
    for ours, expected in zip(*(pair.run(end_inside, SPARSE, ends, inside) for inside in (True, False))):
        for one, other in zip(ours, expected):
            assert_same(one, other)


def freeze(rank, kind, first):
    ddp, optimizer = wrapped()
    layer = ddp.module.network[0]
    with sparsify_gradients(ddp, optimizer, **ROUNDS[kind]) as handle:
        train(rank, ddp, optimizer, range(first))
        layer.requires_grad_(False)
        train(rank, ddp, optimizer, range(first, 3 * EVERY))
        handle.synchronize()
        frozen = layer.weight.detach().clone()
        train(rank, ddp, optimizer, range(6 * EVERY))
    return frozen, tensors_of(ddp.module)


@pytest.mark.parametrize("first", [2 * EVERY, 2 * EVERY + 1], ids=["as a round begins", "within a round"])
@pytest.mark.parametrize("kind", ["diloco", "sparse"])
def test_what_is_frozen_is_moved_by_no_later_round(pair, kind, first):
    (frozen, one), (_, other) = pair.run(freeze, kind, first)
    assert_same(one, other)
    assert torch.equal(one["network.0.weight"], frozen)
    assert not torch.equal(one["network.0.weight"], tensors_of(Net())["network.0.weight"])


def fail(rank):
    ddp, optimizer = wrapped()

    def break_off(step):
        if step == 1:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk"), sparsify_gradients(ddp, optimizer, **SPARSE):
        train(rank, ddp, optimizer, range(2 if rank else 5), break_off)
    return True


def test_an_error_leaves_a_round_open(pair):
    assert pair.run(fail) == [True, True]


class Unhooked(torch.optim.SGD):
    """An optimizer without a call of the base constructor, and so without hooks."""

    def __init__(self, parameters):
        self.param_groups = [{"params": list(parameters), "lr": 0.1}]
        self.defaults = {}


def give(rank, arguments, kind):
    ddp = DistributedDataParallel(Net().to(DEVICE), **arguments)
    sparsify_gradients(ddp, kind(ddp.parameters()), local_steps=EVERY, optimizer_correction=None)


def test_local_steps_need_an_optimizer_with_hooks(pair):
    for said in pair.run(refuse, give, {}, Unhooked):
        assert re.match("ValueError.*optimizer=", said)
