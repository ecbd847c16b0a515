"""The script of a job of SLURM, as text: each line that is easily left out, with its reason."""

import shlex

from lightning_sparse.cli.submit.job import Job, Training, parse_time

_SIGNAL_SLACK = 60  # SLURM may send the signal as many seconds early


def job_script(job: Job, training: Training) -> str:
    """Compose what ``sbatch`` takes, for a training that fits the job.

    Raises:
        ValueError: without a time limit, or for one in which nothing could be saved.
    """
    _check_limit(job)
    parts = [_header(job), _environment(job, training)]
    if job.setup:
        parts.append("\n".join(job.setup))
    if training.has_checkpoint:
        parts.append(_RESUME)
    if job.image_file is not None:
        parts.append(_PULL.format(file=shlex.quote(str(job.image_file)), image=shlex.quote(str(job.container_image))))
    if job.container_image is not None:
        parts.append(_REQUEUE)
    parts.append(_command(job, training))
    return "\n\n".join(parts) + "\n"


def _check_limit(job: Job) -> None:
    if job.time is None:
        raise ValueError("--time is missing: the limit of the job, such as 2:00:00")
    limit, needed = parse_time(job.time), job.signal_seconds + _SIGNAL_SLACK
    if limit <= needed:
        raise ValueError(
            f"--time {job.time} is {limit} seconds, of which --signal-seconds {job.signal_seconds} and up to"
            f" {_SIGNAL_SLACK} more, by which SLURM may be early, are kept for saving: ask for a longer time, or"
            " for fewer seconds if your checkpoint is written faster"
        )


_GIVEN = """\
# For the Trainer of the command: default_root_dir=os.environ["JOB_ROOT"]
export JOB_ROOT="$root\""""


_RESUME = """\
# The checkpoint that the command names would win over the one that this job has saved when it was put back.
resume=()
if compgen -G "$root/hpc_ckpt_*.ckpt" > /dev/null; then
    resume=(--ckpt_path=hpc)
fi"""


_PULL = """\
# Once for all tasks, and for all jobs: each of them would pull and convert it for itself.
image={file}
if [ ! -e "$image" ]; then
    apptainer pull "$image.$SLURM_JOB_ID" {image}
    mv "$image.$SLURM_JOB_ID" "$image"
fi"""


_REQUEUE = """\
# Within the image there is no scontrol: when a checkpoint is there that is newer than this run, it is put back here.
began=$(mktemp)
(
    until [ -n "$(find "$root" -name "hpc_ckpt_*.ckpt" -newer "$began" 2> /dev/null)" ]; do sleep 2; done
    scontrol requeue "$SLURM_JOB_ID"
) &
trap 'kill $! 2> /dev/null || true; rm -f "$began"' EXIT"""


def _header(job: Job) -> str:
    lines = [
        "#!/bin/bash",
        "# Written by lightning-sparse submit; sbatch takes it as it is.",
        f"#SBATCH --job-name={job.name}",
        f"#SBATCH --chdir={shlex.quote(str(job.start))}",
        f"#SBATCH --output={shlex.quote(str(job.directory))}/%x-%j.log",
        f"#SBATCH --time={job.time}",
        *(f"#SBATCH --{option}={value}" for option, value in job.queue.items()),
        f"#SBATCH --nodes={job.nodes}",
        "# One task for each device; Lightning refuses --ntasks without it.",
        f"#SBATCH --ntasks-per-node={job.tasks_per_node}",
    ]
    if job.on_gpus:
        lines.append(
            "# Of the node, not of each task: Lightning picks each task's own among those that all of them see."
        )
        lines.append(f"#SBATCH --gpus-per-node={job.tasks_per_node}")
    if job.cpus_per_task is not None:
        lines.append(f"#SBATCH --cpus-per-task={job.cpus_per_task}")
    lines += [
        "# Before the time is over Lightning saves, and puts the job back; then it goes on, in the same log.",
        f"#SBATCH --signal=SIGUSR1@{job.signal_seconds}",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        *(f"#SBATCH {option}" for option in job.options),
    ]
    return "\n".join(lines)


def _environment(job: Job, training: Training) -> str:
    own_root = f'{shlex.quote(str(job.directory))}/"$SLURM_JOB_ID"'
    root = own_root if training.root is None else shlex.quote(training.root)
    lines = [
        "set -eo pipefail",
        "# Lightning goes on from any hpc_ckpt_*.ckpt in this directory, whichever job has left it.",
        f"root={root}",
        *([_GIVEN] if training.is_own else []),
        "# Lightning would read names such as r[1-2]n[1-4] wrongly.",
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)',
        "export MASTER_ADDR",
    ]
    lines += job.interface_lines
    if job.cpus_per_task is not None:
        lines.append("# srun does not take it from sbatch since SLURM 22.05.")
        lines.append(f'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK" OMP_NUM_THREADS={job.threads}')
    return "\n".join(lines)


def _command(job: Job, training: Training) -> str:
    resume = ' "${resume[@]}"' if training.has_checkpoint else ""
    own = [] if training.is_own else [job.python, "-u", "-m", "lightning_sparse", "fit"]
    words = " ".join(map(shlex.quote, [*own, *training.words]))
    root = "" if training.is_own else ' --trainer.default_root_dir="$root"'
    on_srun, before = _container(job)
    return (
        "# Where one task fails, the others would wait for it until they time out.\n"
        f"srun --kill-on-bad-exit=1 {on_srun}{before}{words}{root}{resume}"
    )


def _container(job: Job) -> tuple[str, str]:
    """Return what srun, and what the command, needs to run in the image, with the job's directories in their places."""
    if job.container_image is None:
        return "", ""
    image, start = shlex.quote(job.container_image), shlex.quote(str(job.start))
    places = list(dict.fromkeys([str(job.start), str(job.directory)]))
    if job.uses_apptainer:
        gpus = "--nv " if job.on_gpus else ""
        file = image if job.image_file is None else '"$image"'
        return "", f"apptainer exec {gpus}--bind {shlex.quote(','.join(places))} --pwd {start} {file} "
    mounts = shlex.quote(",".join(f"{place}:{place}" for place in places))
    return f"--container-image={image} --container-mounts={mounts} --container-workdir={start} ", ""
