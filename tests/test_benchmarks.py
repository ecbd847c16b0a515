import csv
import fcntl
import os
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from tests.helpers.examples import BENCHMARKS, load

network, paced = map(load, ["network", "paced"])
BACKPROP = Path(__file__).parent / "schedule" / "resnet50_backprop.csv"
needs_network = pytest.mark.skipif(network.refusal() is not None, reason=str(network.refusal()))


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
    root = str(BENCHMARKS.parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
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
