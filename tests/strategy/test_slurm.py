"""Trainings on a real SLURM cluster of several nodes, on this machine."""

import json
import math
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
NODES = 3


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
    """A directory that has what the root of the repository has."""
    for name in ("configs", "examples", "lightning_sparse"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def wait_for(happened, timeout, cluster, log):
    """Wait until something is true; fail with the logs after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not happened():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout} s\n{log.read_text() if log.exists() else ''}\n{cluster.logs()}")
        time.sleep(0.2)


def lines_of(path):
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


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
    assert 0 < sent.value < sent.step * whole.value / 9  # in one step of ten


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_a_signalled_job_saves_goes_back_and_continues_with_the_nodes_that_are_left(cluster, work):
    options = ["--nodes=2:3", "--tasks-per-node=1", "--cpus-per-task=1", "--time=10", "--interface=lo"]
    options += [f"--config={ROOT}/tests/strategy/slow.yaml"]
    options += ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.every_n_train_steps=5"]
    told = cluster.run("lightning-sparse", "submit", *options, folder=work)
    job = told.split()[1]
    log, steps = work / "jobs" / f"train-{job}.log", work / "steps.jsonl"
    assert str(log) in told
    wait_for(lambda: len(lines_of(steps)) >= 13, 150, cluster, log)
    cluster.run("scontrol", "update", "nodename=n3", "state=drain", "reason=gone")
    try:
        cluster.run("scancel", "--signal=USR1", job)
        wait_for(lambda: any(line["epoch"] == 2 for line in lines_of(steps)), 150, cluster, log)
        cluster.run("scancel", "--signal=USR1", job)
        assert cluster.wait_until_ended(job, timeout=120)["JobState"] == "COMPLETED", log.read_text()
    finally:
        cluster.run("scontrol", "update", "nodename=n3", "state=resume")
    *written, end = lines_of(steps)
    assert [line["restarts"] for line in written] == sorted(line["restarts"] for line in written)
    first, second, third = (
        [(line["step"], line["epoch"], line["batch"]) for line in written if line["restarts"] == times]
        for times in range(3)
    )
    for number, made in ((1, first), (2, second)):
        checkpoint = work / "jobs" / job / f"hpc_ckpt_{number}.ckpt"
        # At the end of a step, and with nothing done after it, that would be done twice.
        assert torch.load(checkpoint, map_location="cpu", weights_only=True)["global_step"] == made[-1][0]
    saved = first[-1][0]
    assert saved == 15  # signalled after the thirteenth, agreed on while the fifteenth ran
    # Of 128 samples an epoch three ranks had 12 in a step, in 11 of them; two have 8, in 16.
    left = max(0, 128 - 12 * ((saved - 1) % 11 + 1))
    ends = saved + math.ceil(left / 8)  # the second epoch
    # In the middle of an epoch, and neither from its start nor with a step left out.
    assert second + third == [
        (step, 1 + (step > ends), (step - ends - 1) % 16) for step in range(saved + 1, ends + 16 + 1)
    ]
    assert 1 <= len(third) < 16
    assert end["hosts"] == ["n1", "n2"]
    assert end["identical"]
    assert end["stats"]["compression_ratio"] > 5
    assert end["loss"] < 0.9


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
def test_python_without_srun_is_refused_at_once(cluster, work):
    fit = "lightning-sparse fit --model=tests.strategy.slow.Slow --trainer.strategy=sparse_topk"
    job = cluster.submit("--ntasks-per-node=2", f"--wrap={fit}", folder=work)
    assert cluster.wait_until_ended(job, timeout=200)["JobState"] == "FAILED"
    assert "put srun before the command" in (work / f"slurm-{job}.out").read_text()
