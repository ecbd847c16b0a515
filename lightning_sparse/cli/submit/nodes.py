"""What the nodes of the cluster have, as far as SLURM says so here."""

import re
import shutil
import subprocess

from lightning_sparse.cli.submit.job import Job


def with_share_of_a_node(job: Job) -> Job:
    """Return the job with processors for each process, where the user has not said how many.

    A process has its share of the smallest node's: for a GPU, one part in as many as the node has GPUs. SLURM itself
    would give each one processor, which then computes, loads data and exchanges. Where ``sinfo`` is not to be found,
    or knows no such node, the job is left as it is.
    """
    if job.cpus_per_task is not None or shutil.which("sinfo") is None:
        return job
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
    return job._replace(cpus_per_task=max(1, min(shares))) if shares else job
