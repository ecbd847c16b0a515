"""The benchmarks: their arithmetic, what they refuse, and, where root may, the network they run on."""

import csv
import importlib
import os
import shutil
import subprocess
import sys
import time
from itertools import accumulate
from pathlib import Path
from unittest import mock

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "examples" / "benchmarks"


def _load(name):
    # The scripts find each other as a user's python does: in the folder of the script.
    with mock.patch.object(sys, "path", [str(BENCHMARKS), str(BENCHMARKS.parent), *sys.path]):
        return importlib.import_module(name)


MODULES = ["shape", "network", "launch", "results", "rows", "worker", "selection", "plot", "step", "training", "paced"]
shape, network, launch, results, rows, worker, selection, plot, step, training, paced = map(_load, MODULES)
models = _load("models")
BACKPROP = Path(__file__).parent / "schedule" / "resnet50_backprop.csv"
needs_network = pytest.mark.skipif(network.refusal() is not None, reason=str(network.refusal()))

RECEIVE = """
import socket, time
with socket.create_server(("0.0.0.0", 5000)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    connection.sendall(connection.recv(1))
    start, received = time.monotonic(), 0
    while data := connection.recv(1 << 20):
        received += len(data)
    print(received * 8 / (time.monotonic() - start))
"""
SEND = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000))
start = time.monotonic()
connection.sendall(b"x"), connection.recv(1)
print(time.monotonic() - start)
connection.sendall(bytes(4_000_000))
"""


@pytest.mark.parametrize("script", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_every_script_begins(script):
    _load(script.stem)


def test_rates_and_delays_are_read_or_refused_and_bursts_grow_with_fast_links_only():
    assert [shape.parse_rate(text) for text in ("1gbit", "2.5gbit", "100mbit")] == [10**9, 2_500_000_000, 10**8]
    assert [shape.parse_delay(text) for text in ("0", "100us", "0.5ms", "1s")] == [0, 100, 500, 10**6]
    assert [shape.burst_bytes(bits) >> 10 for bits in (10**7, 10**9, 10**10)] == [32, 128, 1280]
    for text in ("1", "gbit", "1gbps", "0mbit", "-1gbit", "1 gbit", "ms", "-1ms", "1min"):
        with pytest.raises(ValueError, match="rate"):
            shape.parse_rate(text)
        with pytest.raises(ValueError, match="us, ms, s"):
            shape.parse_delay(text)


def test_a_slower_network_is_written_as_it_is_read():
    assert [shape.slower_rate(rate, 8) for rate in ("1gbit", "20mbit")] == ["125mbit", "2.5mbit"]
    assert shape.slower_rate("100kbit", 16) == "0.00625mbit"
    assert [shape.slower_delay(delay, 8) for delay in ("100us", "0", "10ms")] == ["800us", "0us", "80000us"]


def test_lines_compare_within_the_run():
    seen = {
        "still": [results.Measurement([0.1, 0.1], 0.0, 0.0)],
        "ddp": [results.Measurement([0.3, 0.4], 8e6, 12e6), results.Measurement([0.5, 0.6, 9.0], 8e6, 14e6)],
        "planned": [results.Measurement([0.1], 0.0, 0.0, predicted) for predicted in (0.2, 0.4, None, 0.3)],
    }
    still, ddp, planned = results.summarise("model", seen, "ddp", "still")
    assert (ddp.median_ms, ddp.sent_mb, ddp.link_mb) == pytest.approx((500.0, 8.0, 13.0))
    assert (ddp.to_ddp, ddp.to_no_communication) == pytest.approx((1.0, 5.0))
    assert (still.to_ddp, still.to_no_communication) == pytest.approx((0.2, 1.0))
    assert planned.predicted_ms == pytest.approx(300.0)


def test_csv_has_comments_and_reads_back():
    line = results.Line("model", "ddp, accumulate 2", 10.0, 1.0, 0.5, None, 1.0, 2.0)
    comment, *table = results.as_csv([line], ["command"]).splitlines()
    (read,) = csv.DictReader(table)
    assert comment == "# command"
    assert (read["row"], float(read["median_ms"]), read["to_no_communication"]) == ("ddp, accumulate 2", 10.0, "")


def test_steps_of_two_batches_are_averaged(monkeypatch):
    ends = iter([0.0, 5.0, 6.0, 6.5, 9.0, 9.5, 11.0])
    monkeypatch.setattr(worker.time, "perf_counter", lambda: next(ends))
    monkeypatch.setattr(worker, "transmitted_bytes", iter(range(0, 700, 100)).__next__)
    watch = worker.StepWatch(warm_up=1, batches_per_step=2)
    for _ in range(7):
        watch.on_train_batch_end(None, None)
    assert watch.seconds() == [1.5, 1.0]
    assert watch.link_bytes() == 100.0
    assert watch.longest() == 2.0


@pytest.mark.parametrize("kind", selection.INPUTS)
def test_selection_is_timed(kind):
    times = selection.median_times(selection.INPUTS[kind](10_000, torch.device("cpu")), count=10, repeats=2)
    assert 0.0 < times.select < times.ours


@pytest.mark.parametrize("name", sorted({*rows.ROWS, *rows.DEFAULT_ROWS}))
def test_every_row_can_be_built(name):
    row = rows.ROWS[name]
    trainer = training.trainer_of(row, 2)
    assert trainer.accumulate_grad_batches == row.batches_per_step
    if row.hook is not None:
        row.hook[0]()


def test_bytes_follow_from_shapes():
    shapes = [(100, 10, 5), (100,), ()]
    assert rows.dense_bytes(shapes) == 4 * 5101
    assert rows.power_sgd_bytes(shapes, rank=1) == 4 * (100 + 50 + 100 + 1)
    assert rows.power_sgd_bytes(shapes, rank=20) == rows.dense_bytes(shapes)


def test_a_paced_resnet50_is_the_published_one():
    with BACKPROP.open() as published:
        elements, seconds = zip(
            *((int(row["elements"]), float(row["backward_seconds"])) for row in csv.DictReader(published))
        )
    model = paced.PACED["resnet50"]
    assert [torch.Size(shape).numel() for shape in reversed(model.shapes())] == list(elements)
    assert model.ready_seconds() == pytest.approx(list(accumulate(seconds)), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "millions", "tensors"), [("vgg16", 14.7, 41), ("lstm_ptb", 66.0, 11), ("gpt2", 124.4, 148)]
)
def test_paced_models_have_the_published_sizes(name, millions, tensors):
    shapes = paced.PACED[name].shapes()
    assert (len(shapes), round(sum(torch.Size(each).numel() for each in shapes) / 1e6, 1)) == (tensors, millions)


def test_a_paced_model_hands_each_gradient_over_when_it_is_due():
    layers = [paced.Layer((3, 2), 1.0), paced.Layer((5,), 2.0), paced.Layer((), 1.0)]
    model = paced.Paced(paced.PacedModel(0.02, 0.04, layers), slower=2.0)
    arrived = []
    for weight in model.weights:
        weight.register_post_accumulate_grad_hook(
            lambda weight: arrived.append((tuple(weight.shape), time.perf_counter()))
        )
    begin = time.perf_counter()
    outputs = model(torch.zeros(1))
    forward_seconds = time.perf_counter() - begin
    outputs.backward()
    assert forward_seconds >= 0.04
    assert [shape for shape, _ in arrived] == [(5,), (3, 2)]
    # A busy machine may be late, and never early: the first gradient waits for the layer without a parameter, too.
    assert [moment - begin >= due for (_, moment), due in zip(arrived, (0.04 + 0.06, 0.04 + 0.08))] == [True, True]
    assert all(weight.grad.abs().sum() > 0 for weight in model.weights)


def test_a_paced_module_brings_its_batches_and_updates_nothing():
    module = models.PacedModule("vgg16")
    loss = module.training_step(next(iter(module.train_dataloader())), 0)
    loss.backward()
    module.configure_optimizers().step()
    assert all(weight.grad.abs().sum() > 0 and not weight.any() for weight in module.parameters())


def test_a_free_selection_sends_what_the_density_asks_for():
    gradients = [torch.arange(10.0), torch.arange(4.0)]
    first, second = paced.FreeSelection().select(["a", "b"], gradients, [3, 1])
    assert (first.indices.tolist(), second.indices.tolist()) == ([0, 3, 6], [0])
    assert first.values.tolist() == [0.0, 3.0, 6.0]


def test_only_models_that_wait_can_be_slower(capsys):
    with pytest.raises(SystemExit):
        step.main(["--slower", "8", "--workloads", "lstm"])
    assert "--slower" in capsys.readouterr().err


def test_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    plot.draw([results.Line("model", "ddp", 10.0, 1.0, 1.0, 2.0, 1.0, 2.0)], "title", tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 1000


@pytest.mark.parametrize(("user", "missing"), [(1000, "need root"), (0, "ip and tc not found")])
def test_a_network_needs_root_and_iproute2(monkeypatch, tmp_path, user, missing):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(SystemExit, match=missing):
        step.main(["--output", str(tmp_path)])


class HereNetwork(network.ShapedNetwork):
    """Hosts that are this one: for what needs no network."""

    def start(self, host, command, environment=None, **arguments):
        self._processes.append(subprocess.Popen(command, env=environment, **arguments))
        return self._processes[-1]

    def stop(self):
        for process in self._processes:
            process.kill()
            process.wait()


@pytest.fixture
def here():
    network_here = HereNetwork(2, "1gbit", "0")
    yield network_here
    network_here.stop()


def test_progress_of_rank_0_is_shown_and_a_rank_that_fails_or_is_late_ends_the_run(here, tmp_path, capsys):
    def run(code, seconds=60.0):
        until = time.monotonic() + seconds
        launch.run_on_all_hosts(here, ["-S", "-c", f"import os, time; {code}"], tmp_path, until, show="round ")

    run("print('noise'); print('round {rank} of', os.environ['WORLD_SIZE'])")
    assert capsys.readouterr().out == "  round 0 of 2\n"
    with pytest.raises(launch.WorkerError, match=r"rank 0 ended with status 1(.|\n)*ZeroDivisionError"):
        run("1 / {rank}; time.sleep(60)")
    with pytest.raises(launch.WorkerError, match="time is up"):
        run("time.sleep(60)", 0.0)


@pytest.fixture
def name():
    """Give a name that no other test run uses; nothing of it may be left."""
    name = f"lstest{os.getpid()}"
    yield name
    assert name not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


@needs_network
def test_network_keeps_rate_and_delay(name):
    with network.ShapedNetwork(2, "100mbit", "2ms", name) as hosts:
        receiver = hosts.start(1, [sys.executable, "-S", "-c", RECEIVE], stdout=subprocess.PIPE, text=True)
        assert receiver.stdout.readline() == "listening\n"
        command = [sys.executable, "-S", "-c", SEND, hosts.address(1)]
        round_trip = float(hosts.start(0, command, stdout=subprocess.PIPE).communicate(timeout=20)[0])
        bits_per_second = float(receiver.communicate(timeout=20)[0])
    assert 1e7 < bits_per_second < 1.1e8
    assert "WITHOUT" in hosts.description or round_trip >= 4e-3


@needs_network
def test_a_network_removes_leftovers_excludes_others_of_its_name_and_ends_with_an_exception(name):
    subprocess.run(["ip", "netns", "add", f"{name}-host7"], check=True)
    left = subprocess.Popen(["ip", "netns", "exec", f"{name}-host7", "sleep", "60"])
    first, second = (network.ShapedNetwork(1, "100mbit", "0", name) for _ in range(2))
    processes = []

    def fail_inside():
        with first as hosts:
            processes.append(hosts.start(0, ["sleep", "60"]))
            assert left.wait(timeout=10) != 0
            with pytest.raises(network.NetworkRefusedError, match="wait until it ends"):
                second.__enter__()
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert processes[0].poll() is not None
