"""The script that starts a training by torchrun, as text: the same on each machine."""

import shlex
from typing import Optional

from lightning_sparse.cli.submit.job import Job, Training

PORT = 29500
_ASKED = [
    'rank=${1:?"RANK is missing: 0 on the first machine, then 1, 2, ..."}',
    'first=${2:?"FIRST is missing: name or address of the first machine"}',
]


def torchrun_script(job: Job, training: Training) -> str:
    """Compose what is run on each machine, with its number and the first machine's address."""
    several = job.nodes > 1
    root = None if training.root is not None else str(job.directory / job.name)
    lines = [
        "#!/bin/bash",
        f"# Written by lightning-sparse submit, for {job.nodes} machine{'s' * several} that see this directory:",
        f"#   bash {shlex.quote(str(job.directory / job.name))}.sh RANK FIRST",
        "# RANK is 0 on the first machine, then 1, 2, ...; FIRST is the first one's name or address, on all of them.",
        "set -eo pipefail",
        *(_ASKED if several else ["rank=0 first=localhost"]),
        f"cd {shlex.quote(str(job.start))}",
        *job.interface_lines,
    ]
    if job.cpus_per_task is not None:
        lines.append("# Otherwise torchrun gives each process one thread, where there are several.")
        lines.append(f"export OMP_NUM_THREADS={job.threads}")
    lines += [*job.setup, torchrun_command(job, training, '"$rank"', '"$first"', f'"${{MASTER_PORT:-{PORT}}}"', root)]
    return "\n".join(lines) + "\n"


def torchrun_command(job: Job, training: Training, rank: str, first: str, port: str, root: Optional[str]) -> str:
    """Compose the command for one machine.

    Args:
        job: that says how many machines and devices there are.
        training: what to train.
        rank: the machine's number, as the shell reads it.
        first: address of the first machine, as the shell reads it.
        port: at which all meet there, as the shell reads it.
        root: ``default_root_dir`` if the training has none of its own.
    """
    words = [*(["--no-python"] if training.is_own else ["-m", "lightning_sparse", "fit"]), *training.words]
    if root is not None and not training.is_own:
        words.append(f"--trainer.default_root_dir={root}")
    return (
        f"exec {shlex.quote(job.python)} -m torch.distributed.run --nnodes {job.nodes}"
        f" --nproc-per-node {job.tasks_per_node} --node-rank {rank} --master-addr {first} --master-port {port}"
        f" {' '.join(map(shlex.quote, words))}"
    )
