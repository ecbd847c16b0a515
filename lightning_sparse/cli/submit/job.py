"""The job that is asked of a cluster."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Optional

from lightning_sparse.cli.submit.step import checked_name

_TIME = re.compile(
    r"(?:(?P<days>\d+)-(?P<day_hours>\d+)(?::(?P<day_minutes>\d+)(?::(?P<day_seconds>\d+))?)?"
    r"|(?P<hours>\d+):(?P<clock_minutes>\d+):(?P<clock_seconds>\d+)"
    r"|(?P<minutes>\d+)(?::(?P<seconds>\d+))?)"
)
_UNITS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}


class Training(NamedTuple):
    """A training that fits its job.

    Attributes:
        words: of Lightning's command line after ``fit``, less the root; or the user's own command.
        root: ``default_root_dir`` that the user has chosen; ``None`` gives each job its own.
        has_checkpoint: whether the words name a checkpoint to start from.
        is_own: whether the words are a command, to which nothing is added.
    """

    words: tuple[str, ...]
    root: Optional[str] = None
    has_checkpoint: bool = False
    is_own: bool = False


class Job(NamedTuple):
    """A job of SLURM or Kubernetes, or of machines that are started by hand.

    Attributes:
        nodes: machines.
        tasks_per_node: processes on each, one for each device.
        on_gpus: whether each has a GPU; otherwise they train on processors.
        time: limit, as SLURM writes it; ``None`` for none, which SLURM does not have.
        name: of the job and its files.
        start: directory in which the command runs; absolute.
        directory: where script and log are kept, and for each job a directory of its own; absolute.
        signal_seconds: time before the limit at which Lightning saves and puts the job back into the queue.
        interface: network interface of gloo and NCCL; ``None`` leaves the choice to them.
        cpus_per_task: processors of each process; ``None`` for what the cluster gives.
        queue: options of sbatch that say where the job waits and who pays: ``partition``, ``account``, ``qos``.
        container_image: image in which each process runs; ``None`` for the nodes' own files.
        volume_claim: claim of the volume of Kubernetes that keeps what is saved; ``None`` lets it go with the job.
        options: further options of sbatch, such as ``--constraint=a100``.
        setup: commands that precede training, such as ``module load cuda``.
        has_own_python: whether they bring the interpreter; otherwise it is the one that submits.
    """

    nodes: int
    tasks_per_node: int
    on_gpus: bool
    time: Optional[str]
    name: str
    start: Path
    directory: Path
    signal_seconds: int = 120
    interface: Optional[str] = None
    cpus_per_task: Optional[int] = None
    queue: Mapping[str, str] = MappingProxyType({})
    container_image: Optional[str] = None
    volume_claim: Optional[str] = None
    options: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    has_own_python: bool = False

    @property
    def uses_apptainer(self) -> bool:
        """Whether the image is for Apptainer, which takes files ``.sif`` and addresses; others are for Pyxis.

        Example::

            >>> [Job(1, 1, True, "1", "train", Path(), Path(), container_image=image).uses_apptainer
            ...  for image in ("torch.sif", "docker://pytorch/pytorch", "nvcr.io#nvidia/pytorch:25.01-py3")]
            [True, True, False]
        """
        return self.container_image is not None and (
            self.container_image.endswith(".sif") or "://" in self.container_image
        )

    @property
    def python(self) -> str:
        """The interpreter that trains."""
        return "python" if self.has_own_python or self.container_image is not None else sys.executable

    @property
    def image_file(self) -> Optional[Path]:
        """The file that an image with an address is pulled into; ``None`` where Apptainer is not given one.

        Example::

            >>> Job(1, 1, True, "1", "train", Path(), Path("jobs"), container_image="docker://nvcr.io/torch:2").image_file
            PosixPath('jobs/nvcr.io-torch-2.sif')
        """
        _, address, place = (self.container_image or "").partition("://")
        return self.directory / (re.sub(r"[^\w.]+", "-", place) + ".sif") if address else None

    @property
    def threads(self) -> Optional[int]:
        """Threads that a process computes with: on processors one less than it has, which selects and exchanges."""
        spare = 0 if self.on_gpus else 1
        return None if self.cpus_per_task is None else max(1, self.cpus_per_task - spare)

    @property
    def interface_lines(self) -> list[str]:
        """Lines of a shell that choose the network interface, if one was asked for."""
        if self.interface is None:
            return []
        of_gloo = f"GLOO_SOCKET_IFNAME={self.interface} " if is_for_gloo(self.interface) else ""
        return [
            "# The network that gradients travel on; left alone, a slower one may be found first.",
            f"export {of_gloo}NCCL_SOCKET_IFNAME={self.interface}",
        ]

    @property
    def devices_option(self) -> str:
        """The option of the command that says how many devices a node has."""
        return "--gpus-per-node" if self.on_gpus else "--tasks-per-node"

    def checked(self) -> "Job":
        """Pass the job through.

        Raises:
            ValueError: for what the cluster would refuse, or Lightning would not survive.
        """
        counts = {
            "--nodes": self.nodes,
            self.devices_option: self.tasks_per_node,
            "--cpus-per-task": self.cpus_per_task,
            "--signal-seconds": self.signal_seconds,
        }
        for option, count in counts.items():
            if count is not None and count < 1:
                raise ValueError(f"{option} {count} must be a whole number, at least 1")
        checked_name(self.name)
        _check_lines(self)
        return self


def parse_time(time: str) -> int:
    """Return the seconds of a time limit as SLURM writes it.

    Raises:
        ValueError: if it is written in another way, or is 0.

    Example::

        >>> parse_time("2:00:00"), parse_time("90"), parse_time("1-12")
        (7200, 5400, 129600)
    """
    match = _TIME.fullmatch(time)
    seconds = 0
    for name, digits in (match.groupdict() if match else {}).items():
        seconds += int(digits or 0) * _UNITS[name.split("_")[-1]]
    if not seconds:
        raise ValueError(
            f"--time {time!r} must be minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes"
            " or days-hours:minutes:seconds, such as 90, 2:00:00 or 1-12, and more than 0"
        )
    return seconds


def _check_lines(job: Job) -> None:
    for option in job.options:
        _check_option(option)
    for name, value in job.queue.items():
        if not re.fullmatch(r"[\w.,@+-]+", value):
            raise ValueError(f"--{name} {value!r} must be a name that the cluster knows as {name}")
    if job.container_image is not None and not re.fullmatch(r"[\w./:@#+-]+", job.container_image):
        raise ValueError(
            f"--container-image {job.container_image!r} must be an image: a file such as torch.sif (Apptainer) or"
            " torch.sqsh (Pyxis), docker://... (Apptainer), or registry#image:tag (Pyxis)"
        )
    for source, path in (("the working directory", job.start), ("--directory", job.directory)):
        if not str(path).isprintable():
            # A line of the script ends there, and a shell would run the rest.
            raise ValueError(f"{source} {str(path)!r} has characters that are no text: rename it")
    if job.interface is not None and not re.fullmatch(r"[\w.,:^=@-]+", job.interface):
        raise ValueError(f"--interface {job.interface!r} must be the name of a network interface, such as eth0 or ib0")
    if not (job.interface is None or job.on_gpus or is_for_gloo(job.interface)):
        raise ValueError(
            f"--interface {job.interface!r} is for NCCL alone: gloo, which exchanges on processors, takes names,"
            " such as eth0 or eth0,eth1"
        )


def is_for_gloo(interface: str) -> bool:
    """Return whether gloo understands a choice of interfaces, and not NCCL alone.

    Example::

        >>> is_for_gloo("eth0,eth1"), is_for_gloo("^docker0")
        (True, False)
    """
    return not set("^=:") & set(interface)


def _check_option(option: str) -> None:
    if not option.startswith("-") or "\n" in option:
        raise ValueError(f"--sbatch {option!r} must be one option of sbatch, such as --sbatch=--partition=gpu")
    if option.startswith(("--array", "-a")):
        raise ValueError(
            f"--sbatch={option} cannot be used: tasks of an array would share what Lightning calls a job, its"
            " checkpoints and its port. Submit each training as a job of its own, such as in a loop of the shell"
        )
    if option.startswith(("--cpus-per-task", "-c")):
        raise ValueError(f"--sbatch={option} is for this command to write: use --cpus-per-task")
    if option.startswith(("--nodes", "-N", "--ntasks", "-n", "--gpus", "--gres", "--time", "-t", "--signal")):
        raise ValueError(
            f"--sbatch={option} is for this command to write, since it must agree with the training: use --nodes,"
            " --gpus-per-node, --tasks-per-node, --time, --signal-seconds"
        )
