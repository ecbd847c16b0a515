"""Check a process that SLURM has started: without its peers it would wait for ever."""

import os
from collections.abc import Mapping

RESERVED_NAMES = ("bash", "interactive")  # jobs of these names are not SLURM's to Lightning
_RESERVED = (
    f"Lightning takes jobs named {' or '.join(RESERVED_NAMES)} for a shell, and starts every task as if it were alone"
)


def check_step(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse to start where Lightning would wait for processes that nobody starts.

    Args:
        environment: the process's environment variables.

    Raises:
        RuntimeError: inside a SLURM job of several tasks, if this process was not started by srun, or if the job's name
            is one that hides SLURM from Lightning.
    """
    tasks = int(environment.get("SLURM_NTASKS", 1))
    name = environment.get("SLURM_JOB_NAME")
    in_step = "SLURM_STEP_ID" in environment
    if tasks == 1 or (name in RESERVED_NAMES and not in_step):
        return  # in a shell of such a name Lightning starts processes itself
    if not in_step:
        raise RuntimeError(
            f"this job has SLURM_NTASKS={tasks} tasks, but this process was not started by srun, so that it would wait"
            " for the others forever: put srun before the command. To use one process, ask for one task."
        )
    if name in RESERVED_NAMES:
        raise RuntimeError(
            f"SLURM_JOB_NAME={name!r} in a job of {tasks} tasks: {_RESERVED}."
            " Give the job another name, such as --job-name=train"
        )


def checked_name(name: str) -> str:
    """Pass the name of a job through.

    Raises:
        ValueError: if it hides SLURM from Lightning, or is no plain word.
    """
    if name in RESERVED_NAMES:
        raise ValueError(f"--job-name {name} cannot be used: {_RESERVED}. Give another, such as train")
    if not name or not all(letter.isalnum() or letter in "._-" for letter in name):
        raise ValueError(f"--job-name {name!r} must consist of letters, digits, '.', '_' and '-', such as lags-0.01")
    return name
