"""A model as Lightning's command line names it, profiled in one quiet process."""

import argparse
import json
import pickle
import warnings
from collections.abc import Sequence
from typing import Any, Optional

import torch
from typing_extensions import override

from lightning_sparse._lightning import LightningArgumentParser, LightningEnvironment, Trainer
from lightning_sparse.cli.parser import SparseCLI
from lightning_sparse.cli.plan.backward_profile import BackwardProfile
from lightning_sparse.cli.plan.profiler import BackwardProfiler

_KEPT_TRAINER_ARGUMENTS = (
    "accelerator",
    "benchmark",
    "default_root_dir",
    "deterministic",
    "gradient_clip_algorithm",
    "gradient_clip_val",
    "precision",
)
# Steps and epochs of a training whose configuration does not say: schedules of the learning rate ask for a number.
_ASSUMED_LENGTH = 100_000
_LEAST_LENGTH = 100  # more than are profiled
_EXPECTED_WARNINGS = (
    "LightningCLI's args parameter is intended",  # they are those of the command line, less this command's own
    ".*does not have many workers",  # how data comes is not measured
    ".*number of training batches.*is smaller than the logging interval",
    "No seed found",
)


class _ModelCLI(SparseCLI):
    """Lightning's own parser of models and data, with a Trainer that stops when the profiler says so."""

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        # The yaml file of a fit may name them.
        parser.add_argument("--ckpt_path", type=Optional[str], default=None, help="checkpoint whose weights are loaded")
        parser.add_argument("--weights_only", type=Optional[bool], default=None, help="as for fit; always true here")

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        chosen = self.config_init["trainer"]
        self.profiler = BackwardProfiler()
        return Trainer(
            **{name: chosen[name] for name in _KEPT_TRAINER_ARGUMENTS},
            strategy="auto",
            devices=1,
            plugins=[LightningEnvironment()],  # alone, even inside a job
            callbacks=[self.profiler],
            max_epochs=_length(chosen["max_epochs"]),
            max_steps=_length(chosen["max_steps"]),
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )


def profile_model(args: Sequence[str]) -> BackwardProfile:
    """Profile backward of the model that Lightning's arguments name, in a few steps of this process.

    Args:
        args: as for ``lightning-sparse fit``. Of the trainer's arguments, only those count that change what one process
            computes. A checkpoint that says which class it is of needs no ``--model``.

    Raises:
        ValueError: for a model without gradients, or a checkpoint that does not fit it.
        SystemExit: with status 2 and a message, for arguments that Lightning's parser refuses.
    """
    with warnings.catch_warnings():
        for message in _EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        cli = _ModelCLI(args=_with_model(args), run=False, parser_kwargs={"prog": "lightning-sparse plan"})
        path = cli.config["ckpt_path"]
        if path:
            _load_weights(cli.model, path)
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    return cli.profiler.profile()


def _length(chosen: Optional[int]) -> int:
    return _ASSUMED_LENGTH if chosen is None or chosen < 0 else max(chosen, _LEAST_LENGTH)


def _with_model(args: Sequence[str]) -> list[str]:
    """Add the model of a checkpoint where nothing else names one."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--ckpt_path")
    path = parser.parse_known_args(args)[0].ckpt_path
    if not path or any(word.startswith(("--model", "--config", "-c")) and word[:6] != "--ckpt" for word in args):
        return list(args)
    hyper_parameters = dict(_checkpoint(path).get("hyper_parameters", {}))
    class_path = hyper_parameters.pop("_class_path", None)
    hyper_parameters.pop("_instantiator", None)
    if class_path is None:
        raise ValueError(
            f"--ckpt_path {path} does not say of which class its model is: name it, such as --model my_package.MyModule"
        )
    return ["--model", json.dumps({"class_path": class_path, "init_args": hyper_parameters}), *args]


def _load_weights(model: torch.nn.Module, path: str) -> None:
    try:
        model.load_state_dict(_checkpoint(path)["state_dict"])
    except (KeyError, RuntimeError) as error:
        raise ValueError(f"--ckpt_path {path} holds no weights of this model: {error}") from error


def _checkpoint(path: str) -> dict[str, Any]:
    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"--ckpt_path {path} cannot be read as plain tensors and numbers, which alone are safe to load; leave it"
            f" out and name the model, such as --model my_package.MyModule. {error}"
        ) from error
    return checkpoint
