"""What a device computes for a whole group at once is what a CPU computes tensor by tensor."""

from unittest import mock

import pytest
import torch

from lightning_sparse import sparsify
from lightning_sparse.engine.memory import residual
from lightning_sparse.engine.wire import owners
from lightning_sparse.functional import elements, segments, topk
from tests.helpers.examples import load
from tests.helpers.racing import CPU, CUDA, Skipping, played

launches = load("launches")
HOST = torch.device("cpu")

# Some lie beside each other, some alone; with blocks, without, with a rest; a size twice.
SIZES = (70_000, 3, 4097, 65_536, 64, 70_000, 1, 40_001, 900, 900)
SYSTEMS = {
    "topk": launches.System("topk", 0.003, "gather"),
    "topk, a tenth": launches.System("topk", 0.1, "gather"),
    "topk, owners": launches.System("topk", 0.01, "owners"),
    "topk, bfloat16": launches.System("topk", 0.01, "gather", wire="bfloat16"),
    "topk, 2 bits": launches.System("topk", 0.01, wire="2bit"),
    "topk, clipped AdamW": launches.System("topk", 0.003, "gather", is_corrected=True, clip_norm=1.0, groups=3),
    "lags, groups": launches.System("lags", 0.003, "gather", groups=3),
    "omgs": launches.System("omgs", 0.003, "gather"),
    "dgc": launches.System("dgc", 0.003, "gather"),
    "exdyna": launches.System("exdyna", 0.003),
    "omgs, all": launches.System("omgs", 1.0, "gather"),
    "qsgd": launches.System("qsgd"),
    "dense, bfloat16": launches.System("dense", wire="bfloat16"),
    "sdagc": launches.System("sdagc", 0.003, "gather"),
    "a2sgd": launches.System("a2sgd"),
}
OF_HALVES = ("qsgd", "omgs, all")  # of gradients in bfloat16 many are equal, and either may be selected
ROUNDED = ("sdagc", "a2sgd", "topk, clipped AdamW")  # sums of a tensor's elements have no order on a device


def ended(system, ranks, device, dtype):
    """Return what some steps leave: the last means, and what is kept."""
    seen = {}

    def remember(pipeline, gradients, *_):
        make_step(pipeline, gradients, *_)
        state = {
            f"{kind} {name}": each for kind, of in pipeline.memory.state_dict().items() for name, each in of.items()
        }
        seen.update(state, **{f"mean {place}": gradient for place, gradient in gradients.items()})

    def gradients_of(sizes, *given):
        made = make_gradients(sizes, *given)
        return {place: gradient.to(dtype) for place, gradient in made.items()}

    torch.manual_seed(0)
    make_step, make_gradients = launches._make_step, launches._gradients
    with (
        mock.patch.object(launches, "_make_step", remember),
        mock.patch.object(launches, "_gradients", gradients_of),
        mock.patch.object(launches.System, "device", device),
        mock.patch.multiple(elements, _PIECE=200_000, _ALONE=69_000, _BATCH=1 << 17, _FEW_ROWS=8),
        mock.patch.multiple(segments, _MANY=1 << 12, _MANY_BLOCKS=2000, APART=65_000),
        mock.patch.object(residual, "APART", 65_000),
        mock.patch.multiple(topk, _FEW_BLOCKS=1 << 10, _SMALL=1 << 10),
        mock.patch.object(owners, "_PROPOSED", torch.float32),  # of which none are equal
    ):
        launches.launches_of_a_step(system, ranks, SIZES, small=5000)
    return {
        name: each.as_subclass(torch.Tensor).float() for name, each in seen.items() if isinstance(each, torch.Tensor)
    }


@pytest.mark.sampled(10)
@pytest.mark.parametrize("ranks", [4, 32])
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_step_on_a_device_ends_as_on_a_cpu(system, ranks):
    if system == "topk, owners" and ranks > 4:
        pytest.skip("with so many ranks some owners choose among sums that are all zero")
    dtype = torch.bfloat16 if system in OF_HALVES else torch.float32
    expected, found = (ended(SYSTEMS[system], ranks, device, dtype) for device in (HOST, launches._PRETENDED))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        if system in ROUNDED:  # sums of up to ten
            rtol = 1e-2 if name.startswith("refresh_gradient") else 1e-4  # of 16 bits
            torch.testing.assert_close(found[name], tensor, rtol=rtol, atol=4e-6, msg=name)
        else:
            assert torch.equal(found[name], tensor), name


def trained_on(device, given):
    """Train with a layer that is not always used, and a step that overflows; return parameters, and which steps did."""
    torch.manual_seed(0)
    net = Skipping()
    batches = torch.randn(12, 4, 64)
    net, batches, overflows = net.to(device), batches.to(device), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with sparsify(net, optimizer, density=0.05, warmup_epochs=0, levels=1, **given):
        for step, batch in enumerate(batches):
            (net(batch, skips=step % 3 == 1) * (float("inf") if step in (5, 7) else 1.0)).backward()
            gradients = [each.grad.cpu() for each in net.parameters() if each.grad is not None]
            overflows.append(not all(bool(gradient.isfinite().all()) for gradient in gradients))
            if not overflows[-1]:
                optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in net.parameters()], overflows


@pytest.mark.sampled
@pytest.mark.parametrize("schedule", ["layerwise", "single"])
@pytest.mark.parametrize("compressor", ["topk", "exdyna", "micro"])
def test_a_training_on_a_device_ends_as_on_a_cpu(compressor, schedule):
    given = {"compressor": compressor, "schedule": schedule}
    with played():
        (found, overflows), (expected, expected_overflows) = (trained_on(device, given) for device in (CUDA, CPU))
    assert overflows == expected_overflows
    assert [step for step, overflowed in enumerate(overflows) if overflowed] == [5, 7]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
