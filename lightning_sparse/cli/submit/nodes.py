"""What the nodes of the cluster have, as far as SLURM says so here."""

import re
import shutil
import subprocess
import sys

from lightning_sparse.cli.submit.job import Job


def with_share_of_a_node(job: Job) -> Job:
    """Return the job with processors for each process, where the user has not said how many.

    A process has its share of the smallest node's: for a GPU, one part in as many as the node has GPUs. SLURM itself
    would give each one processor, which then computes, loads data and exchanges. Where ``sinfo`` is not to be found,
    or knows no such node, the job is left as it is, and the user is told.
    """
    if job.cpus_per_task is not None:
        return job
    shares = [] if shutil.which("sinfo") is None else _shares(job)
    if shares:
        return job._replace(cpus_per_task=max(1, min(shares)))
    print(
        "lightning-sparse submit: how many processors a node has is not known here. Give --cpus-per-task, such as 8:"
        " on most clusters each process gets one without it",
        file=sys.stderr,
    )
    return job


def _shares(job: Job) -> list[int]:
    """Return for each kind of node that can run the job how many processors a process can have."""
    where = [f"--partition={job.queue['partition']}"] if "partition" in job.queue else []
    done = subprocess.run(  # noqa: S603  # the user's own sinfo; the partition has been checked
        ["sinfo", "--noheader", "--format=%c %G", *where],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    )
    shares = []
    for line in done.stdout.splitlines():
        processors, _, resources = line.strip().partition(" ")
        gpus = sum(map(int, re.findall(r"gpu:(?:[^:(,]+:)?(\d+)", resources)))
        if job.on_gpus and gpus < job.tasks_per_node:
            continue  # it cannot run there
        shares.append(int(processors.rstrip("+")) // (gpus if job.on_gpus else job.tasks_per_node))
    return shares
