"""The profile of a model's step on one worker: sizes of its gradients, and when backward makes them ready."""

import warnings
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple, Optional

import torch
from typing_extensions import override

from lightning_sparse.cli.parser import SparseCLI
from lightning_sparse.engine.adam.steps import is_correctable
from lightning_sparse.engine.observe import Clock, Mark
from lightning_sparse.jobs.lightning import (
    Callback,
    LightningArgumentParser,
    LightningEnvironment,
    LightningModule,
    Trainer,
)

_WARM_UP = 3  # steps: memory is allocated, kernels are chosen or compiled
_STEPS = 7
_PATIENCE = 50  # batches without any backward

_Event = tuple[Optional[str], Mark]  # a parameter, and when backward was done with it; no parameter: outside backward


class BackwardProfile(NamedTuple):
    """A step without communication; tensors stand in the order in which backward makes their gradients ready."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]  # elements
    backward_seconds: tuple[float, ...]
    other_seconds: float = 0.0  # outside backward: forward, optimizer
    element_bytes: int = 4  # of a gradient, as DDP sends it
    device: str = "cpu"  # its type
    has_adam: bool = False  # an optimizer's second moment is refreshed by mean gradients now and then

    @property
    def elements(self) -> int:
        """Elements of the whole gradient."""
        return sum(self.sizes)

    @property
    def alone_seconds(self) -> float:
        """Seconds of a step that exchanges nothing."""
        return sum(self.backward_seconds) + self.other_seconds

    def lasting(self, seconds: float) -> "BackwardProfile":
        """Return the same step on a machine that takes so many seconds for it without communication."""
        times = seconds / self.alone_seconds
        backward_seconds = tuple(times * each for each in self.backward_seconds)
        return self._replace(backward_seconds=backward_seconds, other_seconds=times * self.other_seconds)

    def sharded(self, shards: int) -> "BackwardProfile":
        """Return the same step of a rank that holds one of so many shards of each tensor."""
        return self._replace(sizes=tuple(-(-size // shards) for size in self.sizes))


class BackwardProfiler(Callback):
    """Time the first steps of a ``fit`` in one process, all their backward passes and no waits for data, and end it."""

    def __init__(self) -> None:
        self._steps: list[list[_Event]] = []
        self._events: list[_Event] = []  # of the present step
        self._batches = 0
        self._handles: list[Any] = []

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Before an optimizer is built, which would complain of an empty list.
        if not any(parameter.requires_grad for parameter in pl_module.parameters()):
            raise ValueError(
                "no parameter of the model requires a gradient, so there is nothing to exchange; unfreeze some"
                " (requires_grad_(True))"
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if pl_module.automatic_optimization:
            # They change no time, and one of them may wait for what a validation logs.
            trainer.strategy.lr_scheduler_configs = []
        self._clock = Clock(pl_module.device)
        self._has_adam = any(map(is_correctable, trainer.optimizers))
        self._parameters = {name: tensor for name, tensor in pl_module.named_parameters() if tensor.requires_grad}
        for name, parameter in self._parameters.items():
            self._handles.append(parameter.register_post_accumulate_grad_hook(partial(self._note, name)))

    def _note(self, name: Optional[str], *_: Any) -> None:
        self._events.append((name, self._clock.mark()))

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._events = []
        self._note(None)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        self._note(None)

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note(self._events[-1][0])  # what follows the last gradient counts as its own

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        self._batches += 1
        self._note(None)
        if _backward_seconds(self._events):
            self._steps.append(self._events)
        elif self._batches >= _PATIENCE and not self._steps:
            raise ValueError(
                f"training_step gave no gradient to any parameter in {_PATIENCE} batches: return a loss that depends on"
                " parameters that require one"
            )
        trainer.should_stop = len(self._steps) >= _WARM_UP + _STEPS

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for handle in self._handles:
            handle.remove()

    def profile(self) -> BackwardProfile:
        """Return the medians over the steps measured; parameters that got no gradient count as ready at the end."""
        steps = self._steps[_WARM_UP:]
        if not steps:
            raise ValueError(
                f"only {len(self._steps)} of at least {_WARM_UP + 1} steps could be run: the train dataloader is empty,"
                " or training was stopped"
            )
        timed = list(map(_backward_seconds, steps))
        whole = [Clock.seconds(events[0][1], events[-1][1]) for events in steps]
        names = [*timed[-1], *(name for name in self._parameters if name not in timed[-1])]
        parameters = [self._parameters[name] for name in names]
        itemsizes = Counter[int]()
        for parameter in parameters:
            itemsizes[parameter.element_size()] += parameter.numel()
        return BackwardProfile(
            names=tuple(names),
            sizes=tuple(parameter.numel() for parameter in parameters),
            backward_seconds=tuple(median(seconds.get(name, 0.0) for seconds in timed) for name in names),
            other_seconds=median(max(0.0, step - sum(seconds.values())) for step, seconds in zip(whole, timed)),
            element_bytes=itemsizes.most_common(1)[0][0],
            device=parameters[0].device.type,
            has_adam=self._has_adam,
        )


def _backward_seconds(events: list[_Event]) -> dict[str, float]:
    """Return by parameter name the seconds that backward takes for it, in the order of readiness."""
    seconds: dict[str, float] = {}
    for (_, begin), (name, end) in pairwise(events):
        if name is not None:
            seconds[name] = seconds.get(name, 0.0) + max(0.0, Clock.seconds(begin, end))
    return seconds


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
