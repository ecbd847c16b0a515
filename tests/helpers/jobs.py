"""A job of SLURM that there is not."""

JOB = {"SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "train", "SLURM_NODEID": "0", "SLURM_NTASKS_PER_NODE": "2"}


def put_scontrol(folder, status):
    """Put a command in place of SLURM's that writes down what is asked of it."""
    path = folder / "scontrol"
    path.write_text(
        f'#!/bin/sh\necho "$*" >> {folder}/asked\n[ {status} = 0 ] || echo no such job >&2\nexit {status}\n'
    )
    path.chmod(0o755)
