"""A model as Lightning's command line names it, profiled in one quiet process."""

import warnings
from collections.abc import Sequence
from typing import Any, Optional

from typing_extensions import override

from lightning_sparse.cli.parser import SparseCLI
from lightning_sparse.cli.plan.profiler import BackwardProfile, BackwardProfiler
from lightning_sparse.strategy.lightning import LightningArgumentParser, LightningEnvironment, Trainer

_KEPT_TRAINER_ARGUMENTS = (  # those that change what one process computes
    *("accelerator", "benchmark", "default_root_dir", "deterministic"),
    *("gradient_clip_algorithm", "gradient_clip_val", "precision"),
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
        # The yaml file of a fit may name them; weights change no time.
        parser.add_argument("--ckpt_path", type=Optional[str], default=None, help="is not read: weights take no time")
        parser.add_argument("--weights_only", type=Optional[bool], default=None, help="likewise")

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
    """Profile backward of the model that arguments of ``lightning-sparse fit`` name, in a few steps of this process."""
    with warnings.catch_warnings():
        for message in _EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        cli = _ModelCLI(args=list(args), run=False, parser_kwargs={"prog": "lightning-sparse plan"})
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    return cli.profiler.profile()


def _length(chosen: Optional[int]) -> int:
    return _ASSUMED_LENGTH if chosen is None or chosen < 0 else max(chosen, _LEAST_LENGTH)
