"""The command ``lightning-sparse check``: what it reports of a machine that works, and of faults made on purpose."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.commands import refusal

ROOT = Path(__file__).parents[2]
# Patches what a fault is about, then runs the command; its first word is the fault.
WRAPPER = """
import os, sys, time
fault, names = sys.argv[1], sys.argv[2].split(";")
from lightning_sparse.cli import main, probes
rank = int(os.environ["RANK"])
table = probes.Probes.table
probes.Probes.table = lambda own: {name: row for name, row in table(own).items() if name in ["environment", *names]}
step = probes._OddModel.training_step

def at_step_5(act):
    def training_step(own, batch, index):
        if rank == 1 and index == 5:
            act()
        return step(own, batch, index)
    probes._OddModel.training_step = training_step

if fault == "seed" and rank == 1:
    import torch
    seed = torch.manual_seed
    torch.manual_seed = lambda number: seed(number + 1)
in_a_step = {"hangs": lambda: time.sleep(1000), "dies": lambda: os._exit(9), "raises": lambda: [][0]}
if fault in in_a_step:
    at_step_5(in_a_step[fault])
if fault == "nothing":
    from lightning_sparse.compressors.topk import TopK
    select = TopK.select
    def select_zeros(own, *given, **named):
        found = select(own, *given, **named)
        found.values.zero_()
        return found
    TopK.select = select_zeros
if fault == "slow" and rank == 1:
    import torch.distributed as dist
    all_reduce = dist.all_reduce
    def slow(*given, **named):
        time.sleep(0.5 if dist.get_rank(named.get("group")) >= 0 else 0.0)
        return all_reduce(*given, **named)
    dist.all_reduce = slow
main(["check", *sys.argv[3:]])
"""


class Ranks:
    """Ranks of the command, started without torchrun's supervision, with a fault and with some of the rows."""

    def __init__(self, folder, fault, rows, ranks=2, limit=100, hosts=1):
        self.output = folder / "check.json"
        (folder / "wrapper.py").write_text(WRAPPER)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "TORCHELASTIC_RUN_ID": "job"}
        job |= {"WORLD_SIZE": str(ranks), "GROUP_WORLD_SIZE": str(hosts), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "wrapper.py", fault, ";".join(rows), f"--time={limit}"]
        piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": folder}
        self.processes = []
        for rank in range(ranks):
            host, local = divmod(rank, ranks // hosts)
            places = {"RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(host)}
            of_rank = {**os.environ, "PYTHONPATH": str(ROOT), **job, **places}
            self.processes.append(subprocess.Popen([*words, f"--output={self.output}"], env=of_rank, **piped))

    def end(self):
        """Wait; return each rank's status, what was printed, and the failed rows with their details."""
        try:
            said = [process.communicate(timeout=200) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        assert self.output.exists(), said
        failed = {row["name"]: row["detail"] for row in self.report()["rows"] if row["state"] == "failed"}
        return [process.returncode for process in self.processes], "".join(out for out, _ in said), failed

    def report(self):
        return json.loads(self.output.read_text())


@pytest.mark.exhaustive
def test_rows_pass_and_are_reported(tmp_path):
    rows = ("density 1 equals DDP", "mass", "two levels", "all-reduce")
    ranks = Ranks(tmp_path, "none", rows)
    assert ranks.end()[0] == [0, 0]
    report = ranks.report()
    assert [row["name"] for row in report["rows"]] == ["environment", *rows]
    assert [row["state"] for row in report["rows"]] == ["passed"] * 3 + ["not applicable", "passed"]
    assert report["passed"]
    assert list(report["rows"][0]["ranks"]) == [f"rank {rank} ({socket.gethostname()})" for rank in range(2)]
    assert re.search(r"for 0.25 M elements .*: [\d.]+ Gbit/s, [\d.]+ us one way$", report["rows"][-1]["detail"])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("fault", "rows", "said"),
    [
        (
            "seed",
            ["one seed, one model"],
            r"^rank 0 .*, rank 1 .*: AssertionError: rank 1 .* differs from rank 0: .* for item \['coarse.bias'\]",
        ),
        ("nothing", ["mass"], "AssertionError"),
        ("slow", ["links"], r"Gbit/s from the slowest host, rank 1 "),
        ("dies", ["replicas at density 0.01"], r"^rank 1 \([^;]*\): died$"),
        ("hangs", ["replicas at density 0.01"], r"^rank 1 \(.*\): at wrapper.py:\d+, had not ended the check"),
        ("raises", ["replicas at density 0.01"], r"^rank 1 \(.*\): IndexError"),
    ],
)
def test_a_fault_is_named_by_its_row(fault, rows, said, tmp_path):
    others = [] if fault in ("dies", "hangs", "raises") else ["memory bandwidth"]
    ranks, hosts = (3, 3) if fault == "slow" else (2, 1)
    states, printed, failed = Ranks(tmp_path, fault, [*rows, *others], ranks, 100 if others else 45, hosts).end()
    assert list(failed) == rows, printed
    assert re.search(said, failed[rows[0]]), failed
    assert f"failed         {rows[0]}" in printed
    assert all(states)


@pytest.mark.exhaustive
def test_an_interrupt_ends_all_ranks(tmp_path):
    words = [sys.executable, "-m", "lightning_sparse", "check", "--devices=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = subprocess.Popen(words, env=environment, cwd=tmp_path, **pipes)
    assert "environment" in command.stdout.readline()
    command.send_signal(signal.SIGINT)
    printed, _ = command.communicate(timeout=50)  # until the last rank has closed its output
    assert command.returncode == 1
    assert "all-reduce" not in printed


@pytest.mark.exhaustive
def test_local_processes_give_advice(tmp_path):
    said = run_alone(tmp_path, "--devices=2", "--parameters=1M", "--compute=1ms")
    assert re.search(r"^passed +advice +r = .* as measured;.* Take ", said, re.MULTILINE)
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_one_process_has_no_rows_of_two(tmp_path):
    said = run_alone(tmp_path, "--devices=1", "--parameters=1M", "--compute=1ms")
    assert re.search(r"^not applicable density 1 equals DDP +needs two processes", said, re.MULTILINE)
    assert "Take ddp" in said


def run_alone(folder, *words):
    command = [sys.executable, "-m", "lightning_sparse", "check", "--time=200", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--parameters=1M"], "--compute"),
        (["--compute=1s"], "--parameters"),
        (["--parameters=1M", "--compute=1"], "compute='1'"),
        (["--tim=1"], "--tim=1"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(words, named, capsys):
    assert named in refusal(capsys, "check", *words)[-1]
