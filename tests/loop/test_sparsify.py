import copy
import re
import warnings
from contextlib import contextmanager, nullcontext, suppress
from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse import AdamCorrection, sparsify_gradients
from lightning_sparse.compressors import DGC, TopK
from lightning_sparse.loop.checks import ReplicaError
from lightning_sparse.loop.state import CheckpointError
from lightning_sparse.testing.tensors import assert_same
from lightning_sparse.testing.wrapping import Edges, batch, parameters_of
from tests.helpers.commands import train_as_on_page
from tests.helpers.devices import DEVICE
from tests.helpers.fits import refuse
from tests.helpers.trainers import OPTIMIZERS

DENSE = 2
CORRECTION = AdamCorrection(warmup_steps=DENSE, density_decay_steps=0, second_moment_interval=2)
each_optimizer = pytest.mark.parametrize("optimizer", list(OPTIMIZERS))


def wrapped(model=None, **arguments):
    torch.manual_seed(0)
    model = (Edges() if model is None else model).to(DEVICE)
    return DistributedDataParallel(model, **arguments)


@contextmanager
def sparsified(kind, ddp=None, **settings):
    ddp = wrapped() if ddp is None else ddp
    optimizer = OPTIMIZERS[kind](ddp.parameters())
    if kind == "AdamW":
        settings = {"optimizer_correction": CORRECTION, **settings}
    with sparsify_gradients(ddp, optimizer, **{"warmup_steps": 0, **settings}) as handle:
        yield ddp, optimizer, handle


def train(rank, ddp, optimizers, steps, micro_batches=1, clip=lambda: None):
    for step in steps:
        for micro in range(micro_batches):
            with nullcontext() if micro == micro_batches - 1 else ddp.no_sync():
                ddp(batch(rank, 100 * step + micro)).backward()
        clip()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def buckets_left(rank):
    ddp = wrapped(gradient_as_bucket_view=True)
    ddp(batch(rank, 0)).backward()
    buckets = [StorageWeakRef(each.grad.untyped_storage()) for each in ddp.parameters()]
    ddp.zero_grad()
    before = [not each.expired() for each in buckets]
    with sparsified("SGD", ddp, density=0.05) as (_, optimizer, _):
        after = [not each.expired() for each in buckets]
        train(rank, ddp, [optimizer], range(2))
    return any(before), any(after)


def test_buckets_of_a_wrapper_are_let_go(pair):
    assert pair.run(buckets_left) == [(True, False)] * 2


def join(rank, way, settings):
    ddp = wrapped()
    with (
        sparsify_gradients(ddp, OPTIMIZERS["SGD"](ddp.parameters()), **settings),
        ddp.join() if way == "join" else Join([ddp]),
    ):
        train(rank, ddp, [], range(2 + rank))


@pytest.mark.parametrize(("way", "settings"), [("join", {}), ("Join", {"local_steps": 2})], ids=str)
def test_to_join_ranks_that_have_no_batch_is_refused_with_the_cure(pair, way, settings):
    for answer in pair.run(refuse, join, way, settings):
        assert re.match("RuntimeError: torch's Join.*equally many batches", answer)


def optimizer_of(kind, parameters):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's module uses deprecated functions of torch
        from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
    if kind == "ZeRO":
        return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.1)
    return PostLocalSGDOptimizer(torch.optim.SGD(parameters, lr=0.1), PeriodicModelAverager(2))


def train_with(rank, kind, settings):
    ddp = wrapped()
    optimizer = optimizer_of(kind, ddp.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with sparsify_gradients(ddp, optimizer, **settings):
            train(rank, ddp, [optimizer], range(2))
    return [str(each.message) for each in caught if "mean gradients" in str(each.message)]


@pytest.mark.parametrize("kind", ["ZeRO", "averaging"])
def test_an_optimizer_that_sends_in_its_step_is_refused_where_ranks_step_alone(pair, kind):
    for answer in pair.run(refuse, train_with, kind, {"local_steps": 2}):
        assert re.match("ValueError: .*Optimizer communicates.*local_steps=1", answer)


def test_an_adaptive_optimizer_inside_another_one_is_warned_of_once(pair):
    assert [len(lines) for lines in pair.run(train_with, "ZeRO", {"density": 0.05, "warmup_steps": 0})] == [1, 0]


def train_scaled(rank, kind, is_scaled, overflow_at=None):
    scaler = torch.amp.GradScaler(DEVICE.type, enabled=is_scaled, init_scale=2.0**10, growth_interval=2)
    notes = []
    with sparsified(kind, density=0.05, scaler=scaler) as (ddp, optimizer, handle):

        def note():
            steps = handle.compression_stats().get("total_steps", 0)
            notes.append((parameters_of(ddp), copy.deepcopy(handle.engine.state_dict()), scaler.get_scale(), steps))

        note()
        for step in range(7):
            loss = ddp(batch(rank, step)) * (float("inf") if step == overflow_at and rank == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            note()
    return notes


@each_optimizer
def test_an_overflow_is_skipped_and_leaves_what_is_kept(pair, optimizer):
    for notes in pair.run(train_scaled, optimizer, True, 4):
        assert notes[-1][3] == 6  # steps in the statistics
        for step, (before, after) in enumerate(pairwise(notes)):
            assert (after[2] < before[2]) == (step == 4)
            if step == 4:
                for _, state, *_ in (before, after):  # uses gradients of the previous step
                    for kind in ("second_moment_step", "refresh_due", "refresh_gradient"):
                        state["memory"].pop(kind, None)
                assert_same(after[:2], before[:2])
            else:
                assert not torch.equal(after[0]["matrix"], before[0]["matrix"])


def train_in_warm_up(rank):
    """Return the error without a total, and the density of each step with one."""
    net = Edges()
    with pytest.raises(ValueError, match=r"warmup_steps=0\.5 is a fraction") as refusal:
        sparsify_gradients(net, torch.optim.SGD(net.parameters(), lr=0.1), density=0.01, warmup_steps=0.5)
    densities = []
    settings = {"compressor": "topk", "density": 0.01, "warmup_steps": 0.5, "total_steps": 8}
    with sparsified("SGD", **settings) as (ddp, optimizer, handle):
        for step in range(6):
            train(rank, ddp, [optimizer], range(step, step + 1))
            densities.append(handle.compression_stats()["density"])
    return str(refusal.value), densities


def test_the_density_falls_over_a_fraction_of_the_steps(pair):
    for message, densities in pair.run(train_in_warm_up):
        assert "give total_steps" in message
        assert sorted(densities, reverse=True) == densities
        assert len(set(densities[:5])) == 5
        assert densities[4] == densities[5]


class Broken(TopK):
    def select(self, *group):
        raise OSError("cannot select")


def fail(rank):
    broken = sparsified("SGD", compressor=Broken(), density=0.05)
    with broken as (ddp, _, handle), pytest.raises(OSError, match="cannot select"):
        ddp(batch(rank, 0)).backward()
    with sparsified("SGD", density=0.05) as (ddp, optimizer, handle):
        train(rank, ddp, [optimizer], range(1))
    with pytest.raises(RuntimeError) as late:
        ddp(batch(rank, 0)).backward()
    return str(late.value), handle.compression_stats()


def test_an_error_of_the_exchange_is_raised_by_backward_and_so_is_going_on_when_closed(pair):
    for late, stats in pair.run(fail):
        assert "new DistributedDataParallel" in late
        assert stats["wire_bytes"] > 0


def train_alone(rank):
    clip = torch.nn.utils.clip_grad_norm_
    with sparsified("SGD", compressor=DGC(), density=0.05) as (ddp, optimizer, handle):
        train(rank, ddp, [optimizer], range(3), 2, lambda: clip(ddp.parameters(), 1.0))
        handle.save_state("of one process")
        handle.load_state("of one process")
        with pytest.raises(ValueError, match="start more"):
            handle.load_state(".")
        facts = (handle.training, handle.compression_stats())
    twin = wrapped()
    optimizers = [OPTIMIZERS["SGD"](twin.parameters())]
    train(rank, twin, optimizers, range(3), 2, lambda: clip(twin.parameters(), 1.0))
    return parameters_of(ddp), parameters_of(twin), facts


def test_on_one_process_it_does_nothing(pools):
    ((ours, twin, facts),) = pools[1].run(train_alone)
    assert_same(ours, twin)
    assert facts == (None, {})


def give(rank, arguments):
    ddp = wrapped()
    sparsify_gradients(**{"model": ddp, "optimizer": OPTIMIZERS["SGD"](ddp.parameters()), **arguments})


class Layers(nn.ModuleList):
    def forward(self, rows, chosen):
        for number in chosen:
            rows = self[number](rows)
        return rows


def stop(gradient):
    raise MemoryError("no memory left")


def step_after_an_error(rank):
    torch.manual_seed(0)
    model, rows = Layers([nn.Linear(8, 8), nn.Linear(8, 8)]).to(DEVICE), torch.ones(4, 8, device=DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = sparsify_gradients(model, optimizer, density=0.5, warmup_steps=0)
    hidden = model[0](rows)
    hidden.register_hook(stop)
    with suppress(MemoryError):
        model[1](hidden).sum().backward()
    try:
        model(rows, [0]).sum().backward()
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    finally:
        handle.close(has_failed=True)


def test_no_step_follows_a_backward_that_ended_in_an_error(forked):
    for said in forked[2].run(step_after_an_error):
        assert "an optimizer steps before gradients are exchanged" in said
    forked[2].stop()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "Linear"}, "TypeError: model=str"),
        ({"model": nn.Linear(2, 2)}, "ValueError: optimizer=SGD"),
        ({"model": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))}, "ValueError: model=Sequential"),
        ({"model": nn.Linear(2, 2).requires_grad_(False)}, "ValueError: model=Linear"),
        ({"optimizer": []}, "ValueError: optimizer=[]"),
        ({"optimizer": [1]}, "TypeError: optimizer=1"),
        ({"optimizer": torch.optim.SGD([torch.zeros(2)])}, "ValueError: optimizer=SGD"),
        ({"compressor": "a2sgd"}, "ValueError: compressor=A2SGD"),
        ({"density": 1.5}, "ValueError: density=1.5"),
        ({"local_steps": 4, "compressor": "dgc"}, "ValueError: local_steps=4"),
        ({"local_steps": 4, "optimizer_correction": CORRECTION}, "ValueError: optimizer_correction=AdamCorrection"),
        ({"total_steps": 0}, "ValueError: total_steps=0"),
        ({"total_steps": True}, "ValueError: total_steps=True"),
        ({"optimizer_correction": CORRECTION}, "ValueError: optimizer_correction=AdamCorrection(...)"),
        ({"compressor": DGC(momentum=0.9), "warmup_steps": 0}, "ValueError: momentum=0.9"),
    ],
    ids=lambda each: str(each)[:30] if isinstance(each, str) else "",
)
def test_what_is_refused(pools, ranks, arguments, message):
    for refusal in pools[ranks].run(refuse, give, arguments):
        assert refusal.startswith(message)


def ranks_of_a_node(rank, hosts, **settings):
    with mock.patch("socket.gethostname", return_value=hosts[rank]), sparsified("SGD", **settings) as (_, _, handle):
        dist.barrier()  # gloo fails if a rank closes a group that another rank still connects
        return handle.engine.pipeline.levels.local_world_size


def test_nodes_are_told_apart_by_names_of_hosts(pools):
    assert pools[4].run(ranks_of_a_node, ["one", "one", "other", "other"]) == [2] * 4
    assert pools[4].run(ranks_of_a_node, ["one", "other"] * 2) == [1] * 4
    for refusal in pools[2].run(refuse, give, {"levels": 2}):
        assert refusal.startswith("ValueError: levels=2 needs several nodes")


def change_a_bit(rank, settings):
    with sparsified("SGD", density=0.05, **settings) as (ddp, optimizer, handle):
        train(rank, ddp, [optimizer], range(3))
        handle.check_replicas()
        if not settings:
            with torch.no_grad():
                ddp.module.decoder.bias[3] += rank
            with pytest.raises(ReplicaError, match=r"here the parameter 'decoder\.bias' differs .* on rank 1"):
                handle.check_replicas()


@pytest.mark.parametrize("settings", [{}, {"local_steps": 2}], ids=["every step", "rounds"])
def test_replicas_can_be_checked(pair, settings):
    pair.run(change_a_bit, settings)


def refused_states(rank, folder):
    with sparsified("SGD", compressor="lags") as (ddp, optimizer, handle):
        train(rank, ddp, [optimizer], range(1))
        handle.save_state(folder / "whole")
        handle.load_state(folder / "whole")
        file = folder / "whole" / f"rank_{rank:05d}.pt"
        torch.save({**torch.load(file), "memory": {"residual": {"gone": torch.ones(4)}}}, file)
        with pytest.raises(ValueError, match="the state of gone"):
            handle.load_state(folder / "whole")
        with pytest.raises(CheckpointError, match=r"rank_00000.pt is missing"):
            handle.load_state(folder / "nowhere")
        with pytest.raises(AttributeError, match=r"state_dict, which .* no longer has: use save_state\(folder\)"):
            handle.state_dict()
        with pytest.raises(RuntimeError, match="already exchanged"):
            sparsify_gradients(ddp, optimizer)
    with (
        sparsified("AdamW", compressor="lags") as (_, _, handle),
        pytest.raises(ValueError, match="stores other tensors"),
    ):
        handle.load_state(folder / "whole")


def test_states_of_others_are_refused(pair, tmp_path):
    pair.run(refused_states, tmp_path)


@pytest.mark.exhaustive
def test_the_example_of_the_page_runs(interpreter, tmp_path):
    train_as_on_page(interpreter, "## A plain loop", tmp_path)
    assert {path.name for path in tmp_path.rglob("*.pt")} == {"model.pt", "rank_00000.pt", "rank_00001.pt"}


def train_two(rank, overflow_at):
    model = nn.ParameterDict({name: torch.zeros(100) for name in ("first", "second")}).to(DEVICE)
    optimizers = [torch.optim.SGD([each], lr=1.0) for each in model.values()]
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=4.0, growth_interval=1000)
    generator, owed = torch.Generator().manual_seed(rank), torch.zeros(100)
    with sparsify_gradients(model, optimizers, "topk", density=0.1, warmup_steps=0, scaler=scaler) as handle:
        for step in range(12):
            inputs, overflows = torch.randn(100, generator=generator) + 1, step == overflow_at
            owed += 0 if overflows else inputs
            first, second = ((each * inputs.to(DEVICE)).sum() for each in model.values())
            scaler.scale(first * (float("inf") if overflows else 1.0) + second).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
        waiting = handle.engine.memory.state_dict()["residual"]["second"].cpu()
    return owed, waiting - model["second"].detach().cpu()


def test_an_overflow_of_one_optimizer_has_none_apply_what_is_not_kept(pair):
    owed, got = (sum(each) / 2 for each in zip(*pair.run(train_two, 9)))
    torch.testing.assert_close(got, owed)


@each_optimizer
def test_a_changing_loss_scale_changes_nothing(pair, optimizer):
    for scaled, plain in zip(*(pair.run(train_scaled, optimizer, is_scaled) for is_scaled in (True, False))):
        assert scaled[-1][2] > scaled[0][2]
        assert_same(scaled[-1][0], plain[-1][0])
