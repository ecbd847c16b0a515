import csv
import fcntl
import os
import re
import subprocess
import sys
import time
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from tests.helpers.examples import BENCHMARKS, load

network, paced = map(load, ["network", "paced"])
ROOT = BENCHMARKS.parents[1]
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
    load(script.stem)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "words",
    [
        "selection.py --elements 1000 --densities 0.1 --repeats 1",
        "ranks.py",
        "memory.py --large 2 --rows ddp",
        "checkpoint.py --elements 1 --repeats 1",
        "quality.py --systems ddp --steps 2 --seeds 1 --ranks 2",
        pytest.param("time_to_quality.py --task gpt --ways ddp --steps 2 --stop-after 1", marks=needs_network),
        pytest.param(
            "step.py --workloads deep_narrow --hosts 2 --rounds 1 --steps 1 --warm-up 0 --rows ddp", marks=needs_network
        ),
    ],
    ids=lambda words: words.partition(".")[0],
)
def test_every_script_runs_in_its_smallest_form(tmp_path, words):
    script, *options = words.split()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(BENCHMARKS / script), *options]
    # Scripts use the same network names, and another worker may run one at the same time.
    with (tmp_path.parent.parent / "network.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout


def test_a_paced_resnet50_is_the_published_one():
    with BACKPROP.open() as published:
        elements, seconds = zip(
            *((int(row["elements"]), float(row["backward_seconds"])) for row in csv.DictReader(published))
        )
    model = paced.PACED["resnet50"]
    assert [torch.Size(shape).numel() for shape in reversed(model.shapes())] == list(elements)
    assert model.ready_seconds() == pytest.approx(list(accumulate(seconds)), rel=1e-6)


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
    # A busy machine may be late, but never early. The first gradient also waits for the layer without parameters.
    assert [moment - begin >= due for (_, moment), due in zip(arrived, (0.04 + 0.06, 0.04 + 0.08))] == [True, True]
    assert all(weight.grad.abs().sum() > 0 for weight in model.weights)


@needs_network
def test_network_keeps_rate_and_delay_and_leaves_nothing_behind():
    with network.ShapedNetwork(2, "100mbit", "2ms", f"lstest{os.getpid()}") as hosts:
        receiver = hosts.start(1, [sys.executable, "-S", "-c", RECEIVE], stdout=subprocess.PIPE, text=True)
        assert receiver.stdout.readline() == "listening\n"
        command = [sys.executable, "-S", "-c", SEND, hosts.address(1)]
        round_trip = float(hosts.start(0, command, stdout=subprocess.PIPE).communicate(timeout=20)[0])
        bits_per_second = float(receiver.communicate(timeout=20)[0])
    assert 1e7 < bits_per_second < 1.1e8
    assert "WITHOUT" in hosts.description or round_trip >= 4e-3
    assert f"lstest{os.getpid()}" not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


@needs_network
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_the_page_on_two_machines_does_what_it_says(tmp_path):
    page = (ROOT / "docs" / "two-machines.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    commands = [code for language, code in blocks if language == "bash"]
    (script,), (seen,) = ([code for language, code in blocks if language == wanted] for wanted in ("python", ""))
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": paths, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    with network.ShapedNetwork(hosts=2, rate="1gbit", delay="0", name="lspage") as hosts:
        processes = []
        for host, command in enumerate(commands):
            (tmp_path / str(host)).mkdir()
            (tmp_path / str(host) / "train.py").write_text(script)
            piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            words = ["bash", "-ec", command]
            processes.append(hosts.start(host, words, environment, cwd=tmp_path / str(host), **piped))
        first, second = (process.communicate(timeout=300)[0] for process in processes)
    assert [process.returncode for process in processes] == [0, 0], first + second
    positions = [first.find(line) for line in seen.splitlines()]
    assert -1 not in positions, first
    assert positions == sorted(positions)
    assert "GLOBAL_RANK: 1, MEMBER: 2/2" in second
