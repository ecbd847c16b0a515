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
import os, sys, threading, time
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

def hang():
    open("hangs", "w").close()
    time.sleep(1000)

def timer(seconds, end):
    "The time is over 5 s after rank 1 begins to hang. Rank 0 then waits for rank 1."
    def watch():
        while not os.path.exists("hangs"):
            time.sleep(0.1)
        time.sleep(5)
        end()
    return threading.Thread(target=watch, daemon=True)

if fault == "seed" and rank == 1:
    import torch
    seed = torch.manual_seed
    torch.manual_seed = lambda number: seed(number + 1)
in_a_step = {"hangs": hang, "dies": lambda: os._exit(0), "raises": lambda: [][0]}
if fault in in_a_step:
    at_step_5(in_a_step[fault])
if fault == "hangs":
    probes.Timer = timer
if fault == "nothing":
    from lightning_sparse.compressors.topk import TopK
    select = TopK.select
    def select_zeros(own, *given, **named):
        found = select(own, *given, **named)
        found.values.zero_()
        return found
    TopK.select = select_zeros
if fault == "rounds":
    from lightning_sparse.engine.wire.base import GatherFormat
    write = GatherFormat._write
    GatherFormat._write = lambda own, selected: (write(own, selected)[0], selected.values)
if fault == "slow":
    os.environ.update(LOCAL_RANK="0", GROUP_RANK=str(rank))  # each rank is a host
if fault == "slow" and rank == 1:
    import torch.distributed as dist
    all_reduce = dist.all_reduce
    def slow(*given, **named):
        time.sleep(1.0 if dist.get_rank(named.get("group")) >= 0 else 0.0)
        return all_reduce(*given, **named)
    dist.all_reduce = slow
main(["check", *sys.argv[3:]])
"""


@pytest.fixture
def checked(interpreter, tmp_path):
    """Return a function that runs some rows of the command with a fault, and returns its end and its report."""

    def run(fault, rows, ranks=2, hosts=1):
        (tmp_path / "wrapper.py").write_text(WRAPPER)
        job = {"TORCHELASTIC_RUN_ID": "job", "GROUP_WORLD_SIZE": str(hosts), "PYTHONPATH": str(ROOT)}
        words = (fault, ";".join(rows), "--time=1000", f"--output={tmp_path / 'check.json'}")
        ended = interpreter.run(tmp_path / "wrapper.py", *words, environment={**os.environ, **job}, ranks=ranks)
        assert (tmp_path / "check.json").exists(), ended.stderr
        return ended, json.loads((tmp_path / "check.json").read_text())

    return run


@pytest.mark.exhaustive
def test_rows_pass_and_are_reported(checked):
    rows = ("density 1 equals DDP", "mass", "two levels", "all-reduce")
    ended, report = checked("", rows)
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.endswith("All rows passed.\n")
    assert [row["name"] for row in report["rows"]] == ["environment", *rows]
    assert [row["state"] for row in report["rows"]] == ["passed"] * 3 + ["not applicable", "passed"]
    assert report["passed"]
    assert all(row["seconds"] >= 0 for row in report["rows"])
    assert list(report["rows"][0]["ranks"]) == [f"rank {rank} ({socket.gethostname()})" for rank in range(2)]
    said = report["rows"][-1]["detail"]
    assert re.search(r"for 25 M elements .*: [\d.]+ GB/s = [\d.]+ Gbit/s, [\d.]+ us one way$", said)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("fault", "row", "said"),
    [
        (
            "seed",
            "one seed, one model",
            r"^rank 0 .*, rank 1 .*: AssertionError: rank 1 .* differs from rank 0: .* for item \['coarse.bias'\]",
        ),
        ("nothing", "mass", "AssertionError"),
        ("rounds", "mass", "AssertionError"),
        ("slow", "links", r"Gbit/s from the slowest host, rank 1 "),
        ("dies", "replicas at density 0.01", r"^rank 1 \([^;]*\): died$"),
        ("hangs", "replicas at density 0.01", r"^rank 1 \(.*\): at wrapper.py:\d+, had not ended the check"),
        ("raises", "replicas at density 0.01", r"^rank 1 \(.*\): IndexError"),
    ],
)
def test_a_fault_is_named_by_its_row(fault, row, said, checked):
    later = [] if fault in ("dies", "hangs", "raises") else ["memory bandwidth"]
    ended, report = checked(fault, [row, *later], *([3, 3] if fault == "slow" else []))
    failed = {row["name"]: row["detail"] for row in report["rows"] if row["state"] == "failed"}
    assert list(failed) == [row], ended.stdout
    assert re.search(said, failed[row])
    assert re.search(f"^failed .* {row} ", ended.stdout, re.MULTILINE)
    assert ended.stdout.endswith(f"Failed rows: {row}.\n")
    assert ended.returncode != 0


@pytest.mark.exhaustive
def test_an_interrupt_ends_all_ranks(tmp_path):
    words = [sys.executable, "-m", "lightning_sparse", "check", "--devices=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = subprocess.Popen(words, env=environment, cwd=tmp_path, **pipes)
    assert "environment" in command.stdout.readline()
    command.send_signal(signal.SIGINT)
    printed, _ = command.communicate(timeout=250)  # until the last rank has closed its output
    assert command.returncode == 1
    assert "rows" not in printed


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_local_processes_give_advice(tmp_path):
    said = run_alone(tmp_path, "--devices=2")
    assert re.search(r"^passed .* advice +r = .* as measured;.*\nTake ", said, re.MULTILINE)
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_one_process_has_no_rows_of_two(tmp_path):
    said = run_alone(tmp_path, "--devices=1")
    assert re.search(r"^not applicable .* density 1 equals DDP +needs two processes", said, re.MULTILINE)
    assert re.search(r"^not applicable .* advice +needs two processes", said, re.MULTILINE)


def run_alone(folder, *words):
    model = ["--parameters=1M", "--compute=1ms", "--time=800"]
    command = [sys.executable, "-m", "lightning_sparse", "check", *model, *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--parameters=1MB"], "parameters='1MB'"),
        (["--compute=1"], "compute='1'"),
        (["--tim=1"], "--tim=1"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(words, named, capsys):
    assert named in refusal(capsys, "check", *words)[-1]
