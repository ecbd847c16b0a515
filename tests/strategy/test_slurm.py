import os
import socket
import sys
from functools import partial
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


@pytest.mark.exhaustive
@pytest.mark.timeout(700)
def test_the_example_of_several_nodes_is_requeued_by_a_signal_and_resumes(cluster, work):
    script = (work / "examples" / "slurm" / "several_nodes.sbatch").read_text()
    longer = "--config configs/lags.yaml --trainer.max_epochs=40"
    (work / "job.sbatch").write_text(script.replace("--config configs/lags.yaml", longer))
    job = cluster.submit("job.sbatch", folder=work)
    jobs = work / "jobs" / job
    cluster.wait_for(lambda: list(jobs.rglob("epoch=*.ckpt")), 150)
    cluster.run("scancel", "--signal=USR1", job)
    facts = cluster.wait_for(lambda: cluster.record_of_ended(job), 500)
    text = (work / f"sparse-several-nodes-{job}.log").read_text()
    assert (facts["JobState"], facts["NodeList"], facts["Restarts"]) == ("COMPLETED", "n[1-2]", "1"), text
    assert text.count("Starting with 2 processes") == 2
    assert "start empty" not in text  # residuals
    saved = torch.load(jobs / "hpc_ckpt_1.ckpt", map_location="cpu", weights_only=True)["global_step"]
    root = jobs / "lightning_logs" / f"version_{job}"
    assert list(root.glob("checkpoints/epoch=39-*.ckpt"))
    steps = []
    for path in sorted(root.glob("events*")):  # one of each start
        scalars = EventAccumulator(str(path)).Reload()
        steps.append([each.step for each in scalars.Scalars("sparse/compression_ratio")])
        assert scalars.Scalars("sparse/compression_ratio")[-1].value > 20
    assert steps[0][0] < saved <= steps[1][0] < saved + 10
    assert scalars.Scalars("accuracy")[-1].value > 0.9


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
    states = [cluster.wait_for(partial(cluster.record_of_ended, job), 200)["JobState"] for job in jobs]
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
