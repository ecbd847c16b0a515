"""The command ``lightning-sparse submit``, without a cluster."""

import os
import re
import shlex
import subprocess
import sys

import pytest

from lightning_sparse.cli import main
from lightning_sparse.strategy.submit import check_step, parse_time
from tests.helpers.commands import refusal
from tests.helpers.pages import shown_commands

BASE = ["--nodes=2", "--gpus-per-node=4", "--time=2:00:00"]
FIT = ["--model=tests.strategy.slow.Slow", "--trainer.strategy=sparse_topk"]


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    """Keep Lightning's own deprecation to itself, and run in an empty directory."""
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    monkeypatch.chdir(tmp_path)


def script_of(capsys, *args):
    at = args.index("--") if "--" in args else len(args)
    main(["submit", *args[:at], "--dry-run", *args[at:]])
    script, notice = capsys.readouterr()
    assert ("--cpus-per-task" in notice) == ("--cpus-per-task" not in script)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=10)
    return script


def trained_words(script):
    (line,) = [line for line in script.splitlines() if line.startswith("srun")]
    return shlex.split(line)


def answer(script, *patterns, ask):
    """Return what a shell says that has run the lines of a script in which the patterns are found."""
    found = [found[0] for pattern in patterns if (found := re.search(pattern, script, re.MULTILINE | re.DOTALL))]
    text = "\n".join(["set -e", "SLURM_JOB_ID=7", *found, ask])
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True).stdout.strip()


def refused(capsys, *args):
    """Return what is said of arguments that are refused, after one line of usage and a tip where there is one."""
    usage, *_, error = refusal(capsys, "submit", *args)
    assert usage.startswith("usage: lightning-sparse submit ")
    assert "submit fit" not in usage
    return error


def test_the_script_asks_for_what_lightning_needs(capsys, tmp_path):
    script = script_of(capsys, *BASE, *FIT, "--interface=ib0", "--cpus-per-task=6", "--job-name=lags")
    asked = ["--job-name=lags", f"--chdir={tmp_path}", "--time=2:00:00", "--nodes=2", "--ntasks-per-node=4"]
    asked += ["--gpus-per-node=4", "--cpus-per-task=6", "--signal=SIGUSR1@120", "--requeue", "--open-mode=append"]
    assert {f"#SBATCH {option}" for option in asked} <= set(script.splitlines())
    assert "export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0\n" in script
    assert "OMP_NUM_THREADS=6\n" in script
    assert 'scontrol show hostnames "$SLURM_JOB_NODELIST"' in script
    words = trained_words(script)
    assert words[:3] == ["srun", "--kill-on-bad-exit=1", sys.executable]
    assert words[-4:-1] == ["--trainer.num_nodes=2", "--trainer.devices=4", "--trainer.accelerator=gpu"]
    assert f'root={tmp_path}/jobs/"$SLURM_JOB_ID"' in script
    assert list(tmp_path.iterdir()) == [tmp_path / "jobs"], "a dry run makes the folder of the log, and no file"


def test_on_processors_one_of_them_is_left_to_select_and_exchange(capsys):
    script = script_of(capsys, "--nodes=3", "--tasks-per-node=1", "--cpus-per-task=5", "--time=90", *FIT)
    assert ("--gpus" in script, "OMP_NUM_THREADS=4\n" in script) == (False, True)
    assert "--trainer.accelerator=cpu" in trained_words(script)


def test_options_of_sbatch_setup_and_interpreter_are_the_users(capsys):
    more = ["--partition", "gpu", "--mem=64G", "--sbatch", "--exclusive", "--sbatch=--comment=mine"]
    setup = ["--setup=module load python", "--setup=conda activate 'my env'", "--python", "apptainer exec a.sif python"]
    script = script_of(capsys, *BASE, *FIT, *more, *setup)
    asked = {"#SBATCH --partition=gpu", "#SBATCH --mem=64G", "#SBATCH --exclusive", "#SBATCH --comment=mine"}
    assert asked <= set(script.splitlines())
    places = [script.index(line) for line in ("module load python\n", "conda activate 'my env'\n", "srun --kill")]
    assert places == sorted(places)
    assert trained_words(script)[2:8] == ["apptainer", "exec", "a.sif", "python", "-u", "-m"]


def test_a_command_of_ones_own_is_run_as_it_is(capsys):
    command = ["python", "train.py", "--lr", "0.1", "two words"]
    script = script_of(capsys, *BASE, "--", *command)
    assert trained_words(script) == ["srun", "--kill-on-bad-exit=1", *command]
    assert 'export JOB_ROOT="$root"\n' in script
    assert "--model" in refused(capsys, *BASE, *FIT, "--", *command)


def test_words_and_directories_survive_the_shell(capsys, tmp_path):
    folder = tmp_path / "two words; $HOME"
    script = script_of(capsys, *BASE, *FIT, f"--directory={folder}", "--trainer.profiler=$(two) 'words'")
    assert "--trainer.profiler=$(two) 'words'" in trained_words(script)
    assert answer(script, "^root=.*?$", ask='printf %s "$root"') == f"{folder}/7"


def test_what_agrees_is_accepted_and_not_said_twice(capsys):
    given = ["--trainer.num_nodes=2", "--trainer.devices=[0,1,2,3]", "--trainer.accelerator=cuda"]
    words = trained_words(script_of(capsys, *BASE, *FIT, *given))
    assert [word for word in words if word.startswith(("--trainer.n", "--trainer.dev", "--trainer.acc"))] == given


def test_a_job_that_is_put_back_prefers_its_own_checkpoint(capsys, tmp_path):
    script = script_of(capsys, *BASE, *FIT, "--ckpt_path=start.ckpt", f"--trainer.default_root_dir={tmp_path / 'root'}")
    lines = ("^root=.*?$", r"resume=\(\).*?^fi$")
    assert answer(script, *lines, ask='echo "${resume[@]}"') == ""
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "hpc_ckpt_1.ckpt").touch()
    assert answer(script, *lines, ask='echo "${resume[@]}"') == "--ckpt_path=hpc"


RANGE = ["--nodes=2:8", "--cpus-per-task=6"]
SAVES = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.every_n_train_steps=500"]


def test_a_job_takes_the_nodes_there_are_and_goes_on_from_its_last_checkpoint(capsys, tmp_path):
    script = script_of(capsys, *BASE, *RANGE, *FIT, *SAVES)
    # Seen on a cluster: of a job that asks for tasks, too, SLURM takes the fewest nodes that hold them.
    assert ("#SBATCH --nodes=2-8\n" in script, "#SBATCH --ntasks" in script) == (True, False)
    assert "#SBATCH --cpus-per-task=24\n" in script
    assert {"--ntasks-per-node=4", "--cpus-per-task=6"} <= set(trained_words(script))
    words = trained_words(script)
    assert words[-5:] == [
        "--ckpt_path=last",
        "--trainer.devices=4",
        "--trainer.accelerator=gpu",
        "--trainer.default_root_dir=$root",
        "--trainer.num_nodes=$SLURM_JOB_NUM_NODES",
    ]
    said = script_of(capsys, *BASE, *RANGE, *FIT, *SAVES, "--ckpt_path=last")
    assert trained_words(said).count("--ckpt_path=last") == 1
    own = script_of(capsys, *BASE, *RANGE, "--", "python", "train.py")
    assert "SLURM_JOB_NUM_NODES" in own
    assert "#SBATCH --nodes=3\n" in script_of(capsys, *BASE, "--nodes=3:3", *FIT)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--trainer.num_nodes=4", *SAVES], "trainer.num_nodes=4"),
        ([], "--trainer.callbacks.every_n_train_steps=500"),
        (["--trainer.callbacks+=ModelCheckpoint"], "every_n_train_steps"),
        (["--ckpt_path=start.ckpt", *SAVES], "--ckpt_path=start.ckpt"),
    ],
)
def test_what_would_not_go_on_from_its_last_checkpoint_is_refused(args, named, capsys):
    assert named in refused(capsys, *BASE, "--nodes=2:8", *FIT, *args)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        *(
            ([f"--nodes={nodes}"], f"--nodes: {nodes!r}")
            for nodes in ("0", "8:2", "0:4", "2:", ":2", "a:b", "2:4:6", "-2")
        ),
        (["--trainer.num_nodes=1"], "trainer.num_nodes=1"),
        (["--trainer.devices=2"], "trainer.devices='2'"),
        (["--trainer.devices=[0,1]"], "--trainer.devices=4"),
        (["--trainer.accelerator=cpu"], "trainer.accelerator='cpu'"),
        (["--time=soon"], "--time 'soon'"),
        (["--time=2"], "--time 2 is 120 seconds"),
        (["--gpus-per-node=0"], "--gpus-per-node: "),
        (["--tasks-per-node=4"], "--gpus-per-node"),
        (["--job-name=interactive"], "--job-name: 'interactive'"),
        (["--job-name=my job"], "--job-name: 'my job'"),
        (["--interface=eth0; rm"], "--interface: 'eth0; rm'"),
        (["--interface=^docker0"], "--setup 'export NCCL_SOCKET_IFNAME=^docker0'"),
        (["--directory=jobs\nrm -r ~"], "rm -r ~'"),
        (["--partition=gpu\nrm -r ~"], "rm -r ~'"),
        (["--sbatch=long"], "--sbatch: 'long'"),
        (["--sbatch=--nodes=7"], "--sbatch: '--nodes=7'"),
        (["--sbatch=-c4"], "--sbatch: '-c4'"),
        (["--sbatch=--array=1-4"], "tasks of an array"),
        (["--trainer.max_epoks=3"], "trainer.max_epoks"),
        (["--trainer.strategy=sparse_tpok"], "(did you mean 'sparse_topk'?)"),
    ],
)
def test_what_makes_no_sense_is_refused(args, named, capsys):
    assert named in refused(capsys, *BASE, *FIT, *args)


def test_what_is_missing_and_what_is_left_over_is_refused(capsys, tmp_path):
    assert "--gpus-per-node --tasks-per-node" in refused(capsys, "--time=60", *FIT)
    assert "--time" in refused(capsys, "--tasks-per-node=1", *FIT)
    (tmp_path / "hpc_ckpt_3.ckpt").touch()
    assert "hpc_ckpt_3.ckpt" in refused(capsys, *BASE, *FIT, f"--trainer.default_root_dir={tmp_path}")


def test_a_missing_sbatch_is_named_and_what_it_says_passed_on(capsys, monkeypatch, tmp_path):
    path, words = os.environ["PATH"], [*BASE, *FIT, "--cpus-per-task=2"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "sbatch is not to be found" in refused(capsys, *words)
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid account' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), path]))
    assert "sbatch: error: invalid account" in refused(capsys, *words)


@pytest.mark.parametrize("command", shown_commands("submit"))
def test_a_command_of_the_pages_is_taken_as_it_stands_there(capsys, tmp_path, command):
    (tmp_path / "fit.yaml").write_text("model: tests.strategy.slow.Slow\ntrainer: {strategy: sparse_topk}\n")
    main(["submit", *shlex.split(command.removesuffix("--dry-run")), "--dry-run"])
    assert "fit --config fit.yaml" in capsys.readouterr().out


def test_times_are_read_as_slurm_reads_them_and_others_are_refused():
    times = {"1": 60, "90:30": 5430, "0:0:1": 1, "2:00:00": 7200, "1-0": 86400, "1-2:3": 93780, "1-2:3:4": 93784}
    assert {time: parse_time(time) for time in times} == times
    for time in ("", "0", "1:2:3:4", "1-", "-1", "1.5", "2h", "00:00:00", "infinite", "1-1-1"):
        with pytest.raises(ValueError, match="--time"):
            parse_time(time)


STEP = {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "train", "SLURM_STEP_ID": "0"}


def test_a_process_that_would_wait_forever_is_refused_and_others_may_start():
    without_srun = {key: value for key, value in STEP.items() if key != "SLURM_STEP_ID"}
    with pytest.raises(RuntimeError, match="put srun before"):
        check_step(without_srun)
    with pytest.raises(RuntimeError, match="SLURM_JOB_NAME='interactive'"):
        check_step({**STEP, "SLURM_JOB_NAME": "interactive"})
    for allowed in ({}, STEP, {"SLURM_NTASKS": "1"}, {"SLURM_NTASKS": "4", "SLURM_JOB_NAME": "interactive"}):
        check_step(allowed)
