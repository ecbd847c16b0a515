import contextlib
import json
import time
from functools import partial

import pytest
import torch
from pytorch_lightning.profilers import PyTorchProfiler
from torch import nn
from torch.autograd import profiler

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.callbacks import OverlapTimeline
from tests.helpers.trainers import Failing, Small, run_fit

STAGES = {f"sparse.{stage}" for stage in ("backward", "exposed", "select", "encode", "exchange", "commit")}
LAYERS = 5
PAUSE = 0.02


class Slow(Small):
    """A slow backward per layer, so that an exchange ends during the next layer's backward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(LAYERS)))
        for layer in self.network:
            layer.weight.register_hook(lambda gradient: time.sleep(PAUSE))


def fit_recorded(rank, path, steps, module=Small, schedule="layerwise", **arguments):
    callbacks = [OverlapTimeline(steps, path=path)]
    run_fit(rank, SparseDDPStrategy(density=0.05, schedule=schedule), module(), callbacks=callbacks, **arguments)


def spans(path):
    found = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["name"] in STAGES:
            found.setdefault(event["name"], []).append((event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6))
    return {name: sorted(times) for name, times in found.items()}


@pytest.mark.clock
@pytest.mark.parametrize("schedule", ["layerwise", "single"])
def test_exchange_is_seen_to_overlap_backward_where_it_does(pair, tmp_path, schedule):
    path = tmp_path / "deeper" / "overlap.json"
    pair.run(fit_recorded, str(path), [5], Slow, schedule)
    seen = spans(path)
    assert set(seen) == STAGES
    assert len(seen["sparse.exchange"]) == (LAYERS if schedule == "layerwise" else 1)
    ((begin, end),), ((waits, goes_on),) = seen["sparse.backward"], seen["sparse.exposed"]
    assert begin < waits < goes_on <= end
    assert waits - begin > 0.9 * LAYERS * PAUSE
    # By layer, the first exchange starts in the second layer's pause, and the last exchange and the commit at the end.
    assert (seen["sparse.exchange"][0][0] < waits - 0.9 * PAUSE) == (schedule == "layerwise")
    assert min(seen["sparse.exchange"][-1][0], seen["sparse.commit"][0][0]) > waits - 0.5 * PAUSE


def test_a_step_of_several_batches_is_one_step(pair, tmp_path):
    pair.run(partial(fit_recorded, accumulate_grad_batches=4), str(tmp_path / "overlap.json"), [1, 3])
    seen = spans(tmp_path / "overlap.json")
    assert [len(seen[name]) for name in ("sparse.backward", "sparse.exposed", "sparse.commit")] == [4, 1, 1]


def fit_unrecorded(rank, directory, steps, profiled):
    arguments = {"profiler": PyTorchProfiler(directory)} if profiled else {}
    with pytest.warns(UserWarning, match="recorded nothing") if rank == 0 else contextlib.nullcontext():
        fit_recorded(rank, f"{directory}/overlap.json", steps, limit_train_batches=8, limit_val_batches=0, **arguments)


@pytest.mark.parametrize(("steps", "profiled"), [([500], False), ([1], True)])
def test_that_nothing_was_recorded_is_said(pair, tmp_path, steps, profiled):
    pair.run(fit_unrecorded, str(tmp_path), steps, profiled)
    assert not (tmp_path / "overlap.json").exists()


def fit_failing(rank, path):
    with pytest.raises(ZeroDivisionError, match="of the user's"):
        fit_recorded(rank, path, [3], Failing)
    return profiler._is_profiler_enabled


def test_an_error_ends_the_profile(pair, tmp_path):
    assert pair.run(fit_failing, str(tmp_path / "overlap.json")) == [False, False]


def fit_profiled(rank, directory):
    config = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    own = PyTorchProfiler(directory, f"rank{rank}", experimental_config=config)
    arguments = {"limit_train_batches": 8, "limit_val_batches": 0}
    run_fit(rank, SparseDDPStrategy(density=0.05), profiler=own, **arguments)


def test_lightnings_profiler_shows_the_stages_of_an_exchange(pair, tmp_path):
    pair.run(fit_profiled, str(tmp_path))
    traces = list(tmp_path.glob("*trace.json"))
    assert traces
    for path in traces:
        assert set(spans(path)) >= STAGES - {"sparse.backward"}
