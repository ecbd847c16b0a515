"""From marks to slices, and from slices to a trace."""

import json

import pytest

from lightning_sparse.callbacks.overlap_timeline import (
    BACKWARD,
    QUEUE,
    WORKER,
    RecordedStep,
    Slice,
    clock_offset,
    draw_step,
    hidden_seconds,
    stage_seconds,
    step_slices,
    trace,
)
from lightning_sparse.engine.observe import GroupMarks, Span, StepMarks

NUMELS = {"last": 30, "middle": 20, "first": 10}


def example_marks() -> StepMarks:
    """Two groups: the exchange of the first goes on during backward, the second has to wait for it."""
    marks = StepMarks()
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


def test_every_stage_of_a_step_becomes_a_slice() -> None:
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
            (QUEUE, "group 1 waits", 14.0, 15.0),
            (WORKER, "group 1: first", 15.0, 16.0),
            (WORKER, "select 1", 15.0, 15.25),
            (WORKER, "exchange 1", 15.25, 16.0),
            (WORKER, "commit", 16.0, 16.5),
        ]
    )
    exchange = next(each for each in slices if each.name == "exchange 0")
    assert exchange.details == {"elements": 50, "bytes": 40, "asked for": 5, "parameters": "last, middle"}
    assert next(each for each in slices if each.name == "middle").details == {"elements": 20}
    assert hidden_seconds(slices) == 1.25
    assert stage_seconds(slices, "exchange") == 2.75


def test_gradients_that_nobody_marked_and_an_unknown_start_leave_backward_whole() -> None:
    marks = example_marks()
    marks.ready = {"last": 11.0, "middle": None, "first": None}
    marks.backward_start = None
    backward = [each for each in step_slices(marks, 0.0, 0.0, NUMELS) if each.stage == "backward"]
    assert [(each.start, each.end, each.details) for each in backward] == [(11.0, 14.25, {"gradients": 3})]


def test_a_trace_holds_all_ranks_and_steps_in_the_order_of_their_times() -> None:
    slow = [
        each._replace(start=each.start + 2, end=each.end + 3) for each in step_slices(example_marks(), 0, 0, NUMELS)
    ]
    quick = step_slices(example_marks(), 0, 0, NUMELS)
    later = [each._replace(start=each.start + 500, end=each.end + 500) for each in quick]
    steps = [RecordedStep(3, [quick, slow], [0.0, 1e-4]), RecordedStep(9, [later, later], [0.0, 2e-4])]
    written = json.loads(json.dumps(trace(steps)))
    timed = [event for event in written["traceEvents"] if event["ph"] != "M"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    assert timed[0]["ts"] == 0.0
    assert all(event["dur"] >= 0 for event in timed if event["ph"] == "X")
    assert {event["pid"] for event in timed} == {0, 1}
    names = {event["args"]["name"] for event in written["traceEvents"] if event["name"] == "process_name"}
    assert names == {"rank 0", "rank 1"}
    # The second step follows a millisecond after the first, wherever it really was.
    first_end = max(event["ts"] + event.get("dur", 0) for event in timed if event["args"].get("step") == 3)
    second_start = min(event["ts"] for event in timed if event["args"].get("step") == 9)
    assert second_start - first_end == pytest.approx(1000.0)
    assert [step["began_seconds"] for step in written["metadata"]["steps"]] == [0.0, 500.0]
    assert [step["clock_uncertainty_seconds"][1] for step in written["metadata"]["steps"]] == [1e-4, 2e-4]


def test_slices_of_a_row_nest_and_asynchronous_ones_come_in_pairs() -> None:
    events = trace([RecordedStep(0, [step_slices(example_marks(), 0.1, 1e6 / 3, NUMELS)], [0.0])])["traceEvents"]
    for row in (1, 2):
        open_ends: list[float] = []
        for event in (event for event in events if event["ph"] == "X" and event["tid"] == row):
            while open_ends and open_ends[-1] <= event["ts"]:
                open_ends.pop()
            end = round(event["ts"] + event["dur"], 3)
            assert not open_ends or end <= open_ends[-1], event["name"]
            open_ends.append(end)
    begun = [event["id"] for event in events if event["ph"] == "b"]
    assert begun
    assert begun == [event["id"] for event in events if event["ph"] == "e"]


@pytest.mark.parametrize("ahead", [0.0, 1000.0, -7.5])
def test_an_offset_is_bounded_by_what_the_collectives_allow(ahead: float) -> None:
    # True times: in the first collective the other rank enters late, in the second this one does.
    entries, exits = [0.0, 2.0], [1.1, 2.3]
    seconds, uncertainty = clock_offset(entries, exits, [1.0 + ahead, 1.5 + ahead], [1.3 + ahead, 2.2 + ahead])
    assert abs(seconds - ahead) <= uncertainty + 1e-9
    assert uncertainty == pytest.approx(0.15)
    assert clock_offset(entries, exits, entries, exits)[0] == 0.0


def test_a_picture_tells_what_its_colours_are() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    draw_step(figure, RecordedStep(3, [[Slice(BACKWARD, "gradient", "weight", 0.0, 0.1, {})]], [0.0]))
    assert "exposed: optimizer waits" in {text.get_text() for text in figure.legends[0].get_texts()}
