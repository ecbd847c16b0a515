"""OverlapTimeline: what it writes of real steps, and what it refuses."""

import contextlib
import json
import sys
import time
from functools import partial

import pytest
import torch
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.profilers import PyTorchProfiler
from torch import nn

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.callbacks import OverlapTimeline
from lightning_sparse.callbacks.overlap_timeline import BACKWARD, WORKER, RecordedStep, clock_offset, step_slices, trace
from lightning_sparse.engine.observe import GroupMarks, Span, StepRecord
from tests.helpers.loggers import events_of
from tests.helpers.trainers import Small, run_fit

NUMELS = {"last": 30, "middle": 20, "first": 10}


def example_marks():
    """Two groups: the exchange of the first goes on during backward, the second has to wait for it."""
    marks = StepRecord()
    marks.backward_start = 10.0
    marks.ready = {"last": 11.0, "middle": 12.0, "first": 14.0}
    marks.backward_end = 14.25
    early, late = GroupMarks(("last", "middle")), GroupMarks(("first",))
    early.elements, early.counts, early.wire_bytes, early.ready = 50, 5, 40, 12.0
    early.spans = [Span("select", 12.0, 12.5), Span("encode", 12.5, 12.75), Span("exchange", 13.0, 15.0)]
    late.elements, late.counts, late.wire_bytes, late.ready = 10, 1, 8, 14.0
    late.spans = [Span("select", 15.0, 15.25), Span("exchange", 15.25, 16.0)]
    marks.groups = [early, late]
    marks.spans = [Span("commit", 16.0, 16.5)]
    marks.end = 16.5
    return marks


def test_every_stage_of_a_step_becomes_a_slice():
    slices = step_slices(example_marks(), 20.0, 120.0, NUMELS)
    assert [(each.start, -each.end) for each in slices] == sorted((each.start, -each.end) for each in slices)
    assert all(each.end >= each.start for each in slices)
    found = [(each.row, each.name, each.start - 100, each.end - 100) for each in slices]
    assert sorted(found) == sorted(
        [
            (BACKWARD, "backward", 10.0, 14.25),
            (BACKWARD, "last", 10.0, 11.0),
            (BACKWARD, "middle", 11.0, 12.0),
            (BACKWARD, "first", 12.0, 14.0),
            (BACKWARD, "waits for the exchange", 14.25, 16.5),
            (WORKER, "group 0: last and 1 more", 12.0, 15.0),
            (WORKER, "select 0", 12.0, 12.5),
            (WORKER, "encode 0", 12.5, 12.75),
            (WORKER, "exchange 0", 13.0, 15.0),
            (WORKER, "group 1: first", 15.0, 16.0),
            (WORKER, "select 1", 15.0, 15.25),
            (WORKER, "exchange 1", 15.25, 16.0),
            (WORKER, "commit", 16.0, 16.5),
        ]
    )
    exchange = next(each for each in slices if each.name == "exchange 0")
    told = {"elements": 50, "bytes": 40, "asked for": 5, "parameters": "last, middle"}
    assert exchange.details == {"waited": 0.0, **told}
    assert next(each for each in slices if each.name == "select 1").details["waited"] == 1.0
    assert next(each for each in slices if each.name == "middle").details == {"elements": 20}


def test_gradients_that_nobody_marked_and_an_unknown_start_leave_backward_whole():
    marks = example_marks()
    marks.ready = {"last": 11.0, "middle": None, "first": None}
    marks.backward_start = None
    backward = [each for each in step_slices(marks, 0.0, 0.0, NUMELS) if each.stage == "backward"]
    assert [(each.start, each.end, each.details) for each in backward] == [(11.0, 14.25, {"gradients": 3})]


def test_a_trace_holds_all_ranks_and_steps_in_the_order_of_their_times_and_slices_of_a_row_nest():
    quick = step_slices(example_marks(), 0.1, 1e6 / 3, NUMELS)
    slow = [each._replace(start=each.start + 2, end=each.end + 2) for each in quick]
    later = [each._replace(start=each.start + 500, end=each.end + 500) for each in quick]
    steps = [RecordedStep(3, [quick, slow], [0.0, 1e-4]), RecordedStep(9, [later, later], [0.0, 2e-4])]
    written = json.loads(json.dumps(trace(steps)))
    timed = [event for event in written["traceEvents"] if event["ph"] == "X"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    assert timed[0]["ts"] == 0.0
    assert all(event["dur"] >= 0 for event in timed)
    names = {event["pid"]: event["args"]["name"] for event in written["traceEvents"] if event["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}
    for row in [(rank, row) for rank in names for row in (1, 2)]:
        open_ends = []
        for event in (event for event in timed if (event["pid"], event["tid"]) == row):
            while open_ends and open_ends[-1] <= event["ts"]:
                open_ends.pop()
            end = round(event["ts"] + event["dur"], 3)
            assert not open_ends or end <= open_ends[-1], event["name"]
            open_ends.append(end)
    # The second step follows a millisecond after the first, wherever it really was.
    first_end = max(event["ts"] + event["dur"] for event in timed if event["args"]["step"] == 3)
    second_start = min(event["ts"] for event in timed if event["args"]["step"] == 9)
    assert second_start - first_end == pytest.approx(1000.0, abs=0.01)
    told = [(step["began_seconds"], step["clock_uncertainty_seconds"][1]) for step in written["metadata"]["steps"]]
    assert told == [(0.0, 1e-4), (500.0, 2e-4)]


@pytest.mark.parametrize("ahead", [0.0, 1000.0, -7.5])
def test_an_offset_is_bounded_by_what_the_collectives_allow(ahead):
    # True times: in the first collective the other rank enters late, in the second this one does.
    entries, exits = [0.0, 2.0], [1.1, 2.3]
    seconds, uncertainty = clock_offset(entries, exits, [1.0 + ahead, 1.5 + ahead], [1.3 + ahead, 2.2 + ahead])
    assert abs(seconds - ahead) <= uncertainty + 1e-9
    assert uncertainty == pytest.approx(0.15)
    assert clock_offset(entries, exits, entries, exits)[0] == 0.0


LAYERS = 5
PAUSE = 0.02


class Slow(Small):
    """Layers whose backward takes a while each, so that the exchange of one ends during that of the next."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(LAYERS)))
        for layer in self.network:
            layer.weight.register_hook(lambda gradient: time.sleep(PAUSE))


def fit_recorded(rank, path, chosen, module=Small, schedule="layerwise", **arguments):
    callbacks = [OverlapTimeline(path=path, pictures=False, **chosen)]
    run_fit(rank, SparseDDPStrategy(density=0.05, schedule=schedule), module(), callbacks=callbacks, **arguments)


def timed_events(path):
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


@pytest.mark.clock
def test_exchange_is_seen_to_overlap_backward_where_it_does(pair, tmp_path):
    path = tmp_path / "deeper" / "overlap.json"
    pair.run(fit_recorded, str(path), {"steps": [5, 9]}, Slow)
    events = timed_events(path)
    assert {(event["pid"], event["args"]["step"]) for event in events} == {(0, 5), (0, 9), (1, 5), (1, 9)}
    for rank in range(2):
        own = [event for event in events if event["pid"] == rank]
        # Whichever rank is early: the first exchange begins in the pause of the second layer.
        first, *_ = (event for event in own if event["name"] == "exchange 0")
        backward, *_ = (event for event in own if event["cat"] == "backward")
        assert first["ts"] < backward["ts"] + backward["dur"] - 0.9e6 * PAUSE
        gradients = [event for event in own if event["cat"] == "gradient" and event["args"]["step"] == 5]
        names = [f"network.{layer}.weight" for layer in reversed(range(LAYERS))]
        assert [event["name"] for event in gradients] == names
        assert all(event["args"]["elements"] == 1024 for event in gradients)
        assert all(event["dur"] > 0.9e6 * PAUSE for event in gradients[1:])
        groups = [event for event in own if event["cat"] == "group" and event["args"]["step"] == 5]
        assert [event["args"]["parameters"] for event in groups] == names
        assert all(event["args"]["bytes"] > 0 and event["args"]["asked for"] == 51 for event in groups)
        assert {event["cat"] for event in own} >= {"select", "encode", "exchange", "commit", "wait", "backward"}
    # An exchange ends on no rank before all have entered it, on the common clock as in truth.
    allowed = 1e6 * sum(json.loads(path.read_text())["metadata"]["steps"][0]["clock_uncertainty_seconds"])
    assert allowed < 1e6
    for group in range(LAYERS):
        exchanges = [event for event in events if event["name"] == f"exchange {group}" and event["args"]["step"] == 5]
        assert len(exchanges) == 2
        ends = [event["ts"] + event["dur"] for event in exchanges]
        assert max(event["ts"] for event in exchanges) <= min(ends) + allowed


@pytest.mark.exhaustive
@pytest.mark.clock
def test_one_message_after_backward_is_seen_not_to_overlap(pair, tmp_path):
    pair.run(fit_recorded, str(tmp_path / "overlap.json"), {"steps": [5]}, Slow, "single")
    events = timed_events(tmp_path / "overlap.json")
    backward_ends = {event["pid"]: event["ts"] + event["dur"] for event in events if event["cat"] == "gradient"}
    assert all(event["ts"] >= backward_ends[event["pid"]] for event in events if event["cat"] == "exchange")


def test_a_step_of_several_batches_is_one_step(pair, tmp_path):
    pair.run(
        partial(fit_recorded, path=str(tmp_path / "overlap.json"), chosen={"steps": [1, 3]}, accumulate_grad_batches=4)
    )
    events = timed_events(tmp_path / "overlap.json")
    assert [event["args"]["step"] for event in events if event["cat"] == "commit"] == [1, 1, 3, 3]
    first, second = ([event["dur"] for event in events if event["pid"] == rank] for rank in range(2))
    # Each rank shows its own, of other lengths by more than rounding.
    assert any(abs(one - other) > 1.0 for one, other in zip(first, second))


def fit_drawn(rank, directory):
    """Fit with a timeline that chooses its file, and draws."""
    logger = TensorBoardLogger(directory, name="", version="")
    strategy = SparseDDPStrategy(density=0.05, schedule="layerwise")
    run_fit(rank, strategy, Slow(), logger=logger, callbacks=[OverlapTimeline(steps=[2, 7])])


@pytest.mark.exhaustive
def test_the_picture_stands_beside_the_file_and_in_tensorboard(pair, tmp_path):
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("PIL.Image")
    pair.run(fit_drawn, str(tmp_path))
    assert timed_events(tmp_path / "overlap.json")
    with image.open(tmp_path / "overlap.png") as picture:
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 20)}
    assert {(0x9A, 0xA5, 0xB1), (0xD6, 0x45, 0x45), (0x21, 0x86, 0xEB)} <= colours  # backward, waiting, exchange
    assert [each.step for each in events_of(tmp_path).Images("sparse/overlap")] == [7]


def fit_too_short(rank):
    with pytest.warns(UserWarning, match=r"steps=\[500\]") if rank == 0 else contextlib.nullcontext():
        fit_recorded(rank, "", {"steps": [500]}, limit_train_batches=2)


def test_steps_that_never_came_are_said(pair):
    pair.run(fit_too_short)


def test_a_picture_without_matplotlib_is_refused_with_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="pictures"):
        OverlapTimeline(steps=[1])
    OverlapTimeline(steps=[1], pictures=False)


def fit_profiled(rank, directory):
    """Fit under Lightning's profiler, which looks at all threads and writes a trace."""
    config = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    profiler = PyTorchProfiler(directory, f"rank{rank}", experimental_config=config)
    arguments = {"limit_train_batches": 8, "limit_val_batches": 0}
    run_fit(rank, SparseDDPStrategy(density=0.05), profiler=profiler, **arguments)


def test_lightnings_profiler_shows_the_stages_of_an_exchange(pair, tmp_path):
    pair.run(fit_profiled, str(tmp_path))
    traces = list(tmp_path.glob("*trace.json"))
    assert traces
    for path in traces:
        events = json.loads(path.read_text())["traceEvents"]
        stages = {"sparse.select", "sparse.encode", "sparse.exchange", "sparse.commit"}
        assert {event["name"] for event in events} >= stages
