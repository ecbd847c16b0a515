"""Random inputs for pure functions, wire formats and the reader of saved files.

Inputs repeat in every run. ``LIGHTNING_SPARSE_FAULTS=1`` runs other and more inputs.
"""

import math
import os
import pickle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from lightning_sparse.compressors.selection import Selection, SelectionSize, grouped
from lightning_sparse.compressors.topk import batched_top_k_indices, indices_reaching, top_k_indices
from lightning_sparse.engine.wire import WIRES, build_wires
from lightning_sparse.functional.codes import BLOCK, dequantize, quantize, quantized_nbytes
from lightning_sparse.functional.elements import round_to
from lightning_sparse.loop.state import VERSION, CheckpointError, _read
from tests.helpers.lockstep import run_phases

IS_LONG = bool(os.environ.get("LIGHTNING_SPARSE_FAULTS"))


def examples(count):
    return settings(
        max_examples=10 * count if IS_LONG else count,
        derandomize=not IS_LONG,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


# Integers, denormals of fp32 and fp16, values beyond fp16, and limits of fp32.
TRICKY = [0.0, -0.0, 1.0, -1.0, 0.5, 65504.0, 65520.0, -1e6, 3.4028234663852886e38, -3e38, 1.1754944e-38]
TRICKY += [1e-45, -1e-42, 6e-8]
finite = some.sampled_from(TRICKY) | some.floats(-(2.0**100), 2.0**100, width=32)
anything = finite | some.sampled_from([math.inf, -math.inf, math.nan])
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def tensors(numbers, longest=300, dtypes=DTYPES):
    """Draw flat tensors of single numbers, or of a few repeated numbers with many ties."""
    short = some.lists(numbers, min_size=1, max_size=40)
    repeated = some.builds(
        lambda few, times: (few * times)[:longest],
        some.lists(numbers, min_size=1, max_size=4),
        some.integers(1, longest),
    )
    return some.builds(
        lambda values, dtype: torch.tensor(values, dtype=torch.float64).to(dtype),
        short | repeated,
        some.sampled_from(dtypes),
    )


def large(tensor, numel):
    repeated = tensor.repeat(-(-numel // tensor.numel()))[:numel].clone()
    repeated[:: max(1, numel // 7)] *= 1.5
    return repeated


@examples(150)
@given(
    tensors(anything), some.just(0.003) | some.floats(0.001, 1.0), some.sampled_from([0, 0, 0, 33_000, 70_001, 300_001])
)
def test_top_k_is_that_of_a_full_sort(tensor, density, numel):
    tensor = large(tensor, numel) if numel else tensor
    count = max(1, round(density * tensor.numel()))
    indices = top_k_indices(tensor, count)
    assert indices.dtype == torch.int64
    assert indices.shape == (count,)
    assert (indices.diff() > 0).all()
    assert 0 <= indices[0] <= indices[-1] < tensor.numel()

    def key(magnitudes):
        return magnitudes.double().abs().nan_to_num(nan=math.inf).sort(descending=True).values

    # NaN is larger than any number. Infinities and NaN are equal here, so the count of each is undetermined.
    assert torch.equal(key(tensor[indices]), key(tensor)[:count])
    assert torch.equal(tensor[indices].isnan().sum(), min(tensor.isnan().sum(), torch.tensor(count)))
    assert torch.equal(batched_top_k_indices([tensor, tensor], count), torch.stack([indices, indices]))


@examples(80)
@given(tensors(anything), some.sampled_from([0.0, 1e-45, 0.5, 1.0, 1e6, math.inf]))
def test_indices_reaching_are_those_not_below(tensor, threshold):
    threshold = float(torch.tensor(threshold, dtype=tensor.dtype))
    expected = [place for place, value in enumerate(tensor.tolist()) if not abs(value) < threshold]
    found = indices_reaching(tensor, threshold)
    assert found.tolist() == expected


@examples(120)
@given(tensors(anything, dtypes=[torch.float32]), some.just(4))
def test_quantized_blocks_are_read_to_half_a_level(values, bits):
    values = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK))[None]
    written = quantize(values, bits)
    assert written.shape == (1, quantized_nbytes(values.numel(), bits))
    for block, read in zip(values[0].split(BLOCK), dequantize(written, bits)[0].split(BLOCK)):
        assert read.isfinite().all() == block.isfinite().all()
        if block.isfinite().all():
            largest = block.double().abs().max()  # the scale has a bfloat16 rounding error
            assert ((read.double() - block).abs() <= largest * (0.51 / (2 ** (bits - 1) - 1) + 2**-7) + 1e-39).all()


@examples(100)
@given(tensors(anything), some.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_rounding_makes_nothing_finite_infinite(values, dtype):
    rounded = round_to(values, dtype)
    assert rounded.dtype == dtype
    assert torch.equal(rounded.isfinite(), values.isfinite())
    assert torch.equal(rounded.isnan(), values.isnan())
    is_inside = values.isfinite() & (values.double().abs() < torch.finfo(dtype).max)
    assert torch.equal(rounded[is_inside], values[is_inside].to(dtype))


def wires_of(form, name, ranks):
    wire = WIRES[name]
    return [build_wires(form, None, wire.dtype, rank, ranks, bits=wire.bits).sparse for rank in range(ranks)]


def exchanged(wires, given_in):
    phases = [wire.exchange(grouped(selections), *rest) for wire, (selections, *rest) in zip(wires, given_in)]
    arrivals, handed_in = run_phases(phases)
    return arrivals, [payloads[0].tensor.nbytes for payloads in handed_in]


def dense(selection):
    out = torch.zeros(selection.numel, dtype=torch.float64)
    if selection.indices is None:
        return out + selection.values.double().reshape(-1)[: selection.numel]
    for values, indices in zip(selection.values.reshape(-1, 1), selection.indices.reshape(-1)):
        out[indices] += values[0].double()
    return out


def groups(numbers):
    return some.tuples(some.integers(1, 4), some.lists(some.integers(1, 10), min_size=1, max_size=3)).flatmap(
        lambda shape: some.lists(
            some.tuples(*(some.lists(numbers, min_size=numel, max_size=numel) for numel in shape[1])),
            min_size=shape[0],
            max_size=shape[0],
        )
    )


def selections_of(form, accumulated, chance):
    found = []
    for tensor in accumulated:
        if form == "reduce":
            found.append(Selection(tensor, None, tensor.numel()))
            continue
        count = chance.randint(0, tensor.numel()) if form == "union" else max(1, tensor.numel() // 3)
        indices = torch.tensor(sorted(chance.sample(range(tensor.numel()), count)), dtype=torch.int64)
        found.append(Selection(tensor[indices], indices, tensor.numel()))
    return found


@examples(150)
@given(
    some.sampled_from(["gather", "reduce", "union"]),
    some.sampled_from(sorted(WIRES)),
    groups(finite),
    some.booleans(),
    some.randoms(use_true_random=False),
)
def test_what_travels_and_what_stays_is_all_there_was(form, wire, numbers, is_tracked, chance):
    ranks = len(numbers)
    accumulated = [[torch.tensor(values, dtype=torch.float32) for values in each] for each in numbers]
    numels = [tensor.numel() for tensor in accumulated[0]]
    selections = [selections_of(form, each, chance) for each in accumulated]
    used = [torch.tensor([chance.random() < 0.5 for _ in numels], dtype=torch.uint8) for _ in range(ranks)]
    wires = wires_of(form, wire, ranks)
    handed_in = list(zip(selections, accumulated, used if is_tracked else [None] * ranks))
    arrivals, nbytes = exchanged(wires, handed_in)
    for place, numel in enumerate(numels):
        mean = dense(arrivals[0].means[place])
        for arrival in arrivals:
            assert torch.equal(dense(arrival.means[place]), mean)
        kept = torch.zeros(numel, dtype=torch.float64)
        for rank, arrival in enumerate(arrivals):
            left, sent = arrival.kept[place], torch.zeros(numel, dtype=torch.bool)
            sent[... if left.indices is None else left.indices] = True
            kept += torch.where(sent, dense(left), accumulated[rank][place].double()) / ranks
        owed = sum(each[place].double() for each in accumulated) / ranks
        scale = max(float(each[place].double().abs().max()) for each in accumulated)
        torch.testing.assert_close(mean + kept, owed, rtol=0, atol=4e-7 * scale + 1e-44 * ranks * 4)
    assert all(arrival.finite for arrival in arrivals)
    if is_tracked:
        expected = torch.stack(used).bool().any(dim=0)
        assert all(torch.equal(arrival.used, expected) for arrival in arrivals)
    elif form != "union":
        sizes = [SelectionSize(each.numel, each.values.numel()) for each in selections[0]]
        assert [transfer.nbytes for transfer in wires[0].transfers(sizes)] == nbytes


@examples(80)
@given(some.sampled_from(["gather", "reduce", "union"]), some.sampled_from(sorted(WIRES)), groups(anything))
def test_every_rank_hears_of_what_is_not_finite(form, wire, numbers):
    ranks = len(numbers)
    accumulated = [[torch.tensor(values, dtype=torch.float32) for values in each] for each in numbers]
    every = [
        [Selection(t, None if form == "reduce" else torch.arange(t.numel()), t.numel()) for t in each]
        for each in accumulated
    ]
    wires = wires_of(form, wire, ranks)
    arrivals, _ = exchanged(wires, [(each, own, None) for each, own in zip(every, accumulated)])
    is_finite = all(tensor.isfinite().all() for each in accumulated for tensor in each)
    assert [bool(arrival.finite) for arrival in arrivals] == [is_finite] * ranks


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_pickle_that_asks_for_more_is_not_obeyed(tmp_path):
    path, evil = tmp_path / "evil.pt", Evil(str(tmp_path / "executed"))
    for write in (
        lambda: torch.save({"header": {"version": VERSION}, "memory": evil}, path),
        lambda: path.write_bytes(pickle.dumps(evil)),
    ):
        write()
        with pytest.raises(CheckpointError, match="resume_compression=False"):
            _read(str(path))
    assert not (tmp_path / "executed").exists()
