"""The command ``lightning-sparse submit``, without a cluster."""

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_sparse.cli import main
from lightning_sparse.cli.submit import check_step, parse_time

ROOT = Path(__file__).parents[3]
BASE = ["--nodes=2", "--gpus-per-node=4", "--time=2:00:00"]
FIT = ["--model=tests.cli.submit.models.Slow", "--trainer.strategy=sparse_topk"]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep Lightning's own deprecation to itself, and run in an empty directory."""
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    monkeypatch.chdir(tmp_path)


def script_of(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Return the script that would be submitted."""
    at = args.index("--") if "--" in args else len(args)
    main(["submit", *args[:at], "--dry-run", *args[at:]])
    script = capsys.readouterr().out
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=10)
    return script


def trained_words(script: str) -> list[str]:
    """Return the words of the training command."""
    (line,) = [line for line in script.splitlines() if line.startswith("srun")]
    return shlex.split(line)


@pytest.mark.parametrize(
    ("interface", "exported"),
    [
        ("ib0", "export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0"),
        ("^docker0,lo", "export NCCL_SOCKET_IFNAME=^docker0,lo"),
    ],
)
def test_gloo_is_told_of_no_interface_that_only_nccl_understands(
    capsys: pytest.CaptureFixture[str], interface: str, exported: str
) -> None:
    assert exported in script_of(capsys, *BASE, *FIT, f"--interface={interface}").splitlines()
    if "^" in interface:
        message = refusal(capsys, "--time=60", "--tasks-per-node=2", *FIT, f"--interface={interface}")
        assert "is for NCCL alone: gloo, which exchanges on processors, takes names" in message


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Return what is said of arguments that are refused."""
    with pytest.raises(SystemExit) as stop:
        main(["submit", *args])
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_the_script_asks_for_what_lightning_needs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = script_of(capsys, *BASE, *FIT, "--interface=ib0", "--cpus-per-task=6", "--job-name=lags")
    for option in (
        "--job-name=lags",
        f"--chdir={tmp_path}",
        "--time=2:00:00",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--gpus-per-node=4",
        "--cpus-per-task=6",
        "--signal=SIGUSR1@120",
        "--requeue",
        "--open-mode=append",
    ):
        assert f"#SBATCH {option}\n" in script
    assert "export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0" in script
    assert 'scontrol show hostnames "$SLURM_JOB_NODELIST"' in script
    words = trained_words(script)
    assert words[:2] == ["srun", "--kill-on-bad-exit=1"]
    assert words[-4:-1] == ["--trainer.num_nodes=2", "--trainer.devices=4", "--trainer.accelerator=gpu"]
    assert f'root={tmp_path}/jobs/"$SLURM_JOB_ID"' in script
    assert list(tmp_path.iterdir()) == [tmp_path / "jobs"], "a dry run makes the folder of the log, and no file"


def test_on_processors_and_with_more_options(capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--sbatch=--partition=long", "--sbatch=--account=me", "--setup=module load python"]
    script = script_of(capsys, "--nodes=3", "--tasks-per-node=1", "--time=90", *more, *FIT)
    assert "--gpus" not in script
    assert "#SBATCH --partition=long\n#SBATCH --account=me\n" in script
    assert script.index("module load python") < script.index("srun --kill")
    assert "--trainer.accelerator=cpu" in trained_words(script)


def test_the_queue_is_said_in_options_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    script = script_of(capsys, *BASE, *FIT, "--partition", "gpu", "--account", "me", "--qos=high")
    assert "#SBATCH --partition=gpu\n#SBATCH --account=me\n#SBATCH --qos=high\n" in script


def test_modules_and_conda_come_first_and_bring_the_interpreter(capsys: pytest.CaptureFixture[str]) -> None:
    setup = ["--conda=torch env", "--module=cuda/12.4", "--module=gcc", "--setup=export A=1"]
    script = script_of(capsys, *BASE, *FIT, *setup)
    order = [
        "module load cuda/12.4",
        "module load gcc",
        "etc/profile.d/conda.sh",
        "conda activate 'torch env'",
        "export A=1",
    ]
    assert [script.index(line) for line in order] == sorted(script.index(line) for line in order)
    assert trained_words(script)[2] == "python"
    assert trained_words(script_of(capsys, *BASE, *FIT))[2] == sys.executable


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (
            "nvcr.io#nvidia/pytorch:25.01-py3",
            "--container-image=nvcr.io#nvidia/pytorch:25.01-py3 --container-mounts={here}:{here},{jobs}:{jobs}"
            " --container-workdir={here} python -u",
        ),
        ("torch.sif", "apptainer exec --nv --bind {here},{jobs} --pwd {here} torch.sif python -u"),
        (
            "docker://pytorch/pytorch",
            "apptainer exec --nv --bind {here},{jobs} --pwd {here} $image python -u",
        ),
    ],
    ids=["pyxis", "apptainer", "apptainer by address"],
)
def test_a_container_runs_the_training_in_the_same_folders(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, image: str, words: str
) -> None:
    script = script_of(capsys, *BASE, *FIT, f"--container-image={image}")
    assert words.format(here=tmp_path, jobs=tmp_path / "jobs") in " ".join(trained_words(script))
    if "#" not in image:
        on_processors = script_of(capsys, "--tasks-per-node=2", "--time=60", *FIT, f"--container-image={image}")
        assert "--nv" not in on_processors


def test_a_job_in_a_container_is_put_back_from_outside(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    script = script_of(capsys, *BASE, *FIT, "--container-image=torch.sif", "--trainer.default_root_dir=root")
    start, end = script.index("# Within the image"), script.index("# Where one task fails")
    commands(tmp_path, scontrol='echo "$@" > asked')
    (root / "hpc_ckpt_1.ckpt").touch()  # that of a run before
    train = "sleep 2.5; [ -e asked ] && exit 3; touch root/hpc_ckpt_2.ckpt; until [ -s asked ]; do sleep 0.1; done"
    ask = f"set -e\nroot=root SLURM_JOB_ID=7\n{script[start:end]}\n{train}"
    path = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", ask], check=True, cwd=tmp_path, env=path, timeout=60)
    assert (tmp_path / "asked").read_text() == "requeue 7\n"


def test_an_image_with_an_address_is_pulled_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = script_of(capsys, *BASE, *FIT, "--container-image=docker://nvcr.io/nvidia/pytorch:25.01-py3")
    start, end = script.index("image="), script.index("# Within the image")
    commands(tmp_path, apptainer='echo "$@" >> asked; touch "$2"')
    path = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    for _ in range(2):
        subprocess.run(["bash", "-ec", script[start:end]], check=True, cwd=tmp_path, env=path, timeout=60)
    file = tmp_path / "jobs" / "nvcr.io-nvidia-pytorch-25.01-py3.sif"
    assert file.exists()
    assert (tmp_path / "asked").read_text() == f"pull {file}.7 docker://nvcr.io/nvidia/pytorch:25.01-py3\n"


def test_a_command_of_ones_own_is_run_as_it_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ["python", "train.py", "--lr", "0.1", "two words"]
    script = script_of(capsys, *BASE, "--", *command)
    assert trained_words(script) == ["srun", "--kill-on-bad-exit=1", *command]
    assert 'export JOB_ROOT="$root"\n' in script
    main(["submit", "--to=torchrun", "--tasks-per-node=2", "--dry-run", "--", *command])
    *_, line = capsys.readouterr().out.splitlines()
    assert line.endswith("--no-python python train.py --lr 0.1 'two words'")
    assert "cannot go together with a command after --" in refusal(capsys, *BASE, *FIT, "--", *command)


def test_an_option_of_sbatch_may_follow_as_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert "#SBATCH --constraint=a100\n" in script_of(capsys, *BASE, *FIT, "--sbatch", "--constraint=a100")


def test_an_error_is_no_longer_than_it_has_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--time=2"], ["--trainer.max_epoks=3"]):
        usage, *_, error = refusal(capsys, *BASE, *FIT, "--cpus-per-task=2", *words).splitlines()
        assert usage.startswith("usage: lightning-sparse submit ")
        assert "submit fit" not in usage
        assert error.startswith(("lightning-sparse submit: error: --time", "error: 'trainer.max_epoks'"))


def commands(folder: Path, **scripts: str) -> None:
    """Write commands of the shell."""
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("said", "devices", "share"),
    [
        ("64 gpu:a100:8(S:0-1)\n128 gpu:8", "--gpus-per-node=4", 8),
        ("96+ gpu:h100:4", "--gpus-per-node=4", 24),
        ("64 (null)\n48 gpu:4", "--gpus-per-node=4", 12),
        ("64 (null)", "--tasks-per-node=3", 21),
        ("2 (null)", "--tasks-per-node=4", 1),
        ("64 (null)", "--gpus-per-node=4", None),
    ],
)
def test_a_process_has_its_share_of_the_smallest_node(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    said: str,
    devices: str,
    share: "int | None",
) -> None:
    commands(tmp_path, sinfo=f"[ \"$3\" = --partition=long ] && printf '{said}\\n'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    main(["submit", "--time=60", devices, "--partition=long", *FIT, "--dry-run"])
    script, notice = capsys.readouterr()
    assert ("Give --cpus-per-task, such as 8" in notice) == (share is None)
    asked = [line for line in script.splitlines() if line.startswith("#SBATCH --cpus-per-task")]
    assert asked == ([] if share is None else [f"#SBATCH --cpus-per-task={share}"])
    chosen = script_of(capsys, "--time=60", devices, "--partition=long", "--cpus-per-task=5", *FIT)
    assert "#SBATCH --cpus-per-task=5\n" in chosen
    # On processors one of them is left to select and exchange.
    assert f"OMP_NUM_THREADS={5 if 'gpus' in devices else 4}\n" in chosen


def test_the_script_of_torchrun_starts_the_training_on_each_machine(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["--to=torchrun", "--nodes=2", "--tasks-per-node=2", "--cpus-per-task=3", "--setup=export A='a  b'"]
    main(["submit", *options, *FIT])
    script = tmp_path / "jobs" / "train.sh"
    assert f"On each machine: bash {script} RANK FIRST" in capsys.readouterr().out
    # In place of a training, which takes long to begin: torchrun is what is tried.
    started = tmp_path / "lightning_sparse" / "__main__.py"
    started.parent.mkdir()
    seen = "('RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'OMP_NUM_THREADS', 'A')"
    # One write a line: pieces of it would mix with another process's where Python does not buffer.
    line = f"{{[os.environ[name] for name in {seen}]}} {{sys.argv[1:]}} {{os.getcwd()}}\\n"
    started.write_text(f'import os, sys\nsys.stdout.write(f"{line}")')
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        environment = {**os.environ, "MASTER_PORT": str(free.getsockname()[1]), "PYTHONPATH": ""}
    machines = [
        subprocess.Popen(["bash", script, rank, "127.0.0.1"], stdout=subprocess.PIPE, text=True, env=environment)
        for rank in "01"
    ]
    said = [machine.communicate(timeout=100)[0].splitlines() for machine in machines]
    words = ["fit", *FIT, "--trainer.num_nodes=2", "--trainer.devices=2", "--trainer.accelerator=cpu"]
    words.append(f"--trainer.default_root_dir={tmp_path}/jobs/train")
    assert [sorted(lines) for lines in said] == [
        [f"{[str(rank), '4', '2', '127.0.0.1', '2', 'a  b']} {words} {tmp_path}" for rank in ranks]
        for ranks in ((0, 1), (2, 3))
    ]
    alone = subprocess.run(["bash", script], capture_output=True, text=True, check=False)
    assert "RANK is missing: 0 on the first machine" in alone.stderr


def manifest_of(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return a job of the manifest, its pods, and the lines that these run."""
    main(["submit", "--to=kubernetes", "--container-image=mine:1", *args, "--dry-run"])
    manifest = yaml.safe_load(capsys.readouterr().out)
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert manifest["spec"]["network"] == {"enableDNSHostnames": True}
    (replicated,) = manifest["spec"]["replicatedJobs"]
    # The first pod's name, by which the others find it.
    assert (manifest["metadata"]["name"], replicated["name"]) == ("train", "nodes")
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert (container["image"], container["command"]) == ("mine:1", ["bash", "-c"])
    (script,) = container["args"]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=10)
    return job, job["template"]["spec"], script.splitlines()


def test_the_manifest_gives_each_node_a_pod_that_finds_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    job, pod, lines = manifest_of(
        capsys, *BASE, *FIT, "--cpus-per-task=6", "--volume-claim=mine", "--setup=export A='1\n  2'", "--interface=eth0"
    )
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (2, 2, "Indexed")
    assert (job["activeDeadlineSeconds"], job["backoffLimit"], pod["restartPolicy"]) == (7200, 0, "Never")
    assert pod["containers"][0]["resources"] == {"requests": {"cpu": 24}, "limits": {"nvidia.com/gpu": 4}}
    volumes = {each["name"]: each for each in pod["volumes"]}
    mounted = {each["mountPath"]: volumes[each["name"]] for each in pod["containers"][0]["volumeMounts"]}
    assert mounted["/dev/shm"]["emptyDir"] == {"medium": "Memory"}
    assert mounted["/jobs"]["persistentVolumeClaim"] == {"claimName": "mine"}
    assert {"export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0", "export A='1", "  2'"} <= set(lines)
    *_, command = lines
    meeting = '--node-rank "$JOB_COMPLETION_INDEX" --master-addr train-nodes-0-0.train --master-port 29500'
    assert f"exec python -m torch.distributed.run --nnodes 2 --nproc-per-node 4 {meeting} -m lightning_sp" in command
    assert "--trainer.num_nodes=2 --trainer.devices=4 --trainer.accelerator=gpu" in command
    assert command.endswith("--trainer.default_root_dir=/jobs/train")


def test_a_manifest_on_processors_asks_for_no_more_than_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    job, pod, lines = manifest_of(capsys, "--tasks-per-node=2", *FIT, "--trainer.default_root_dir=mine")
    assert job.keys() == {"completionMode", "parallelism", "completions", "backoffLimit", "template"}
    assert "resources" not in pod["containers"][0]
    assert [each["name"] for each in pod["volumes"]] == ["shared-memory"]
    assert lines[-1].count("default_root_dir") == 1


def test_words_and_directories_survive_the_shell(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "two words; $HOME"
    script = script_of(capsys, *BASE, *FIT, f"--directory={folder}", "--trainer.profiler=$(two) 'words'")
    assert "--trainer.profiler=$(two) 'words'" in trained_words(script)
    (line,) = [line for line in script.splitlines() if line.startswith("root=")]
    done = subprocess.run(
        ["bash", "-c", f'SLURM_JOB_ID=7; {line}; printf %s "$root"'], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{folder}/7"


def test_what_agrees_is_accepted_and_not_said_twice(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--trainer.num_nodes=2", "--trainer.devices=[0,1,2,3]", "--trainer.accelerator=cuda"]
    words = trained_words(script_of(capsys, *BASE, *FIT, *given))
    assert [sum(word.startswith(f"--trainer.{key}") for word in words) for key in ("num_nodes", "devices")] == [1, 1]


def test_a_job_that_is_put_back_prefers_its_own_checkpoint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = script_of(capsys, *BASE, *FIT, "--ckpt_path=start.ckpt", f"--trainer.default_root_dir={tmp_path / 'root'}")
    start, end = script.index("resume=()"), script.index("# Where one task fails")
    (root,) = [line for line in script.splitlines() if line.startswith("root=")]
    ask = f'set -e\n{root}\n{script[start:end]}\necho "${{resume[@]}}"'
    resumed = []
    for name in (None, "hpc_ckpt_1.ckpt"):
        if name:
            (tmp_path / "root").mkdir()
            (tmp_path / "root" / name).touch()
        resumed.append(subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True).stdout.strip())
    assert resumed == ["", "--ckpt_path=hpc"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--trainer.num_nodes=1"], "trainer.num_nodes=1 in the configuration does not agree with --nodes 2"),
        (["--trainer.devices=2"], "trainer.devices='2' in the configuration does not agree with --gpus-per-node 4"),
        (["--trainer.devices=[0,1]"], "--trainer.devices=4 after the configuration"),
        (["--trainer.accelerator=cpu"], "trainer.accelerator='cpu' in the configuration does not agree"),
        (["--time=soon"], "--time 'soon' must be minutes, minutes:seconds, hours:minutes:seconds"),
        (["--time=2"], "--time 2 is 120 seconds, of which --signal-seconds 120"),
        (["--nodes=0"], "--nodes 0 must be a whole number, at least 1"),
        (["--gpus-per-node=0"], "--gpus-per-node 0 must be a whole number, at least 1"),
        (["--tasks-per-node=4"], "not allowed with argument --gpus-per-node"),
        (["--job-name=interactive"], "--job-name interactive cannot be used"),
        (["--job-name=bash"], "Lightning takes jobs named bash or interactive for a shell"),
        (["--job-name=my job"], "must consist of letters, digits"),
        (["--interface=eth0; rm"], "must be the name of a network interface"),
        (["--sbatch=--nodes=7"], "--sbatch=--nodes=7 is for this command to write"),
        (["--directory=jobs\nrm -r ~"], "rm -r ~' has characters that are no text: rename it"),
        (["--sbatch=long"], "--sbatch 'long' must be one option of sbatch"),
        (["--sbatch=--array=1-4"], "tasks of an array would share what Lightning calls a job"),
        (["--sbatch=-a1-4"], "Submit each training as a job of its own"),
        (["--sbatch=--cpus-per-task=4"], "is for this command to write: use --cpus-per-task"),
        (["--partition=gpu; rm"], "--partition 'gpu; rm' must be a name that the cluster knows as partition"),
        (["--mem", "64G"], "--mem is an option of sbatch: write --sbatch=--mem=64G"),
        (["--exclusive"], "--exclusive is an option of sbatch: write --sbatch=--exclusive"),
        (["--account="], "--account '' must be a name that the cluster knows as account"),
        (["--container-image=a b"], "--container-image 'a b' must be an image: a file such as torch.sif (Apptainer)"),
        (["--volume-claim=mine"], "--volume-claim has no use with --to slurm: leave it out"),
        (["--to=torchrun"], "--time has no use with --to torchrun: leave it out"),
        (["--to=kubernetes", "--partition=gpu"], "--partition has no use with --to kubernetes: leave it out"),
        (["--to=kubernetes"], "--to kubernetes needs --container-image, with this package"),
        (["--to=kubernetes", "--container-image=a", "--job-name=My.job"], "'My.job' must be a name of Kubernetes"),
        (["--trainer.max_epoks=3"], "did you mean"),
        (["--trainer.strategy=sparse_tpok"], "(did you mean 'sparse_topk'?)"),
    ],
)
def test_what_makes_no_sense_is_refused(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refusal(capsys, *BASE, *FIT, *args)


def test_a_limit_must_be_said_on_slurm(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--time is missing: the limit of the job" in refusal(capsys, "--tasks-per-node=1", *FIT)


def test_devices_must_be_said(capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(capsys, "--time=60", *FIT)
    assert "one of the arguments --gpus-per-node --tasks-per-node is required" in message


def test_an_unknown_key_of_a_configuration_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "fit.yaml").write_text("trainer:\n  max_epoch: 3\n")
    message = refusal(capsys, *BASE, *FIT, "--config=fit.yaml")
    assert "'trainer.max_epoch' is unknown; did you mean 'trainer.max_epochs'" in message


def test_a_leftover_of_another_job_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "hpc_ckpt_3.ckpt").touch()
    message = refusal(capsys, *BASE, *FIT, f"--trainer.default_root_dir={tmp_path}")
    assert "holds hpc_ckpt_3.ckpt, from which Lightning would go on without being asked" in message


def test_a_missing_sbatch_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "sbatch is not to be found: run this where the cluster's commands are" in refusal(capsys, *BASE, *FIT)


def test_what_sbatch_says_is_passed_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid account' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), os.environ["PATH"]]))
    assert "sbatch: error: invalid account" in refusal(capsys, *BASE, *FIT)


PAGES = "".join(page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
SHOWN = sorted(set(re.findall(r"^lightning-sparse submit (.*)$", PAGES, re.MULTILINE)))


@pytest.mark.parametrize("command", SHOWN)
def test_a_command_of_the_pages_is_taken_as_it_stands_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    model, strategy = "tests.cli.submit.models.Slow", "sparse_topk"
    (tmp_path / "fit.yaml").write_text(f"model: {model}\ntrainer:\n  strategy: {strategy}\n")
    main(["submit", *shlex.split(command.removesuffix("--dry-run")), "--dry-run"])
    assert "fit --config fit.yaml" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("1", 60), ("90:30", 5430), ("0:0:1", 1), ("2:00:00", 7200), ("1-0", 86400), ("1-2:3", 93780), ("1-2:3:4", 93784)],
)
def test_times_are_read_as_slurm_reads_them(time: str, seconds: int) -> None:
    assert parse_time(time) == seconds


@pytest.mark.parametrize("time", ["", "0", "1:2:3:4", "1-", "-1", "1.5", "2h", "00:00:00", "infinite", "1-1-1"])
def test_other_times_are_refused(time: str) -> None:
    with pytest.raises(ValueError, match="must be minutes"):
        parse_time(time)


STEP = {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "train", "SLURM_STEP_ID": "0"}


def test_a_process_that_would_wait_forever_is_refused() -> None:
    without_srun = {key: value for key, value in STEP.items() if key != "SLURM_STEP_ID"}
    with pytest.raises(RuntimeError, match="put srun before the command"):
        check_step(without_srun)
    with pytest.raises(RuntimeError, match="SLURM_JOB_NAME='interactive' in a job of 2 tasks"):
        check_step({**STEP, "SLURM_JOB_NAME": "interactive"})


@pytest.mark.parametrize(
    "environment", [{}, STEP, {"SLURM_NTASKS": "1"}, {"SLURM_NTASKS": "4", "SLURM_JOB_NAME": "interactive"}]
)
def test_others_may_start(environment: dict[str, str]) -> None:
    check_step(environment)
