"""OverlapTimeline: what it writes of real steps, and what it refuses."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.profilers import PyTorchProfiler
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.callbacks import OverlapTimeline
from lightning_sparse.testing.pool import Pool
from tests.helpers.trainers import Small, make_trainer, run_fit, weights

LAYERS = 5
PAUSE = 0.02


class Slow(Small):
    """Layers whose backward takes a while each, so that the exchange of one ends during that of the next."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(LAYERS)))
        for layer in self.network:
            layer.weight.register_hook(lambda gradient: time.sleep(PAUSE))


def fit_recorded(
    rank: int, path: str, arguments: dict[str, Any], module: Any = Slow, schedule: str = "layerwise"
) -> dict[str, Tensor]:
    """Fit with a timeline."""
    timeline = OverlapTimeline(path=path, pictures=False, **arguments)
    strategy = SparseDDPStrategy(density=0.05, schedule=schedule)
    return weights(run_fit(rank, strategy, module(), callbacks=[timeline]).lightning_module)


def timed_events(path: Path) -> list[dict[str, Any]]:
    """Read what was written."""
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] != "M"]


def seconds_shared(events: list[dict[str, Any]], one: str, other: str) -> float:
    """Return how long two kinds of slices of the same rank and step went on together, each pair counted."""
    slices = [event for event in events if event["ph"] == "X"]
    return (
        sum(
            max(0.0, min(first["ts"] + first["dur"], second["ts"] + second["dur"]) - max(first["ts"], second["ts"]))
            for first in slices
            for second in slices
            if (first["cat"], second["cat"], first["pid"]) == (one, other, second["pid"])
        )
        / 1e6
    )


@pytest.mark.clock
def test_exchange_is_seen_to_overlap_backward_where_it_does(pair: Pool, tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "overlap.json"
    pair.run(fit_recorded, str(path), {"steps": [5, 9]})
    events = timed_events(path)
    assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
    assert {(event["pid"], event["args"]["step"]) for event in events if event["ph"] != "e"} == {
        (rank, step) for rank in range(2) for step in (5, 9)
    }
    for rank in range(2):
        own = [event for event in events if event["pid"] == rank]
        # Whichever rank is early: the first exchange begins in the pause of the second layer.
        assert seconds_shared(own, "exchange", "backward") > 0
        first, *_ = (event for event in own if event["name"] == "exchange 0")
        backward, *_ = (event for event in own if event["cat"] == "backward")
        assert first["ts"] < backward["ts"] + backward["dur"] - 0.9e6 * PAUSE
        gradients = [event for event in own if event["cat"] == "gradient" and event["args"]["step"] == 5]
        assert [event["name"] for event in gradients] == [
            f"network.{layer}.weight" for layer in reversed(range(LAYERS))
        ]
        assert all(event["args"]["elements"] == 1024 for event in gradients)
        assert all(event["dur"] > 0.9e6 * PAUSE for event in gradients[1:])
        groups = [event for event in own if event["cat"] == "group" and event["args"]["step"] == 5]
        assert [event["args"]["parameters"] for event in groups] == [event["name"] for event in gradients]
        assert all(event["args"]["bytes"] > 0 and event["args"]["asked for"] == 51 for event in groups)
        assert {event["cat"] for event in own} >= {"select", "encode", "exchange", "commit", "wait", "backward"}


@pytest.mark.clock
def test_one_message_after_backward_is_seen_not_to_overlap(pair: Pool, tmp_path: Path) -> None:
    pair.run(fit_recorded, str(tmp_path / "overlap.json"), {"steps": [5]}, Slow, "single")
    events = timed_events(tmp_path / "overlap.json")
    backward_ends = {event["pid"]: event["ts"] + event["dur"] for event in events if event["cat"] == "gradient"}
    assert all(event["ts"] >= backward_ends[event["pid"]] for event in events if event["cat"] == "exchange")


@pytest.mark.clock
def test_clocks_of_ranks_are_put_on_one(pair: Pool, tmp_path: Path) -> None:
    """An exchange ends on no rank before all have entered it, on the common clock as in truth."""
    pair.run(fit_recorded, str(tmp_path / "overlap.json"), {"steps": [5]})
    written = json.loads((tmp_path / "overlap.json").read_text())
    allowed = 1e6 * sum(written["metadata"]["steps"][0]["clock_uncertainty_seconds"])
    assert allowed < 1e6
    exchanges = [event for event in written["traceEvents"] if event.get("cat") == "exchange"]
    for group in range(LAYERS):
        alike = [event for event in exchanges if event["name"] == f"exchange {group}"]
        assert len(alike) == 2
        assert max(event["ts"] for event in alike) <= min(event["ts"] + event["dur"] for event in alike) + allowed


def test_an_interval_and_a_maximum_choose_the_steps(pair: Pool, tmp_path: Path) -> None:
    pair.run(fit_recorded, str(tmp_path / "overlap.json"), {"every_n_steps": 4, "max_steps": 2}, Small)
    assert {event["args"]["step"] for event in timed_events(tmp_path / "overlap.json") if event["ph"] != "e"} == {4, 8}


def fit_accumulating(rank: int, path: str) -> None:
    """Fit with steps of four batches each."""
    timeline = OverlapTimeline(steps=[1, 3], path=path, pictures=False)
    strategy = SparseDDPStrategy(density=0.05, schedule="layerwise")
    run_fit(rank, strategy, callbacks=[timeline], accumulate_grad_batches=4)


def test_a_step_of_several_batches_is_one_step(pair: Pool, tmp_path: Path) -> None:
    pair.run(fit_accumulating, str(tmp_path / "overlap.json"))
    events = timed_events(tmp_path / "overlap.json")
    assert [event["args"]["step"] for event in events if event["cat"] == "commit"] == [1, 1, 3, 3]


def fit_drawn(rank: int, directory: str) -> None:
    """Fit with a timeline that chooses its file, and draws."""
    logger = TensorBoardLogger(directory, name="", version="")
    strategy = SparseDDPStrategy(density=0.05, schedule="layerwise")
    run_fit(rank, strategy, Slow(), logger=logger, callbacks=[OverlapTimeline(steps=[2, 7])])


def test_the_picture_stands_beside_the_file_and_in_tensorboard(pair: Pool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("PIL.Image")
    pair.run(fit_drawn, str(tmp_path))
    assert timed_events(tmp_path / "overlap.json")
    with image.open(tmp_path / "overlap.png") as picture:
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 20)}
    assert {(0x9A, 0xA5, 0xB1), (0xD6, 0x45, 0x45), (0x21, 0x86, 0xEB)} <= colours  # backward, waiting, exchange
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [each.step for each in events.Images("sparse/overlap")] == [7]


def test_recording_changes_no_bit(pair: Pool, tmp_path: Path) -> None:
    recorded = pair.run(fit_recorded, str(tmp_path / "overlap.json"), {"every_n_steps": 1, "max_steps": 20}, Small)
    plain = pair.run(fit_plain, "layerwise")
    for with_timeline, without in zip(recorded, plain):
        assert all(torch.equal(with_timeline[name], without[name]) for name in without)


def fit_plain(rank: int, schedule: str) -> dict[str, Tensor]:
    """Fit without a callback."""
    return weights(run_fit(rank, SparseDDPStrategy(density=0.05, schedule=schedule)).lightning_module)


def fit_too_short(rank: int) -> str:
    """Fit, and end before the step that was to be recorded; return the warning."""
    timeline = OverlapTimeline(steps=[500], pictures=False)
    trainer = make_trainer(rank, SparseDDPStrategy(density=0.05), callbacks=[timeline])
    if rank > 0:
        trainer.fit(Small())
        return ""
    with pytest.warns(UserWarning, match=r"recorded nothing") as caught:
        trainer.fit(Small())
    return next(str(each.message) for each in caught if "nothing" in str(each.message))


def test_steps_that_never_came_are_said(pair: Pool) -> None:
    warning, _ = pair.run(fit_too_short)
    assert "steps=[500]" in warning
    assert "before step 16" in warning


@pytest.mark.parametrize(
    ("argument", "values"),
    [("steps", ([], [3, 3], [-1], [1.5], "12", 7)), ("every_n_steps", (-5, 0)), ("max_steps", (0, True))],
)
def test_bad_steps_are_refused(argument: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=argument):
            OverlapTimeline(**{argument: value})
    with pytest.raises(ValueError, match="steps"):
        OverlapTimeline(steps=[1], every_n_steps=5)


def test_a_picture_without_matplotlib_is_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="pictures"):
        OverlapTimeline(steps=[1])
    OverlapTimeline(steps=[1], pictures=False)


def refused(rank: int) -> None:
    """Ask for a timeline of rounds of local steps."""
    with pytest.raises(ValueError, match="local_steps"):
        run_fit(rank, SparseDDPStrategy("dense", local_steps=4), callbacks=[OverlapTimeline(pictures=False)])


def test_rounds_of_local_steps_are_refused(pair: Pool) -> None:
    pair.run(refused)


def fit_profiled(rank: int, directory: str) -> None:
    """Fit under Lightning's profiler, which looks at all threads and writes a trace."""
    config = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    profiler = PyTorchProfiler(directory, f"rank{rank}", experimental_config=config)
    arguments = {"limit_train_batches": 8, "limit_val_batches": 0}
    run_fit(rank, SparseDDPStrategy(density=0.05), profiler=profiler, **arguments)


def test_lightnings_profiler_shows_the_stages_of_an_exchange(pair: Pool, tmp_path: Path) -> None:
    pair.run(fit_profiled, str(tmp_path), timeout=60)
    traces = list(tmp_path.glob("*trace.json"))
    assert traces
    for path in traces:
        events = json.loads(path.read_text())["traceEvents"]
        stages = {"sparse.select", "sparse.encode", "sparse.exchange", "sparse.commit"}
        assert {event["name"] for event in events} >= stages
