"""The command ``lightning-sparse submit``: checks that a fit and its job agree, writes the job's script, submits it."""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

_DESCRIPTION = """\
Send a fit to SLURM: check that nodes, tasks and devices agree with its configuration, write the job's script, submit.
A job that runs out of time saves, goes back into the queue and continues where it was."""
_EPILOG = """\
--model, --data, --trainer, --config, --ckpt_path and all else of "lightning-sparse fit" say what to train. Nodes,
devices and accelerator need not be among them; where they are, they must agree. A script with a Trainer of its own
comes last, after "--"; it is run as it is. Examples:

  lightning-sparse submit --nodes 4 --gpus-per-node 8 --time 2:00:00 --config fit.yaml --dry-run
  lightning-sparse submit --nodes 4 --tasks-per-node 1 --cpus-per-task 8 --time 1-0 --interface ib0 --config fit.yaml
  lightning-sparse submit --nodes 2:8 --gpus-per-node 8 --time 1-0 --config fit.yaml --config saving.yaml
  lightning-sparse submit --nodes 4 --gpus-per-node 8 --time 2:00:00 -- python train.py --lr 0.1"""
# Options of sbatch that are passed on under their own names.
_OF_SBATCH = ("partition", "account", "qos", "constraint", "mem", "nodelist", "exclude", "reservation", "dependency")
_WRITTEN_HERE = ("--nodes", "-N", "--ntasks", "-n", "--gpus", "--gres", "--time", "-t", "--signal", "--cpus", "-c")
_RESERVED = ("bash", "interactive")  # jobs of these names are not SLURM's to Lightning
_SIGNAL_SLACK = 60  # seconds by which SLURM may send the signal early
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


def submit(args: Sequence[str], read: Callable[[Sequence[str]], Namespace]) -> None:
    """Run the command on what follows ``submit``; ``read`` tells what arguments of a fit say, without defaults."""
    parser = _parser()
    ends = args.index("--") if "--" in args else len(args)
    words, command = list(args[:ends]), args[ends + 1 :]
    for at in reversed(range(len(words) - 1)):
        if words[at] == "--sbatch":  # argparse would take the option that follows it for one of its own
            words[at : at + 2] = [f"--sbatch={words[at + 1]}"]
    job, fit_args = parser.parse_known_args(words)
    job.on_gpus = job.gpus_per_node is not None
    job.devices = job.gpus_per_node if job.on_gpus else job.tasks_per_node
    job.devices_option = f"--{'gpus' if job.on_gpus else 'tasks'}-per-node {job.devices}"
    passed = {name: getattr(job, name) for name in _OF_SBATCH}
    job.options = [*(f"--{name}={value}" for name, value in passed.items() if value is not None), *job.sbatch]
    job.directory = job.directory.resolve()
    try:
        _check(job)
        if command and fit_args:
            raise ValueError(f"{' '.join(fit_args)} cannot go together with a command after --: give the command alone")
        job.is_own, job.root, job.has_checkpoint = bool(command), None, False
        _send(job, _script(job, command or _agreed(fit_args, read(fit_args), job)))
    except (OSError, ValueError) as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-sparse submit",
        usage="%(prog)s --nodes N --gpus-per-node N --time LIMIT [OPTION ...] (--config FILE ... | -- COMMAND ...)",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nodes", default="1", help="machines (default 1), or the fewest and the most that it starts on, such as 2:8")
    devices = parser.add_mutually_exclusive_group(required=True)
    devices.add_argument("--gpus-per-node", type=int, help="GPUs of each node, with one process for each")
    devices.add_argument("--tasks-per-node", type=int, help="processes on each node, to train on its processors")
    add("--time", required=True, help="limit: minutes, hours:minutes:seconds, days-hours, as for sbatch")
    add("--job-name", default="train", help="also the name of script and log (default train)")
    add("--cpus-per-task", type=int, help="processors of each process; left out, most clusters give it one")
    add("--interface", help="network interface for gradients, such as ib0; found by gloo and NCCL if left out")
    add("--signal-seconds", type=int, default=120, help="kept before the limit to save a checkpoint (default 120)")
    for name in _OF_SBATCH:
        add(f"--{name}", help="as for sbatch")
    add("--sbatch", action="append", default=[], metavar="OPTION", help="any other, such as --sbatch=--exclusive")
    add("--setup", action="append", default=[], metavar="COMMAND", help="run first, such as 'module load cuda/12.4'")
    add("--python", default=sys.executable, help="that trains, such as 'apptainer exec --nv torch.sif python'")
    add("--directory", type=Path, default=Path("jobs"), help="for scripts, logs and checkpoints (default jobs)")
    add("--dry-run", action="store_true", help="check everything and print the script, but submit nothing")
    return parser


def _check(job: argparse.Namespace) -> None:
    """Refuse what the cluster would refuse, or Lightning would not survive."""
    job.fewest, job.most = parse_nodes(job.nodes)
    job.is_elastic = job.fewest < job.most
    counts = {job.devices_option.split()[0]: job.devices, "--signal-seconds": job.signal_seconds}
    for option, count in {**counts, "--cpus-per-task": job.cpus_per_task}.items():
        if count is not None and count < 1:
            raise ValueError(f"{option} {count} must be a whole number, at least 1")
    if job.job_name in _RESERVED or not re.fullmatch(r"[\w.-]+", job.job_name):
        raise ValueError(
            f"--job-name {job.job_name!r} must be letters, digits, '.', '_' and '-', such as lags-0.01, and neither"
            f" {' nor '.join(_RESERVED)}, which Lightning takes for a shell"
        )
    if job.interface is not None and not re.fullmatch(r"[\w.,@-]+", job.interface):
        raise ValueError(
            f"--interface {job.interface!r} must be the name of a network interface, such as ib0; what only NCCL"
            " understands is set by --setup 'export NCCL_SOCKET_IFNAME=^docker0'"
        )
    for text in (str(Path.cwd()), str(job.directory), *job.options):
        if not text.isprintable():  # a line of the script would end there, and a shell would run the rest
            raise ValueError(f"{text!r} has characters that are no text: rename it, or leave them out")
    for option in job.options:
        _check_option(option)
    limit = parse_time(job.time)
    if limit <= job.signal_seconds + _SIGNAL_SLACK:
        raise ValueError(
            f"--time {job.time} is {limit} seconds, of which --signal-seconds {job.signal_seconds} and up to"
            f" {_SIGNAL_SLACK} more, by which SLURM may be early, are kept for saving: ask for more time, or keep less"
        )


def _check_option(option: str) -> None:
    if not option.startswith("-"):
        raise ValueError(f"--sbatch {option!r} must be one option of sbatch, such as --sbatch=--exclusive")
    if option.startswith(("--array", "-a")):
        raise ValueError(
            f"--sbatch={option} cannot be used: tasks of an array would share checkpoints and a port. Submit each"
            " training as a job of its own, such as in a loop of the shell"
        )
    if option.startswith(_WRITTEN_HERE):
        raise ValueError(
            f"--sbatch={option} is for this command to write, since it must agree with the training: use --nodes,"
            " --gpus-per-node, --tasks-per-node, --cpus-per-task, --time, --signal-seconds"
        )


def parse_nodes(nodes: str) -> tuple[int, int]:
    """Return the fewest and the most nodes that a job takes.

    >>> parse_nodes("4"), parse_nodes("2:8")
    ((4, 4), (2, 8))
    """
    fewest, _, most = nodes.partition(":")
    if not re.fullmatch(r"[0-9]+(:[0-9]+)?", nodes) or not 1 <= int(fewest) <= int(most or fewest):
        raise ValueError(
            f"--nodes {nodes} must be a whole number, at least 1, or the fewest and the most nodes on which the job may"
            " start, such as 2:8"
        )
    return int(fewest), int(most or fewest)


def parse_time(time: str) -> int:
    """Return the seconds of a time limit as SLURM writes it.

    >>> parse_time("2:00:00"), parse_time("90"), parse_time("1-12")
    (7200, 5400, 129600)
    """
    days, *clock = match.groups() if (match := _TIME.fullmatch(time)) else (None,)
    parts = [int(part) for part in clock if part is not None]
    units = (3600, 60, 1) if days is not None or len(parts) == 3 else (60, 1)
    seconds = int(days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units))
    if not seconds:
        raise ValueError(f"--time {time!r} must be a time as SLURM takes it, above 0, such as 90, 2:00:00 or 1-12")
    return seconds


def _agreed(args: Sequence[str], given: Namespace, job: argparse.Namespace) -> list[str]:
    """Complete the arguments of a fit with what the job decides, and refuse those that say otherwise."""
    trainer, words = given.get("trainer") or Namespace(), list(args)
    if job.is_elastic:
        _check_elastic(given, job)
        words += [] if given.get("ckpt_path") else ["--ckpt_path=last"]
    decided = {
        **({} if job.is_elastic else {"num_nodes": (job.fewest, f"--nodes {job.nodes}")}),
        "devices": (job.devices, job.devices_option),
        # Said even so: with "auto" a node whose driver is broken would train on its processors, without a word.
        "accelerator": ("gpu" if job.on_gpus else "cpu", job.devices_option),
    }
    for key, (value, option) in decided.items():
        chosen = trainer.get(key)
        if chosen in (None, "auto", -1, "-1"):
            words.append(f"--trainer.{key}={value}")
        elif _meaning(key, chosen) != value:
            raise ValueError(
                f"trainer.{key}={chosen!r} in the configuration does not agree with {option}: leave it out, and it is"
                f" set to {value!r}, or say so with --trainer.{key}={value} after the configuration"
            )
    job.root = trainer.get("default_root_dir")
    leftovers = [] if job.root is None else sorted(Path(job.root).glob("hpc_ckpt_*.ckpt"))
    if leftovers:
        raise ValueError(
            f"trainer.default_root_dir={str(job.root)!r} holds {leftovers[-1].name}, from which Lightning would go on"
            " without being asked: leave trainer.default_root_dir out, and every job gets a directory of its own. To go"
            " on from the file, move it, and give --ckpt_path its new place"
        )
    job.has_checkpoint = given.get("ckpt_path") is not None and not job.is_elastic
    return words


def _check_elastic(given: Namespace, job: argparse.Namespace) -> None:
    """Refuse what cannot start again on other numbers of nodes, and go on."""
    trainer = given.get("trainer") or Namespace()
    if trainer.get("num_nodes") is not None:
        raise ValueError(
            f"trainer.num_nodes={trainer.num_nodes!r} in the configuration fixes what --nodes {job.nodes} leaves open:"
            " leave it out, and it is as many as the job gets"
        )
    if given.get("ckpt_path") not in (None, "last"):
        raise ValueError(
            f"--ckpt_path={given.ckpt_path} would win over what a job with --nodes {job.nodes} has saved before it"
            " starts again: leave it out, and put the file into the dirpath of ModelCheckpoint"
        )
    callbacks = trainer.get("callbacks") or []
    arguments = [each.get("init_args") or {} for each in (callbacks if isinstance(callbacks, list) else [callbacks])]
    if not any(each.get("every_n_train_steps") or each.get("train_time_interval") for each in arguments):
        raise ValueError(
            f"a job with --nodes {job.nodes} starts again on other nodes, and goes on from its last checkpoint, but"
            " nothing saves one in the midst of an epoch: add --trainer.callbacks+=ModelCheckpoint"
            " --trainer.callbacks.every_n_train_steps=500, or train_time_interval"
        )


def _meaning(key: str, chosen: Any) -> Any:
    """Return what a setting of the Trainer comes to: a kind of hardware, or a number."""
    if key == "accelerator":
        return "gpu" if chosen in ("gpu", "cuda") else chosen
    if isinstance(chosen, str) and "," in chosen:
        chosen = [word for word in chosen.split(",") if word.strip()]
    return len(chosen) if isinstance(chosen, (list, tuple)) else int(chosen)


def _script(job: argparse.Namespace, words: Sequence[str]) -> str:
    """Compose what ``sbatch`` takes: each line that is easily left out, with its reason."""
    options, lines = [*job.options], list[str]()
    if job.on_gpus:  # of each task, Lightning could not pick its own among those that all of them see
        options.append(f"--gpus-per-node={job.devices}")
    if job.is_own:
        lines.append('# For the Trainer of the command: default_root_dir=os.environ["JOB_ROOT"]')
        lines.append('export JOB_ROOT="$root"')
        if job.is_elastic:
            lines.append('# num_nodes=int(os.environ["SLURM_JOB_NUM_NODES"]), and fit(ckpt_path="last")')
    if job.interface is not None:
        lines.append("# The network that gradients travel on; left alone, a slower one may be found first.")
        lines.append(f"export GLOO_SOCKET_IFNAME={job.interface} NCCL_SOCKET_IFNAME={job.interface}")
    tasks = (
        f"# One task for each device; Lightning refuses --ntasks without it.\n#SBATCH --ntasks-per-node={job.devices}"
    )
    if job.is_elastic:
        tasks = "# Tasks come with srun: if they were asked for here, SLURM would take no more than the fewest nodes."
        options.append(f"--cpus-per-task={job.devices * (job.cpus_per_task or 1)}")
    if job.cpus_per_task is not None:
        options += [] if job.is_elastic else [f"--cpus-per-task={job.cpus_per_task}"]
        # On processors one is left to select and exchange.
        threads = job.cpus_per_task if job.on_gpus else max(1, job.cpus_per_task - 1)
        lines.append("# srun does not take it from sbatch since SLURM 22.05.")
        processors = job.cpus_per_task if job.is_elastic else '"$SLURM_CPUS_PER_TASK"'
        lines.append(f"export SRUN_CPUS_PER_TASK={processors} OMP_NUM_THREADS={threads}")
    directory = shlex.quote(str(job.directory))
    beginning = _BEGINNING.format(
        job=job,
        tasks=tasks,
        nodes=f"{job.fewest}-{job.most}" if job.is_elastic else job.fewest,
        start=shlex.quote(str(Path.cwd())),
        directory=directory,
        options="".join(f"#SBATCH {option}\n" for option in options),
        root=f'{directory}/"$SLURM_JOB_ID"' if job.root is None else shlex.quote(str(job.root)),
    )
    resume = [_RESUME] if job.has_checkpoint else []
    return "\n".join([beginning, *lines, *job.setup, *resume, _command(job, words)])


_BEGINNING = """\
#!/bin/bash
# Written by lightning-sparse submit; sbatch takes it as it is.
#SBATCH --job-name={job.job_name}
#SBATCH --chdir={start}
#SBATCH --output={directory}/%x-%j.log
#SBATCH --time={job.time}
#SBATCH --nodes={nodes}
{tasks}
# Before the time is over Lightning saves, and puts the job back; then it goes on, in the same log.
#SBATCH --signal=SIGUSR1@{job.signal_seconds}
#SBATCH --requeue
#SBATCH --open-mode=append
{options}
set -eo pipefail
# Lightning goes on from any hpc_ckpt_*.ckpt in this directory, whichever job has left it.
root={root}
# Lightning would read names such as r[1-2]n[1-4] wrongly.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
export MASTER_ADDR"""
_RESUME = """
# The checkpoint that the command names would win over the one that this job has saved when it was put back.
resume=()
if compgen -G "$root/hpc_ckpt_*.ckpt" > /dev/null; then
    resume=(--ckpt_path=hpc)
fi"""


def _command(job: argparse.Namespace, words: Sequence[str]) -> str:
    program = [] if job.is_own else [*shlex.split(job.python), "-u", "-m", "lightning_sparse", "fit"]
    line = " ".join(map(shlex.quote, [*program, *words]))
    if not job.is_own:
        line += ' --trainer.default_root_dir="$root"'
        if job.is_elastic:
            line += ' --trainer.num_nodes="$SLURM_JOB_NUM_NODES"'
    if job.has_checkpoint:
        line += ' "${resume[@]}"'
    reason = "# Where one task fails, the others would wait for it until they time out."
    if job.is_elastic:
        line = f"--ntasks-per-node={job.devices} --cpus-per-task={job.cpus_per_task or 1} {line}"
    return f"\n{reason}\nsrun --kill-on-bad-exit=1 {line}\n"


def _send(job: argparse.Namespace, script: str) -> None:
    if job.cpus_per_task is None:
        print("Without --cpus-per-task, such as 8, most clusters give each process one processor", file=sys.stderr)
    # SLURM makes no folder for the log, and runs nothing where it cannot write one.
    job.directory.mkdir(parents=True, exist_ok=True)
    if job.dry_run:
        print(script, end="")
        return
    if shutil.which("sbatch") is None:
        raise ValueError("sbatch is not to be found: run this on the cluster, or print the script by --dry-run")
    path = job.directory / f"{job.job_name}.sbatch"
    path.write_text(script)
    done = subprocess.run(["sbatch", "--parsable", path], capture_output=True, text=True, check=False)  # noqa: S603, S607
    if done.returncode:
        raise ValueError(f"sbatch refuses {path}: {done.stderr.strip()}")
    number = done.stdout.strip().partition(";")[0]  # of several clusters it also names one
    print(f"Job {number} is submitted with {path}; its log is {job.directory / f'{job.job_name}-{number}.log'}")


def check_step(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse to start inside a SLURM job of several tasks where Lightning would wait for them, or not see SLURM."""
    tasks = int(environment.get("SLURM_NTASKS", 1))
    name = environment.get("SLURM_JOB_NAME")
    is_shell, in_step = name in _RESERVED, "SLURM_STEP_ID" in environment  # in a shell Lightning starts the processes
    if tasks > 1 and not in_step and not is_shell:
        raise RuntimeError(
            f"this job has SLURM_NTASKS={tasks} tasks, but this process was not started by srun, so that it would wait"
            " for the others forever: put srun before the command. To use one process, ask for one task."
        )
    if tasks > 1 and in_step and is_shell:
        raise RuntimeError(
            f"SLURM_JOB_NAME={name!r} in a job of {tasks} tasks: Lightning takes jobs of this name for a shell, and"
            " starts every task as if it were alone. Give the job another name, such as --job-name=train"
        )
