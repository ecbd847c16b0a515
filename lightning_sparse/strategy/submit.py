"""The command ``lightning-sparse submit``: checks that a fit and its job agree, writes the job's script, submits it."""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from string import Template
from typing import Any, Optional

from jsonargparse import Namespace
from jsonargparse.typing import PositiveInt

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
_USAGE = "%(prog)s --nodes N --gpus-per-node N --time LIMIT [OPTION ...] (--config FILE ... | -- COMMAND ...)"
# Options of sbatch that are passed on under their own names.
_OF_SBATCH = ("partition", "account", "qos", "constraint", "mem", "nodelist", "exclude", "reservation", "dependency")
_SHELLS = ("bash", "interactive")  # jobs of these names are not SLURM's to Lightning
_SIGNAL_SLACK = 60  # seconds by which SLURM may send the signal early
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


def submit(args: Sequence[str], read: Callable[[Sequence[str]], Namespace]) -> None:
    """Run the command on what follows ``submit``; ``read`` tells what arguments of a fit say, without defaults."""
    parser = argparse.ArgumentParser(
        prog="lightning-sparse submit",
        usage=_USAGE,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for option in fields(Job):
        parser.add_argument(f"--{option.name.replace('_', '-')}", **option.metadata)
    for name in _OF_SBATCH:
        passed = f"--{name}={{}}".format
        parser.add_argument(f"--{name}", dest="sbatch", action="append", type=passed, help="as for sbatch")
    ends = args.index("--") if "--" in args else len(args)
    words, command = list(args[:ends]), args[ends + 1 :]
    for at in reversed(range(len(words) - 1)):
        if words[at] == "--sbatch":  # argparse would take the option that follows it for one of its own
            words[at : at + 2] = [f"--sbatch={words[at + 1]}"]
    options, fit_args = parser.parse_known_args(words)
    try:
        job = Job(**vars(options))
        if command and fit_args:
            raise ValueError(f"{' '.join(fit_args)} cannot go together with a command after --: give the command alone")
        _send(job, _script_of_command(job, command) if command else _script_of_fit(job, fit_args, read(fit_args)))
    except (OSError, ValueError) as error:
        parser.error(str(error))


def _text(pattern: str, meaning: str) -> Callable[[str], str]:
    """Return what reads an option that matches a pattern."""

    def read(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"{text!r} must be {meaning}")
        return text

    return read


def parse_nodes(nodes: str) -> tuple[int, int]:
    """Return the fewest and the most nodes that a job takes.

    >>> parse_nodes("4"), parse_nodes("2:8")
    ((4, 4), (2, 8))
    """
    fewest, _, most = nodes.partition(":")
    if not re.fullmatch(r"[0-9]+(:[0-9]+)?", nodes) or not 1 <= int(fewest) <= int(most or fewest):
        raise argparse.ArgumentTypeError(f"{nodes!r} must be a number, at least 1, or the fewest and the most, as 2:8")
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
        raise ValueError(f"--time {time!r} must be above 0, as SLURM takes it, such as 90, 2:00:00 or 1-12")
    return seconds


def _folder(path: str) -> Path:
    return Path(path).resolve()


def _option(**argument: Any) -> Any:
    return field(metadata=argument)


@dataclass(frozen=True)
class Job:
    """What SLURM is asked for; each field is an option of the command."""

    nodes: tuple[int, int] = _option(default="1", type=parse_nodes, help="machines (default 1), or a range such as 2:8")
    gpus_per_node: Optional[int] = _option(type=PositiveInt, help="GPUs of each node, with one process for each")
    tasks_per_node: Optional[int] = _option(type=PositiveInt, help="or processes, to train on the node's processors")
    time: str = _option(required=True, help="limit: minutes, hours:minutes:seconds, days-hours, as for sbatch")
    job_name: str = _option(
        default="train",
        type=_text(r"(?!(bash|interactive)$)[\w.-]+", "a word, and not bash or interactive, to Lightning a shell"),
        help="also the name of script and log (default train)",
    )
    cpus_per_task: Optional[int] = _option(type=PositiveInt, help="processors of each process; most clusters' is one")
    interface: Optional[str] = _option(
        type=_text(r"[\w.,@-]+", "such as ib0; NCCL alone understands --setup 'export NCCL_SOCKET_IFNAME=^docker0'"),
        help="network interface for gradients, such as ib0; found by gloo and NCCL if left out",
    )
    signal_seconds: int = _option(default=120, type=PositiveInt, help="kept before the limit to save (default 120)")
    sbatch: list[str] = _option(
        action="append",
        default=[],
        metavar="OPTION",
        type=_text(
            r"(?!--(nodes|ntasks|gpus|gres|time|signal|cpus|array)|-[Nntca])-.*",
            "one such as --exclusive; nodes, tasks, devices, processors, time and signal are options of this command,"
            " and tasks of an array would share checkpoints and a port: submit each training as a job of its own",
        ),
        help="any other, such as --sbatch=--exclusive",
    )
    setup: list[str] = _option(
        action="append", default=[], metavar="COMMAND", help="run first, such as 'module load cuda/12.4'"
    )
    python: str = _option(default=sys.executable, help="that trains, such as 'apptainer exec --nv torch.sif python'")
    directory: Path = _option(type=_folder, default="jobs", help="for scripts, logs and checkpoints (default jobs)")
    dry_run: bool = _option(action="store_true", help="check everything and print the script, but submit nothing")

    def __post_init__(self) -> None:
        if (self.gpus_per_node is None) == (self.tasks_per_node is None):
            raise ValueError("one of --gpus-per-node --tasks-per-node must be given")
        for text in (str(Path.cwd()), str(self.directory), *self.sbatch):
            if not text.isprintable():  # a line of the script would end there, and a shell would run the rest
                raise ValueError(f"{text!r} has characters that are no text: rename it, or leave them out")
        limit = parse_time(self.time)
        if limit <= self.signal_seconds + _SIGNAL_SLACK:
            raise ValueError(
                f"--time {self.time} is {limit} seconds, of which --signal-seconds {self.signal_seconds}, and"
                f" {_SIGNAL_SLACK} by which SLURM may be early, are kept for saving: ask for more time, or keep less"
            )

    @property
    def devices(self) -> int:
        """Processes of each node."""
        return self.gpus_per_node or self.tasks_per_node or 0

    @property
    def is_elastic(self) -> bool:
        """Whether it may start on several numbers of nodes."""
        return self.nodes[0] < self.nodes[1]


def _script_of_fit(job: Job, args: Sequence[str], given: Namespace) -> str:
    """Return the script of a fit, completed by what the job decides; refuse arguments that say otherwise."""
    trainer, words = given.get("trainer") or Namespace(), list(args)
    if job.is_elastic:
        _check_elastic(given, job)
        words += [] if given.get("ckpt_path") else ["--ckpt_path=last"]
    decided = {
        **({} if job.is_elastic else {"num_nodes": (job.nodes[0], "--nodes")}),
        "devices": (job.devices, "--gpus-per-node" if job.gpus_per_node else "--tasks-per-node"),
        # Said even so: with "auto" a node whose driver is broken would train on its processors, without a word.
        "accelerator": ("gpu", "--gpus-per-node") if job.gpus_per_node else ("cpu", "--tasks-per-node"),
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
    root = trainer.get("default_root_dir")
    leftovers = [] if root is None else sorted(Path(root).glob("hpc_ckpt_*.ckpt"))
    if leftovers:
        raise ValueError(
            f"trainer.default_root_dir={str(root)!r} holds {leftovers[-1].name}, from which Lightning would go on"
            " without being asked: leave trainer.default_root_dir out, and every job gets a directory of its own. To go"
            " on from the file, move it, and give --ckpt_path its new place"
        )
    line = shlex.join([*shlex.split(job.python), "-u", "-m", "lightning_sparse", "fit", *words])
    line += ' --trainer.default_root_dir="$root"'
    if job.is_elastic:
        return _script(job, f'{line} --trainer.num_nodes="$SLURM_JOB_NUM_NODES"', root)
    if given.get("ckpt_path") is None:
        return _script(job, line, root)
    return _script(job, f'{line} "${{resume[@]}}"', root, _RESUME)


def _script_of_command(job: Job, command: Sequence[str]) -> str:
    """Return the script of a command that makes a Trainer of its own."""
    told = '\n# For the Trainer of the command: default_root_dir=os.environ["JOB_ROOT"]\nexport JOB_ROOT="$root"'
    if job.is_elastic:
        told += '\n# num_nodes=int(os.environ["SLURM_JOB_NUM_NODES"]), and fit(ckpt_path="last")'
    return _script(job, shlex.join(command), None, told)


def _check_elastic(given: Namespace, job: Job) -> None:
    """Refuse what cannot start again on other numbers of nodes, and go on."""
    trainer = given.get("trainer") or Namespace()
    if trainer.get("num_nodes") is not None:
        raise ValueError(
            f"trainer.num_nodes={trainer.num_nodes!r} in the configuration fixes what --nodes leaves open: leave it"
            " out, and it is as many as the job gets"
        )
    if given.get("ckpt_path") not in (None, "last"):
        raise ValueError(
            f"--ckpt_path={given.ckpt_path} would win over what the job has saved before it starts again: leave it out,"
            " and put the file into the dirpath of ModelCheckpoint"
        )
    callbacks = trainer.get("callbacks") or []
    arguments = [each.get("init_args") or {} for each in (callbacks if isinstance(callbacks, list) else [callbacks])]
    if not any(each.get("every_n_train_steps") or each.get("train_time_interval") for each in arguments):
        raise ValueError(
            "a job that starts again on other nodes goes on from its last checkpoint, but nothing saves one in"
            " mid-epoch: add --trainer.callbacks+=ModelCheckpoint --trainer.callbacks.every_n_train_steps=500, or"
            " train_time_interval"
        )


def _meaning(key: str, chosen: Any) -> Any:
    """Return what a setting of the Trainer comes to: a kind of hardware, or a number."""
    if key == "accelerator":
        return "gpu" if chosen in ("gpu", "cuda") else chosen
    if isinstance(chosen, str) and "," in chosen:
        chosen = [word for word in chosen.split(",") if word.strip()]
    return len(chosen) if isinstance(chosen, (list, tuple)) else int(chosen)


def _script(job: Job, line: str, root: Optional[str], before: str = "") -> str:
    """Compose what ``sbatch`` takes, which runs a line of shell in each task."""
    directory, each = shlex.quote(str(job.directory)), job.cpus_per_task or 1
    options, lines = [*job.sbatch], []
    if job.gpus_per_node:  # of each task, Lightning could not pick its own among those that all of them see
        options.append(f"--gpus-per-node={job.devices}")
    if job.is_elastic:
        options.append(f"--cpus-per-task={job.devices * each}")
        line = f"--ntasks-per-node={job.devices} --cpus-per-task={each} {line}"
    else:  # Lightning refuses --ntasks without it
        options.append(f"--ntasks-per-node={job.devices}")
        options += [] if job.cpus_per_task is None else [f"--cpus-per-task={each}"]
    if job.interface is not None:
        lines.append("# The network that gradients travel on; left alone, a slower one may be found first.")
        lines.append(f"export GLOO_SOCKET_IFNAME={job.interface} NCCL_SOCKET_IFNAME={job.interface}")
    if job.cpus_per_task is not None:
        # On processors one is left to select and exchange.
        threads = each if job.gpus_per_node else max(1, each - 1)
        lines.append("# srun does not take it from sbatch since SLURM 22.05.")
        lines.append(f"export SRUN_CPUS_PER_TASK={each} OMP_NUM_THREADS={threads}")
    return _SCRIPT.substitute(
        name=job.job_name,
        start=shlex.quote(str(Path.cwd())),
        directory=directory,
        time=job.time,
        nodes=f"{job.nodes[0]}-{job.nodes[1]}" if job.is_elastic else job.nodes[0],
        signal_seconds=job.signal_seconds,
        options="\n".join(f"#SBATCH {option}" for option in options),
        root=f'{directory}/"$SLURM_JOB_ID"' if root is None else shlex.quote(str(root)),
        lines="\n".join([before, *lines, *job.setup]),
        line=line,
    )


_SCRIPT = Template("""\
#!/bin/bash
# Written by lightning-sparse submit; sbatch takes it as it is.
#SBATCH --job-name=$name
#SBATCH --chdir=$start
#SBATCH --output=$directory/%x-%j.log
#SBATCH --time=$time
#SBATCH --nodes=$nodes
# One task for each device, which srun makes where nodes are open: asked for here, SLURM would take the fewest.
$options
# Before the time is over Lightning saves, and puts the job back; then it goes on, in the same log.
#SBATCH --signal=SIGUSR1@$signal_seconds
#SBATCH --requeue
#SBATCH --open-mode=append

set -eo pipefail
# Lightning goes on from any hpc_ckpt_*.ckpt in this directory, whichever job has left it.
root=$root
# Lightning would read names such as r[1-2]n[1-4] wrongly.
MASTER_ADDR=$$(scontrol show hostnames "$$SLURM_JOB_NODELIST" | sed -n 1p)
export MASTER_ADDR$lines

# Where one task fails, the others would wait for it until they time out.
srun --kill-on-bad-exit=1 $line
""")
_RESUME = """
# The checkpoint that the command names would win over the one that this job has saved when it was put back.
resume=()
if compgen -G "$root/hpc_ckpt_*.ckpt" > /dev/null; then
    resume=(--ckpt_path=hpc)
fi"""


def _send(job: Job, script: str) -> None:
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
    is_shell, in_step = name in _SHELLS, "SLURM_STEP_ID" in environment  # in a shell Lightning starts the processes
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
