import json
import os
import socket
import sys
import time
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.strategy.cluster import REQUIRED, Cluster, missing

ROOT = Path(__file__).parents[2]
NODES = 2


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    lacking = missing()
    if lacking and os.environ.get(REQUIRED):
        pytest.fail(f"{REQUIRED} is set, but a cluster cannot run here without {', '.join(lacking)}")
    if lacking:
        pytest.skip(f"a SLURM cluster needs {', '.join(lacking)}; .ci/run installs it on Debian, as root")
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), NODES)
    path = [str(Path(sys.executable).parent), cluster.environment["PATH"]]
    cluster.environment.update(PATH=os.pathsep.join(path), PYTHONPATH=str(ROOT), INTERFACE="lo")
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def work(tmp_path):
    for name in ("configs", "examples", "lightning_sparse"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def wait_for(happened, timeout, cluster, log):
    deadline = time.monotonic() + timeout
    while not happened():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout} s\n{log.read_text() if log.exists() else ''}\n{cluster.logs()}")
        time.sleep(0.2)


def lines_of(path):
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def reached(path):
    return {(line["restarts"], line["step"]) for line in lines_of(path) if "step" in line}


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
def test_the_example_of_several_nodes_trains_as_it_is_written(cluster, work):
    job = cluster.submit("examples/slurm/several_nodes.sbatch", folder=work)
    try:
        facts = cluster.wait_until_ended(job, timeout=200)
    finally:
        log = next(work.glob(f"*-{job}.log")).read_text()
    assert facts["JobState"] == "COMPLETED", log
    assert facts["NodeList"] == "n[1-2]"
    assert "Starting with 2 processes" in log
    root = work / "jobs" / job / "lightning_logs" / f"version_{job}"
    scalars = EventAccumulator(str(root)).Reload()
    assert scalars.Scalars("accuracy")[-1].value > 0.9
    assert scalars.Scalars("sparse/compression_ratio")[-1].value > 20
    assert list(root.glob("checkpoints/epoch=9-*.ckpt"))


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
def test_the_example_of_two_sites_trains_one_model_as_it_is_written(cluster, work):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        said = f"--export=ALL,NODES=2,PORT={free.getsockname()[1]}"
    sites = {"n1": said, "n2": f"{said},BEFORE=1,FIRST=n1"}
    jobs = []
    for node, said in sites.items():
        where = (f"--nodelist={node}", "--nodes=1", said)
        jobs.append(cluster.submit(*where, "examples/slurm/two_sites.sbatch", folder=work))
    states = [cluster.wait_until_ended(job, timeout=200)["JobState"] for job in jobs]
    logs = [next(work.glob(f"*-{job}.log")).read_text() for job in jobs]
    assert states == ["COMPLETED", "COMPLETED"], logs
    assert "The first node is n1;" in logs[0]
    assert "Starting with 2 processes" in logs[0]
    assert "GLOBAL_RANK: 1, MEMBER: 2/2" in logs[1]
    (written,) = (work / "jobs" / jobs[0]).glob("lightning_logs/*/events*")
    scalars = EventAccumulator(str(written)).Reload()
    assert scalars.Scalars("accuracy")[-1].value > 0.9
    sent, whole = scalars.Scalars("sparse/total_wire_bytes")[-1], scalars.Scalars("sparse/dense_bytes")[-1]
    assert 0 < sent.value < sent.step * whole.value / 8  # one step of ten, and each validation


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_a_signalled_job_saves_is_requeued_and_resumes(cluster, work):
    script = (work / "examples" / "slurm" / "several_nodes.sbatch").read_text()
    changed = script.replace("--config configs/lags.yaml", f"--config {ROOT}/tests/strategy/slow.yaml")
    (work / "job.sbatch").write_text(changed)
    job = cluster.submit("job.sbatch", folder=work)
    log, steps = work / f"sparse-several-nodes-{job}.log", work / "steps.jsonl"
    wait_for(lambda: (0, 13) in reached(steps), 150, cluster, log)
    cluster.run("scancel", "--signal=USR1", job)
    wait_for(lambda: (1, 28) in reached(steps), 150, cluster, log)
    cluster.run("scancel", "--signal=USR1", job)
    assert cluster.wait_until_ended(job, timeout=120)["JobState"] == "COMPLETED", log.read_text()
    *written, end = lines_of(steps)
    assert [line["restarts"] for line in written] == sorted(line["restarts"] for line in written)
    made = [[line["step"] for line in written if line["restarts"] == times] for times in range(3)]
    assert [each[0] for each in made] == [1, 15, 30]  # until SLURM ends a requeued job, the job trains on
    assert made[2] == list(range(30, 49))
    for number, step in ((1, 14), (2, 29)):
        checkpoint = work / "jobs" / job / f"hpc_ckpt_{number}.ckpt"
        assert torch.load(checkpoint, map_location="cpu", weights_only=True)["global_step"] == step
    assert end["hosts"] == ["n1", "n2"]
    assert end["identical"]
    assert end["stats"]["compression_ratio"] > 5
    assert end["loss"] < 0.9
