import copy
import io
import re
import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse import LocalSteps, sparsify_gradients
from lightning_sparse.testing.tensors import assert_same, differences
from lightning_sparse.testing.wrapping import parameters_of
from tests.helpers.devices import DEVICE
from tests.helpers.entry_points import Net, optimizer_of, rows_of, tensors_of
from tests.helpers.fits import refuse
from tests.helpers.rounds import ROUNDS

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


def pickled(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


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


def skip(rank):
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=8.0, growth_interval=3)
    ddp, optimizer = wrapped()
    scales = []
    with sparsify_gradients(ddp, optimizer, **SPARSE, scaler=scaler):
        for step in range(10):
            loss = ddp(rows_of(rank, step).to(DEVICE))["loss"] * (float("inf") if (rank, step) == (1, 2) else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
    return scales, parameters_of(ddp)


def test_ranks_may_skip_different_steps(pair):
    (scales, ends), (others, other_ends) = pair.run(skip)
    assert scales != others
    assert_same(ends, other_ends)


class SAM(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1)

    @torch.no_grad()
    def perturb(self):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["place"] = parameter.clone()
            parameter.add_(parameter.grad, alpha=0.05)

    @torch.no_grad()
    def step_from_there(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.copy_(self.state[parameter]["place"])
        self.base_optimizer.step()


@torch.no_grad()
def step_by_hand(parameters):
    for parameter in parameters:
        parameter.sub_(parameter.grad, alpha=0.1)


def train_oddly(rank, in_halves):
    ddp = DistributedDataParallel(Net().to(DEVICE))
    optimizer = SAM(ddp.parameters())
    with warnings.catch_warnings(record=True) as caught, sparsify_gradients(ddp, optimizer, **SPARSE) as handle:
        warnings.simplefilter("always")
        for step in range(10):
            ddp(rows_of(rank, step).to(DEVICE))["loss"].backward()
            if in_halves:
                optimizer.perturb()
                optimizer.zero_grad()
                ddp(rows_of(rank, step).to(DEVICE))["loss"].backward()
                optimizer.step_from_there()
            else:
                step_by_hand(ddp.parameters())
            optimizer.zero_grad()
    return tensors_of(ddp.module), handle.compression_stats(), [str(each.message) for each in caught]


@pytest.mark.parametrize(("in_halves", "steps"), [(True, 10), (False, 0)], ids=["in halves", "by hand"])
def test_steps_that_are_not_seen_leave_ranks_one_model(pair, in_halves, steps):
    (one, stats, warned), (other, _, unwarned) = pair.run(train_oddly, in_halves)
    assert_same(one, other)
    assert stats.get("total_steps", 0) == steps
    assert [("step of a registered optimizer" in each) for each in warned] == [True] * (not in_halves)
    assert not unwarned


def thaw(rank):
    ddp, optimizer = wrapped()
    ddp.module.network[0].requires_grad_(False)
    before = tensors_of(ddp.module)
    with sparsify_gradients(ddp, optimizer, **SPARSE):
        train(rank, ddp, optimizer, range(2), lambda step: ddp.module.network[0].requires_grad_(True))
        train(rank, ddp, optimizer, range(2, 3 * EVERY))
    return before, tensors_of(ddp.module)


def test_what_is_unfrozen_in_a_round_is_not_trained_apart(pair):
    (before, one), (_, other) = pair.run(thaw)
    assert_same(one, other)
    assert not torch.equal(one["network.0.weight"], before["network.0.weight"])


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


def step_frozen(rank):
    ddp, optimizer = wrapped()
    before = tensors_of(ddp.module)
    with sparsify_gradients(ddp, optimizer, "dense", local_steps=EVERY):
        for step in range(2 * EVERY):
            ddp(rows_of(rank, step).to(DEVICE))["loss"].backward()
            ddp.requires_grad_(False)
            optimizer.step()
            optimizer.zero_grad()
            ddp.requires_grad_(True)
    return before, tensors_of(ddp.module)


def test_what_steps_while_it_is_frozen_is_exchanged(pair):
    (before, one), (_, other) = pair.run(step_frozen)
    assert_same(one, other)
    assert not torch.equal(one["network.0.weight"], before["network.0.weight"])


class Growing(Net):
    def __init__(self):
        super().__init__()
        self.more = torch.nn.ModuleList()

    def forward(self, rows):
        return {"loss": (self.network(rows) + sum(each(rows) for each in self.more) - rows).square().mean()}

    def change(self, step, optimizer):
        self.network[0].requires_grad_(not 3 <= step < 9)
        if step == 5:
            self.more.append(torch.nn.Linear(32, 32).to(DEVICE))
            optimizer.add_param_group({"params": self.more.parameters()})


def go_on(rank, folder, kind, save_at, is_anew, inside=False):
    """Save in a round, and resume in a new or the same session. Return the models of both runs.

    The state may be loaded while the shared model is swapped in.
    """
    torch.manual_seed(0)
    net = Growing().to(DEVICE)
    optimizer = optimizer_of(net)[0]
    handle = sparsify_gradients(net, optimizer, **ROUNDS[kind])

    def step(number):
        net.change(number, optimizer)
        train(rank, net, optimizer, [number])

    for number in range(save_at):
        step(number)
    with handle.shared_model():
        saved = copy.deepcopy([net.state_dict(), optimizer.state_dict()])
        handle.save_state(folder)
    for number in range(save_at, 14):
        step(number)
    handle.synchronize()
    expected = tensors_of(net)
    if is_anew:
        handle.close()
        net = Growing().to(DEVICE)
        optimizer = optimizer_of(net)[0]
        handle = sparsify_gradients(net, optimizer, **ROUNDS[kind])
        for number in range(save_at):
            net.change(number, optimizer)
    else:
        step(13)
    with handle.shared_model() if inside else nullcontext():
        for part, state in zip((net, optimizer), saved):
            part.load_state_dict(state)
        handle.load_state(folder)
    for number in range(save_at, 14):
        step(number) if is_anew or number != 5 else train(rank, net, optimizer, [number])
    handle.close()
    return expected, tensors_of(net)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "loaded",
    [(3, True), (4, True), (6, True), (7, True), (6, False), (7, False), (6, True, True), (6, False, True)],
)
@pytest.mark.parametrize("kind", ["diloco", "sparse"])
def test_it_goes_on_to_the_bit_whatever_has_changed(pair, tmp_path, kind, loaded):
    for expected, resumed in pair.run(go_on, tmp_path, kind, *loaded):
        assert_same(resumed, expected)


def close_step(rank, ddp, optimizer, step):
    optimizer.zero_grad()
    loss = ddp(rows_of(rank, step).to(DEVICE))["loss"]
    loss.backward()
    return loss


def close_around(rank, folder, save_at):
    """Train with LBFGS, which reads its state before the closure's forward, with and without a resume."""
    ends, saved = [], None
    for first in (0, save_at):
        ddp, _ = wrapped()
        optimizer = torch.optim.LBFGS(ddp.parameters(), lr=0.1, max_iter=3)
        with sparsify_gradients(ddp, optimizer, **SPARSE) as handle:
            if first:
                with handle.shared_model():
                    ddp.module.load_state_dict(saved["model"])
                    optimizer.load_state_dict(saved["optimizer"])
                    handle.load_state(folder)
            for step in range(first, 3 * EVERY):
                if step == save_at and not first:
                    with handle.shared_model():
                        parts = {"model": ddp.module, "optimizer": optimizer}
                        saved = copy.deepcopy({name: part.state_dict() for name, part in parts.items()})
                        handle.save_state(folder)
                optimizer.step(partial(close_step, rank, ddp, optimizer, step))
            handle.synchronize()
            ends.append(tensors_of(ddp.module))
    return ends


@pytest.mark.parametrize("save_at", [EVERY, EVERY + 1])
def test_a_closure_goes_on_to_the_bit(pair, tmp_path, save_at):
    for whole, resumed in pair.run(close_around, tmp_path, save_at):
        assert_same(whole, resumed)


def evaluate_at_once(rank, folder, settings, steps, ends_round):
    losses, saved = [], None
    for _ in range(2):
        net = Net().to(DEVICE)
        optimizer = optimizer_of(net)[0]
        with sparsify_gradients(net, optimizer, **settings) as handle:
            if saved is None:
                train(rank, net, optimizer, range(steps))
                if ends_round:
                    handle.synchronize()
                saved = copy.deepcopy([net.state_dict(), optimizer.state_dict()])
                handle.save_state(folder)
            else:
                for part, state in zip((net, optimizer), saved):
                    part.load_state_dict(state)
                handle.load_state(folder)
            net.eval()
            with torch.no_grad():
                losses.append(float(net(rows_of(0, 0).to(DEVICE))["loss"]))
    return losses


@pytest.mark.parametrize(
    ("settings", "steps", "ends_round"),
    [(SPARSE, 0, False), (SPARSE, 2, True)],
    ids=["before rounds", "a round was ended"],
)
def test_a_model_of_all_ranks_is_evaluated_as_it_was_loaded(pair, tmp_path, settings, steps, ends_round):
    for before, after in pair.run(evaluate_at_once, tmp_path / "first", settings, steps, ends_round):
        assert after == before


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


def test_one_process_trains_as_ever(pools):
    ((_, ends, stats),) = pools[1].run(train_accumulating, True)
    assert stats == {}
    assert ends
