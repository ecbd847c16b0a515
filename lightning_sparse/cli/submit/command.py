"""The command ``lightning-sparse submit``: its options and its output."""

import argparse
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from lightning_sparse.cli.submit.job import Job, Training
from lightning_sparse.cli.submit.kubernetes import job_set
from lightning_sparse.cli.submit.nodes import with_share_of_a_node
from lightning_sparse.cli.submit.script import job_script
from lightning_sparse.cli.submit.torchrun import torchrun_script
from lightning_sparse.cli.submit.training import fit_training

_DESCRIPTION = """\
Send a fit to SLURM, to Kubernetes, or to machines where you start it by hand: check that nodes, tasks and devices agree
with its configuration, write the job's script or manifest, submit it.

A job of SLURM that runs out of time saves, goes back into the queue and continues where it was."""
_EPILOG = """\
--model, --data, --trainer, --config, --ckpt_path and all else of "lightning-sparse fit" say what to train. Nodes,
devices and accelerator need not be among them; where they are, they must agree. A script with a Trainer of its own
comes last, after "--"; it is run as it is. Examples:

  lightning-sparse submit --nodes 4 --gpus-per-node 8 --time 2:00:00 --config fit.yaml --dry-run
  lightning-sparse submit --nodes 4 --tasks-per-node 1 --cpus-per-task 8 --time 1-0 --interface ib0 --config fit.yaml
  lightning-sparse submit --to torchrun --nodes 2 --gpus-per-node 8 --config fit.yaml
  lightning-sparse submit --to kubernetes --nodes 2 --gpus-per-node 8 --container-image mine:1 --config fit.yaml
  lightning-sparse submit --nodes 4 --gpus-per-node 8 --time 2:00:00 -- python train.py --lr 0.1"""
# Options of sbatch that people write as if they were ours.
_OF_SBATCH = {
    *("--begin", "--comment", "--constraint", "--dependency", "--error", "--exclude", "--exclusive", "--export"),
    *("--gres", "--licenses", "--mail-type", "--mail-user", "--mem", "--mem-per-cpu", "--mem-per-gpu", "--nice"),
    *("--nodelist", "--output", "--reservation", "--tmp"),
}
# What only some of them have a use for; nothing that is asked for is left out without a word.
_FOR_SLURM = {"partition", "account", "qos", "sbatch", "signal_seconds"}
_WITHOUT_USE = {
    "slurm": {"volume_claim"},
    "torchrun": {"time", "container_image", "volume_claim", *_FOR_SLURM},
    "kubernetes": {"module", "conda", *_FOR_SLURM},
}


# conda is a function of the shell, which a job's has not defined.
_CONDA = 'source "$(conda info --base)/etc/profile.d/conda.sh"'


def submit(args: Sequence[str]) -> None:
    """Run the command.

    Args:
        args: what follows the word ``submit``.

    Raises:
        SystemExit: with status 2 and a message, for arguments that make no sense, or if sbatch or kubectl is missing or
            refuses.
    """
    parser = _parser()
    ends = args.index("--") if "--" in args else len(args)
    options, fit_args = parser.parse_known_args(_joined(args[:ends]))
    try:
        _check_use(parser, options)
        _check_words(fit_args)
        _submit(options, fit_args, tuple(args[ends + 1 :]))
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
    add("--to", choices=tuple(_WITHOUT_USE), default="slurm", help="where it goes (default slurm)")
    add("--nodes", type=int, default=1, help="machines (default 1)")
    devices = parser.add_mutually_exclusive_group(required=True)
    devices.add_argument("--gpus-per-node", type=int, help="GPUs of each node, with one process for each")
    devices.add_argument("--tasks-per-node", type=int, help="processes on each node, to train on its processors")
    add("--time", help="limit: minutes, hours:minutes:seconds, days-hours, as for sbatch; SLURM has to have one")
    add("--job-name", default="train", help="also the name of script and log (default train)")
    add("--cpus-per-task", type=int, help="processors of each process; its share of a node, by sinfo, if left out")
    add("--partition", help="partition that the job waits in")
    add("--account", help="account that pays")
    add("--qos", help="quality of service")
    add("--container-image", help="run in it: on SLURM torch.sif or docker://... by Apptainer, others by Pyxis")
    add("--volume-claim", metavar="NAME", help="of Kubernetes, for checkpoints and logs; mounted as /jobs")
    add("--module", action="append", default=[], metavar="NAME", help="load it before training, such as cuda/12.4")
    add("--conda", metavar="NAME", help="activate this environment before training, and take its python")
    add("--interface", help="network interface for gradients, such as ib0; found by gloo and NCCL if left out")
    add("--signal-seconds", type=int, default=120, help="kept before the limit to save a checkpoint (default 120)")
    add("--sbatch", action="append", default=[], metavar="OPTION", help="one more, such as --sbatch=--constraint=a100")
    add(
        "--setup",
        action="append",
        default=[],
        metavar="COMMAND",
        help="run before training, such as 'export NCCL_DEBUG=INFO'",
    )
    add("--directory", type=Path, default=Path("jobs"), help="for scripts, logs and checkpoints (default jobs)")
    add("--dry-run", action="store_true", help="check everything and print the script, but submit nothing")
    return parser


def _check_use(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    for name in sorted(_WITHOUT_USE[options.to]):
        if getattr(options, name) != parser.get_default(name):
            raise ValueError(f"--{name.replace('_', '-')} has no use with --to {options.to}: leave it out")


def _joined(args: Sequence[str]) -> list[str]:
    """Join ``--sbatch`` and the option that follows it, which argparse would take for one of its own."""
    joined: list[str] = []
    for word in args:
        if joined and joined[-1] == "--sbatch":
            joined[-1] = f"--sbatch={word}"
        else:
            joined.append(word)
    return joined


def _check_words(fit_args: Sequence[str]) -> None:
    for word, following in zip(fit_args, [*fit_args[1:], "-"]):
        name, has_value, value = word.partition("=")
        if name in _OF_SBATCH:
            value = value if has_value or following.startswith("-") else following
            raise ValueError(f"{name} is an option of sbatch: write --sbatch={name}{value and f'={value}'}")


def _training(job: Job, fit_args: list[str], command: tuple[str, ...]) -> Training:
    if not command:
        return fit_training(fit_args, job)
    if fit_args:
        raise ValueError(f"{' '.join(fit_args)} cannot go together with a command after --: give the command alone")
    return Training(command, is_own=True)


def _submit(options: argparse.Namespace, fit_args: list[str], command: tuple[str, ...]) -> None:
    job = _job(options)
    if options.to == "slurm":
        job = with_share_of_a_node(job)
    compose, ending, client = {
        "slurm": (job_script, "sbatch", ["sbatch", "--parsable"]),
        "torchrun": (torchrun_script, "sh", []),
        "kubernetes": (job_set, "yaml", ["kubectl", "create", "-f"]),
    }[options.to]
    text = compose(job, _training(job, fit_args, command))
    if options.to == "slurm" or not options.dry_run:
        # SLURM makes no folder for the log, and runs nothing where it cannot write one.
        job.directory.mkdir(parents=True, exist_ok=True)
    if options.dry_run:
        print(text, end="")
        return
    if client and shutil.which(client[0]) is None:
        raise ValueError(
            f"{client[0]} is not to be found: run this where the cluster's commands are, or print what would be"
            " submitted by --dry-run"
        )
    path = job.directory / f"{job.name}.{ending}"
    path.write_text(text)
    if not client:
        print(f"Written. On each machine: bash {shlex.quote(str(path))} RANK FIRST, as its first lines say")
        return
    done = subprocess.run([*client, str(path)], capture_output=True, text=True, check=False)  # noqa: S603  # the user's own
    if done.returncode:
        raise ValueError(f"{client[0]} refuses {path}: {done.stderr.strip()}")
    if options.to == "kubernetes":
        print(
            f"{done.stdout.strip()} with {path}; its log: kubectl logs -f -l jobset.sigs.k8s.io/jobset-name={job.name}"
        )
        return
    number = done.stdout.strip().partition(";")[0]  # of several clusters it also names one
    print(f"Job {number} is submitted with {path}; its log is {job.directory / f'{job.name}-{number}.log'}")


def _job(options: argparse.Namespace) -> Job:
    on_gpus = options.gpus_per_node is not None
    asked = {name: getattr(options, name) for name in ("partition", "account", "qos")}
    conda = [] if options.conda is None else [_CONDA, f"conda activate {shlex.quote(options.conda)}"]
    modules = [f"module load {shlex.quote(module)}" for module in options.module]
    return Job(
        nodes=options.nodes,
        tasks_per_node=options.gpus_per_node if on_gpus else options.tasks_per_node,
        on_gpus=on_gpus,
        time=options.time,
        name=options.job_name,
        start=Path.cwd(),
        directory=options.directory.resolve(),
        signal_seconds=options.signal_seconds,
        interface=options.interface,
        cpus_per_task=options.cpus_per_task,
        queue={name: value for name, value in asked.items() if value is not None},
        container_image=options.container_image,
        volume_claim=options.volume_claim,
        options=tuple(options.sbatch),
        setup=(*modules, *conda, *options.setup),
        has_own_python=bool(conda),
    ).checked()
