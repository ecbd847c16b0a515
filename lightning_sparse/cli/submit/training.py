"""The training as Lightning's command line and its yaml files name it, compared with the job that is to run it."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from jsonargparse import Namespace
from pytorch_lightning.cli import ArgsType, LightningArgumentParser
from typing_extensions import override

from lightning_sparse.cli.parser import SparseCLI
from lightning_sparse.cli.submit.job import Job, Training

_GPU_NAMES = ("gpu", "cuda")
_UNDECIDED = ("auto", -1, "-1")


class _ParsedError(Exception):
    """Lightning has understood the arguments, and would build the model now."""


class _FitReader(SparseCLI):
    """Lightning's own parser of ``fit``, stopped before it builds anything."""

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        self._parser("fit").prog = parser.prog  # the word is this module's, and not the user's
        super().parse_arguments(parser, args)
        assert isinstance(args, list)
        given: Namespace = parser.parse_args(args, defaults=False)
        raise _ParsedError(given["fit"])


class _Setting(NamedTuple):
    """A setting of the Trainer that the job decides."""

    key: str
    value: Any
    option: str


def fit_training(args: Sequence[str], job: Job) -> Training:
    """Read a training's arguments and complete them with what the job decides.

    Args:
        args: as for ``lightning-sparse fit``.
        job: that is to run them.

    Raises:
        ValueError: if they ask for other nodes, devices or hardware than the job has, for a directory in which a
            checkpoint of another job lies, or for a test run.
        SystemExit: with status 2 and a message, for arguments that Lightning's parser refuses.
    """
    given = _given(args)
    trainer = given.get("trainer") or Namespace()
    words = list(args)
    for setting in _settings(job):
        chosen = trainer.get(setting.key)
        if chosen is None or chosen in _UNDECIDED:
            words.append(f"--trainer.{setting.key}={setting.value}")
        elif not _agrees(setting, chosen):
            raise ValueError(
                f"trainer.{setting.key}={chosen!r} in the configuration does not agree with {setting.option}:"
                f" leave it out, and it is set to {setting.value!r}, or say so with"
                f" --trainer.{setting.key}={setting.value} after the configuration"
            )
    root = trainer.get("default_root_dir")
    if root is not None:
        _check_root(Path(root))
    return Training(tuple(words), None if root is None else str(root), given.get("ckpt_path") is not None)


def _given(args: Sequence[str]) -> Namespace:
    """Return what the arguments and their files say, without defaults."""
    try:
        with warnings.catch_warnings():
            # They are those of the command line, less this command's own.
            warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended")
            _FitReader(args=["fit", *args], parser_kwargs={"prog": "lightning-sparse submit"})
    except _ParsedError as parsed:
        found = parsed.args[0]
        assert isinstance(found, Namespace)
        return found
    raise AssertionError("the reader stops as soon as it has read")


def _settings(job: Job) -> list[_Setting]:
    per_node = f"{job.devices_option} {job.tasks_per_node}"
    # Said even so: with "auto" a node whose driver is broken would train on its processors, slowly and without a word.
    hardware = "gpu" if job.on_gpus else "cpu"
    return [
        _Setting("num_nodes", job.nodes, f"--nodes {job.nodes}"),
        _Setting("devices", job.tasks_per_node, per_node),
        _Setting("accelerator", hardware, per_node),
    ]


def _agrees(setting: _Setting, chosen: Any) -> bool:
    if setting.key == "accelerator":
        return (str(chosen) in _GPU_NAMES) == (setting.value in _GPU_NAMES)
    return bool(_device_count(chosen) == setting.value)


def _device_count(devices: Any) -> Optional[int]:
    """Return how many devices a Trainer's argument names; ``None`` if that is not to be seen."""
    if isinstance(devices, str):
        listed = [word for word in devices.split(",") if word.strip()]
        return len(listed) if "," in devices else int(devices) if devices.isdecimal() else None
    if isinstance(devices, (list, tuple)):
        return len(devices)
    return int(devices)


def _check_root(root: Path) -> None:
    leftovers = sorted(root.glob("hpc_ckpt_*.ckpt"))
    if leftovers:
        raise ValueError(
            f"trainer.default_root_dir={str(root)!r} holds {leftovers[-1].name}, from which Lightning would go on"
            " without being asked: leave trainer.default_root_dir out, and every job gets a directory of its own; or"
            " move the file away. To go on from it, do so and give --ckpt_path its new place"
        )
