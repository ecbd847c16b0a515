"""The script of a job, as text: each line that is easily left out, with its reason."""

import shlex
import sys

from lightning_sparse.cli.submit.job import Job, Training, is_for_gloo


def job_script(job: Job, training: Training) -> str:
    """Compose what ``sbatch`` takes, for a training that fits the job."""
    parts = [_header(job), _environment(job, training)]
    if job.setup:
        parts.append("\n".join(job.setup))
    if training.has_checkpoint:
        parts.append(_RESUME)
    if job.container_image is not None:
        parts.append(_REQUEUE)
    parts.append(_command(job, training))
    return "\n\n".join(parts) + "\n"


_RESUME = """\
# The checkpoint that the command names would win over the one that this job has saved when it was put back.
resume=()
if compgen -G "$root/hpc_ckpt_*.ckpt" > /dev/null; then
    resume=(--ckpt_path=hpc)
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
        "# Lightning would read names such as r[1-2]n[1-4] wrongly.",
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)',
        "export MASTER_ADDR",
    ]
    if job.interface is not None:
        lines.append("# The network that gradients travel on; left alone, a slower one may be found first.")
        of_gloo = f"GLOO_SOCKET_IFNAME={job.interface} " if is_for_gloo(job.interface) else ""
        lines.append(f"export {of_gloo}NCCL_SOCKET_IFNAME={job.interface}")
    if job.cpus_per_task is not None:
        lines.append("# srun does not take it from sbatch since SLURM 22.05.")
        lines.append('export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK" OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"')
    return "\n".join(lines)


def _command(job: Job, training: Training) -> str:
    python = "python" if job.has_own_python or job.container_image is not None else sys.executable
    words = " ".join(map(shlex.quote, [python, "-u", "-m", "lightning_sparse", "fit", *training.words]))
    resume = ' "${resume[@]}"' if training.has_checkpoint else ""
    on_srun, before = _container(job)
    return (
        "# Where one task fails, the others would wait for it until they time out.\n"
        f'srun --kill-on-bad-exit=1 {on_srun}{before}{words} --trainer.default_root_dir="$root"{resume}'
    )


def _container(job: Job) -> tuple[str, str]:
    """Return what srun, and what the command, needs to run in the image, with the job's directories in their places."""
    if job.container_image is None:
        return "", ""
    image, start = shlex.quote(job.container_image), shlex.quote(str(job.start))
    places = list(dict.fromkeys([str(job.start), str(job.directory)]))
    if job.uses_apptainer:
        gpus = "--nv " if job.on_gpus else ""
        return "", f"apptainer exec {gpus}--bind {shlex.quote(','.join(places))} --pwd {start} {image} "
    mounts = shlex.quote(",".join(f"{place}:{place}" for place in places))
    return f"--container-image={image} --container-mounts={mounts} --container-workdir={start} ", ""
