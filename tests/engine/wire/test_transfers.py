from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch import nn

from lightning_sparse.compressors import element_count
from lightning_sparse.compressors.selection import Selection, SelectionSize, grouped
from lightning_sparse.engine.collectives import Communicator
from lightning_sparse.engine.settings import LocalSteps, Settings
from lightning_sparse.engine.step.topology import LocalGradient
from lightning_sparse.engine.wire.base import Transfer
from lightning_sparse.engine.wire.reduce import UnionFormat
from lightning_sparse.schedule.costs import sent_bytes
from tests.helpers.devices import DEVICE
from tests.helpers.examples import load
from tests.helpers.lockstep import run_phases
from tests.helpers.sparse_ddp import COMPRESSOR_NAMES, DENSITY, WIRES, Edges, backpropagate, batch, sparse_ddp

VARYING = ("exdyna", "micro")  # the threshold only approximates the density
FIXED = [name for name in COMPRESSOR_NAMES if name not in VARYING]
STEPS = 4
transfers_of = load("echo").transfers_of
AS_DDP = {"float32": 1, "bfloat16": 2}  # compression ratios
A2SGD_BYTES = 8  # two fp32 numbers that A2SGD gathers at the end of a step


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(64, 1500)
        self.narrow = nn.Linear(1500, 7)

    def forward(self, inputs):
        return self.narrow(torch.tanh(self.wide(inputs))).square().mean()


MODELS = {"edges": Edges, "block": Block}


class Sent(NamedTuple):
    stats: dict[str, float]
    nbytes: float  # bytes that collectives of the last step send
    sizes: list[int]  # sizes of the parameters, in the order of the exchange


def sent_by_a_step(rank, model, settings):
    torch.manual_seed(0)
    issue, sent = Communicator.issue, []

    def counted(communicator, name, tensor, *out):
        # An all-gather sends everything to all others, an all-to-all a part to each, and a ring all-reduce both.
        others, ranks = communicator.world_size - 1, communicator.world_size
        times = {"all_gather": others, "all_to_all": others / ranks, "all_reduce": 2 * others / ranks}
        sent.append(times[name] * tensor.nbytes)
        return issue(communicator, name, tensor, *out)

    with mock.patch.object(Communicator, "issue", counted), sparse_ddp(MODELS[model](), **settings) as (ddp, engine):
        for step in range(STEPS):
            sent.clear()
            engine.begin_backward()
            backpropagate(ddp, engine, ddp(batch(rank, step)))
            engine.end_step()
        numels = {name: parameter.numel() for name, parameter in ddp.module.named_parameters()}
        travelled = [name for group in engine.recorder.last.buckets for name in group.names]
        return Sent(engine.compression_stats(), sum(sent), [numels[name] for name in travelled])


def ratio_of_rounds(rank, settings):
    torch.manual_seed(0)
    with sparse_ddp(Block(), **settings) as (ddp, engine):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(2):
            with ddp.no_sync():
                ddp(batch(rank, step)).backward()
            optimizer.step()
            engine.end_step()
        engine.worker.drain()
        stats = engine.compression_stats()
        return stats["dense_bytes"] / settings["local_steps"].every / stats["wire_bytes"]


def settings_of(compressor, wire="float32"):
    return Settings.of(compressor, DENSITY[compressor], wire=wire, warmup_steps=0)


def transfers(settings, sizes, ranks, flags):
    compressor, wires = settings.compressor, settings.wires_for(0, ranks)
    if compressor.dense_wire_format is not None and settings.density >= 1:
        return transfers_of(wires, [SelectionSize(size, size, is_dense=True) for size in sizes], flags)
    sizes = [sum(sizes)] if compressor.selects_across_bucket else sizes
    selected = [compressor.selection_size(size, element_count(size, settings.density)) for size in sizes]
    return transfers_of(wires, selected, flags)


def announced(settings, groups, ranks):
    is_a2sgd = type(settings.compressor).__name__ == "A2SGD"
    announced = [Transfer("all_gather", A2SGD_BYTES)] if is_a2sgd else []
    flags = [0] * (len(groups) - 1) + [sum(map(len, groups))]
    for sizes, told in zip(groups, flags, strict=True):
        announced += transfers(settings, sizes, ranks, told)
    return sum(sent_bytes(*transfer, ranks) for transfer in announced)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("model", "schedule", "ranks"), [("edges", "single", 2), ("edges", "layerwise", 3), ("block", "single", 2)]
)
@pytest.mark.parametrize(
    ("compressor", "wire"),
    [
        *((name, wire) for place, name in enumerate(FIXED) for wire in (WIRES[place % 2], WIRES[3 + place % 2])),
        ("dense", "float32"),
    ],
)
def test_ranks_send_what_is_announced(pools, compressor, wire, model, schedule, ranks):
    settings = {"compressor": compressor, "density": DENSITY[compressor], "schedule": schedule, "wire": wire}
    for stats, nbytes, sizes in pools[ranks].run(sent_by_a_step, model, settings):
        groups = [sizes] if schedule == "single" else [[size] for size in sizes]
        assert nbytes == stats["wire_bytes"] == pytest.approx(announced(settings_of(compressor, wire), groups, ranks))
        assert stats["dense_bytes"] == pytest.approx(2 * (ranks - 1) / ranks * 4 * sum(sizes))
        assert stats["compression_ratio"] == stats["dense_bytes"] / stats["wire_bytes"]
        if (compressor, model) == ("dense", "block") and wire in AS_DDP:  # except flags and padding
            assert stats["compression_ratio"] == pytest.approx(AS_DDP[wire], rel=2e-3)


@pytest.mark.sampled
@pytest.mark.parametrize("schedule", ["single", "layerwise"])
@pytest.mark.parametrize("compressor", ["topk", "omgs", "dense"])
def test_nodes_send_each_other_what_is_announced(pools, compressor, schedule):
    settings = {"compressor": compressor, "density": DENSITY[compressor], "schedule": schedule, "local_world_size": 2}
    choices = settings_of(compressor)
    for stats, _, sizes in pools[4].run(sent_by_a_step, "edges", settings):
        shares = [-(-size // 2) for size in sizes]
        groups = [shares] if schedule == "single" else [[size] for size in shares]
        assert stats["inter_node_bytes"] == announced(choices, groups, 2)


@pytest.mark.sampled
@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("compressor", FIXED)
def test_any_number_of_ranks_sends_what_is_announced(compressor, ranks):
    sizes = [1, 2, 997, 70_000]
    pipeline = load("echo").echo_pipeline(settings_of(compressor), sizes, ranks, torch.device("cpu"))
    group = [LocalGradient(str(position), torch.randn(size), True) for position, size in enumerate(sizes)]
    used = torch.ones(len(sizes), dtype=torch.uint8)
    pipeline.commit(pipeline.exchange(group, used=used))
    expected = announced(settings_of(compressor), [sizes], ranks)
    assert pipeline.recorder.current.wire_bytes == pytest.approx(expected)


@pytest.mark.parametrize(("wire", "least"), [("4bit", 7.5), ("2bit", 14.0)])
def test_few_bits_of_everything_are_as_many_times_fewer_bytes(pair, wire, least):
    settings = {"compressor": "dense", "schedule": "single", "wire": wire, "local_steps": LocalSteps(2)}
    for ratio in pair.run(ratio_of_rounds, settings):
        assert ratio >= least


NUMELS = (5, 70_000, 3)
DISJOINT = [[[0, 4], [7, 69_999], []], [[], [8, 9, 10], [2]], [[1], [], []]]


def messages(chosen):
    """Return the sizes of the messages that exchange the union of the chosen positions."""
    phases = []
    for rank, choices in enumerate(chosen):
        accumulated = [torch.randn(numel, device=DEVICE) for numel in NUMELS]
        indices = [torch.tensor(choice, dtype=torch.int64, device=DEVICE) for choice in choices]
        selections = [Selection(t[i], i, t.numel()) for t, i in zip(accumulated, indices)]
        union = UnionFormat(torch.float32, rank, len(chosen))
        phases.append(union.exchange(grouped(selections), accumulated, None))
    return [payloads[0].tensor.nbytes for payloads in run_phases(phases)[1]]


def test_bytes_are_a_count_narrow_positions_and_the_values_of_the_union():
    positions = 4 * 2 + 2 * 4  # at most four per rank, in two blocks of 65 536 elements
    values = 16  # nine elements of three tensors, three per rank, padded to 16 bytes
    assert messages(DISJOINT) == [16, positions, 3 * values, values]
    assert messages([[[], [], []]] * 3) == [16]
