"""Two hosts as network namespaces (root): the page on two machines, and a cut link.

The link is cut during training, for a second or permanently. Only in ``make faults``.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples" / "benchmarks"))
from network import ShapedNetwork, refusal  # noqa: E402

REFUSAL = refusal()
pytestmark = [pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL)), pytest.mark.timeout(600)]
only_long = pytest.mark.skipif(not os.environ.get("LIGHTNING_SPARSE_FAULTS"), reason="runs in `make faults`")

JOB = """
import json, os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from lightning_sparse.engine.store import ExchangeError
from lightning_sparse.engine import Engine
from lightning_sparse.engine.settings import Settings
from tests.helpers.sparse_ddp import Edges, batch, sgd_steps
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
torch.manual_seed(0)
model = Edges()
ddp = DistributedDataParallel(model)
engine = Engine(ddp, Settings.of("exdyna", 0.05, schedule="layerwise", warmup_steps=0), timedelta(seconds=8))
losses = (ddp(batch(rank, step)) for step in range(400))
print("ready", flush=True)
try:
    for _ in sgd_steps(ddp, engine, losses, lr=0.01):
        time.sleep(0.01)
except ExchangeError as error:
    print(json.dumps({"error": str(error)}), flush=True)
    os._exit(3)
print(json.dumps({"sum": [parameter.sum().item() for parameter in ddp.parameters()]}), flush=True)
os._exit(0)
"""


def run_job(folder, cut_seconds):
    (folder / "job.py").write_text(JOB)
    with ShapedNetwork(hosts=2, rate="1gbit", delay="0", name="lsfaults") as network:
        shared = {"MASTER_ADDR": network.address(0), "MASTER_PORT": "29500", "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
        processes = [
            network.start(
                host,
                [sys.executable, str(folder / "job.py")],
                {**os.environ, **shared, "RANK": str(host), "GLOO_SOCKET_IFNAME": "eth0"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for host in range(2)
        ]
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        time.sleep(1.0)
        if cut_seconds:
            link = ["ip", "-n", "lsfaults-host1", "link", "set", "eth0"]
            subprocess.run([*link, "down"], check=True)
            cut_at = time.monotonic()
            if cut_seconds < 60:
                time.sleep(cut_seconds)
                subprocess.run([*link, "up"], check=True)
        else:
            cut_at = time.monotonic()
        said = [json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in processes]
        return said, time.monotonic() - cut_at


@only_long
def test_a_link_that_is_gone_for_a_second_changes_no_number(tmp_path):
    whole, _ = run_job(tmp_path, 0.0)
    cut, _ = run_job(tmp_path, 1.0)
    assert "sum" in whole[0]
    assert whole[0] == whole[1] == cut[0] == cut[1]


@only_long
def test_a_link_that_is_gone_for_good_ends_both_sides_with_a_cure(tmp_path):
    said, seconds = run_job(tmp_path, 60.0)
    assert seconds < 8 + 20
    for each in said:
        assert "waited in vain in" in each["error"]
        assert "start the job again from the last checkpoint" in each["error"]


@pytest.mark.exhaustive
def test_the_page_on_two_machines_does_what_it_says(tmp_path):
    page = (ROOT / "docs" / "two-machines.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    commands = [code for language, code in blocks if language == "bash"]
    (script,), (seen,) = ([code for language, code in blocks if language == wanted] for wanted in ("python", ""))
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": paths, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    with ShapedNetwork(hosts=2, rate="1gbit", delay="0", name="lspage") as network:
        processes = []
        for host, command in enumerate(commands):
            (tmp_path / str(host)).mkdir()
            (tmp_path / str(host) / "train.py").write_text(script)
            piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            words = ["bash", "-ec", command]
            processes.append(network.start(host, words, environment, cwd=tmp_path / str(host), **piped))
        first, second = (process.communicate(timeout=300)[0] for process in processes)
    assert [process.returncode for process in processes] == [0, 0], first + second
    positions = [first.find(line) for line in seen.splitlines()]
    assert -1 not in positions, first
    assert positions == sorted(positions)
    assert "GLOBAL_RANK: 1, MEMBER: 2/2" in second
