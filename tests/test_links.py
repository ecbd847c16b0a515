"""A link of a network is cut while a job trains: for a second, which costs time and nothing else, or for good.

Only in ``make faults``, as root: it makes network namespaces.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

IS_LONG = bool(os.environ.get("LIGHTNING_SPARSE_FAULTS"))
pytestmark = [
    pytest.mark.skipif(not IS_LONG, reason="runs in `make faults`"),
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.timeout(600),
    pytest.mark.clock,
]
ROOT = Path(__file__).parent.parent

JOB = """
import json, os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from lightning_sparse.engine.collectives import ExchangeError
from lightning_sparse.engine import Engine
from lightning_sparse.engine.ddp_hook import bucket_cap_mb
from lightning_sparse.engine.settings import Settings
from lightning_sparse.testing.wrapping import Edges, batch, sgd_steps
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
torch.manual_seed(0)
model = Edges()
ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_cap_mb(model))
engine = Engine(ddp, Settings("exdyna", 0.05, "layerwise", "float32", 0), timedelta(seconds=8))
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


def run_job(folder: Path, cut_seconds: float) -> tuple[list[dict[str, Any]], float]:
    """Train on two hosts and cut a link once both train; return what each said last, and for how long it ran on."""
    sys.path.insert(0, str(ROOT / "examples" / "benchmarks"))
    from network import ShapedNetwork

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
            assert process.stdout is not None
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


def test_a_link_that_is_gone_for_a_second_changes_no_number(tmp_path: Path) -> None:
    whole, _ = run_job(tmp_path, 0.0)
    cut, _ = run_job(tmp_path, 1.0)
    assert "sum" in whole[0]
    assert whole[0] == whole[1] == cut[0] == cut[1]


def test_a_link_that_is_gone_for_good_ends_both_sides_with_a_cure(tmp_path: Path) -> None:
    said, seconds = run_job(tmp_path, 60.0)
    assert seconds < 8 + 20
    for each in said:
        assert "waited in vain in" in each["error"]
        assert "start the job again from its last checkpoint" in each["error"]
