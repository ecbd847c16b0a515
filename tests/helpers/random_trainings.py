"""Trainings drawn at random. The ``repr`` of a :class:`Training` is the Python code that creates it again."""

import dataclasses
import random
import time
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, Optional
from unittest import mock

import torch
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.callbacks import LambdaCallback
from pytorch_lightning.loggers.logger import DummyLogger
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, RMSprop
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

import lightning_sparse.engine.engine as engine_module
from lightning_sparse import AdamCorrection, SparseDDPStrategy, SparseModelParallelStrategy
from lightning_sparse.callbacks import (
    AdaptiveDensity,
    CompressionMonitor,
    ErrorBudget,
    MomentumCorrection,
    OverlapTimeline,
    ReplicaSentinel,
)
from lightning_sparse.compressors import A2SGD, COMPRESSORS, DGC, LAGS, Compressor
from lightning_sparse.compressors.registry import build_by_name
from lightning_sparse.engine.memory import optimizer_parameters
from lightning_sparse.engine.settings import LocalSteps
from lightning_sparse.loop.backend_choice import AutoBackend
from lightning_sparse.testing.invariants import is_exact
from tests.compatibility.running import changing_hands
from tests.helpers.issued import Sluggish
from tests.helpers.resuming import RESUME_WARNINGS
from tests.helpers.trainers import expect, forget_groups, learning_in_turns, make_trainer

WIDTH = 6
_EXPECTED_WARNINGS = (
    *RESUME_WARNINGS,
    ".*find_unused_parameters=True was specified in DDP constructor.*",  # some draws use all parameters
    ".*gradient_as_bucket_view.*",
    ".*Grad strides do not match bucket view strides.*",
    ".*is not corrected.*|.*makes its updates.*",  # optimizers with corrections off
    ".*exists and is not empty.*",
    ".*OverlapTimeline has recorded nothing.*",  # trainings shorter than an accumulation
)

State = dict[str, list[Any]]  # tensor values by name


@dataclass(frozen=True)
class Training:
    """The parameters of a training.

    Equal values give bitwise identical results. The defaults are the simplest training.
    """

    seed: int = 0  # seed of weights and batches
    ranks: int = 2
    nodes: int = 1
    is_sharded: bool = False  # whether FSDP shards the model over the two ranks of each node
    strategy: str = "topk"  # key of STRATEGIES
    density: float = 0.1
    wire: str = "float32"
    schedule: str = "layerwise"
    exchange: str = "auto"
    levels: Any = 1
    correction: Any = "auto"  # Adam correction
    local: Optional[LocalSteps] = None
    callbacks: tuple[str, ...] = ()  # callbacks of this package that change the messages
    optimizer: str = "sgd"  # key of OPTIMIZERS
    optimizers: int = 1  # several optimizers imply manual optimization
    by_hand: str = ""  # form of manual optimization; "" is automatic
    renews: Optional[int] = None  # batch number of a replacement of the optimizers
    adds: Optional[int] = None  # batch number before which a layer is added
    shares: bool = False  # whether all optimizers share a parameter
    backwards: int = 1  # backwards per manual step
    accumulates: int = 1  # batches per step
    clips: str = ""  # clipping by norm, from CLIPS
    falls: str = ""  # learning rate schedule, key of SCHEDULES
    precision: str = "32-true"
    parts: tuple[str, ...] = ()  # model parts, from PARTS
    epochs: int = 2
    batches: int = 5  # batches per epoch
    validates: Optional[int] = None  # batches between two validations
    saves: Optional[tuple[str, int]] = None  # "batch", "validation" or "epoch", and a number
    moves: int = 0  # number of ranks of another resume from the file; 0 for none
    may_not_matter: tuple[str, ...] = ()  # changes without effect, from MAY_NOT_MATTER

    def __repr__(self):
        said = [
            f"{field.name}={value!r}"
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        ]
        return f"Training({', '.join(said)})"

    def but(self, **changes):
        return dataclasses.replace(self, **changes)

    @property
    def subject(self):
        return build_by_name("compressor", Compressor, COMPRESSORS, STRATEGIES[self.strategy]()["compressor"])

    @property
    def norm(self):
        return 0.05 if self.seed % 2 else 0.5

    @property
    def drifts(self):
        return self.local is not None or self.subject.replicas_diverge

    @property
    def has_adam(self):
        return self.optimizer == "adamw"

    @property
    def has_momentum(self):
        return self.subject.feedback.momentum is not None or "MomentumCorrection" in self.callbacks

    @property
    def seldom(self):
        """Return the part that only some ranks or steps use, or ``""``."""
        return next((part for part in self.parts if "used" in part), "")

    @property
    def uses_partly(self):
        return "toggled" in self.by_hand or bool(self.seldom) or not {"thawing", "averaged"}.isdisjoint(self.parts)

    def _place_of_save(self):
        """Return the number of batches of an epoch before the save, and whether the training ends with the save."""
        what, number = self.saves
        batches = {"batch": 1, "validation": self.validates, "epoch": self.batches}[what]
        per_epoch = self.batches // batches
        return ((number - 1) % per_epoch + 1) * batches, number >= self.epochs * per_epoch

    @property
    def is_resumable(self):
        """Return whether a file holds the full state. A file has only rank 0's buffers and averages.

        DDP does not broadcast buffers before each forward in manual optimization or accumulation, and never the
        buffers of an average. After a validation of an average, the model's buffers differ until the next forward.
        """
        if self.saves is None or self.strategy in MEASURED:
            return False
        batch, is_last = self._place_of_save()
        keeps_own = (self.by_hand or self.accumulates > 1 or is_last) and self.local is None
        has_own = keeps_own and not {"running mean", "normalized"}.isdisjoint(self.parts)
        # Files hold no gradients of an accumulation.
        is_border = batch % self.accumulates == 0 or (batch == self.batches and not self.by_hand)
        in_turns = "by turns" in self.by_hand and self.accumulates > 1
        leaves_gradients = not is_border or in_turns or (self.by_hand == "by turns" and self.optimizers > 1)
        # A validation directly after the save ends a round. A resumed fit has no such end.
        is_validated = self.saves[0] == "batch" and self.validates is not None and batch % self.validates == 0
        misses_end = self.local is not None and is_validated
        # Lightning's folder has optimizer states of a single replica. The start of training restores the other states.
        lacks_states = self.is_sharded and (is_last or self.seldom)
        return not (has_own or leaves_gradients or misses_end or lacks_states)

    @property
    def moved(self):
        nodes = 2 if self.moves == 4 and self.nodes == 2 else 1
        return self.but(ranks=self.moves, nodes=nodes, levels=self.levels if nodes == 2 else 1, moves=0)

    @property
    def rounds_anew(self):
        """Return whether three-rank sums of DDP may round differently after a resume, because buckets change."""
        is_ddp = self.has_adam and self.correction is not None and self.local is None
        return is_ddp and self.ranks > 2

    @property
    def has_twin(self):
        # DDP does not support thawed or added parameters. Accumulation by turns adds to gradients of earlier steps.
        adds_up = self.accumulates > 1 and "by turns" in self.by_hand
        is_ours = self.adds is not None or "thawing" in self.parts
        # With dense messages, clipping, masks and shared parameters act on another momentum. OneCycleLR gives SGD a
        # momentum.
        has_velocity = self.has_momentum and (self.optimizer != "sgd" or self.falls == "cycle")
        return is_exact(self.subject) and not (adds_up or is_ours or has_velocity)

    def variants(self):
        found = {"plain": self.but(may_not_matter=())}
        if self.may_not_matter:
            found["all"] = self
        if self.is_resumable:
            found["resumed"] = self
        if self.has_twin:
            of_model = tuple(name for name in self.may_not_matter if name in _OF_MODEL)
            found["whole"] = self.but(density=1.0, wire="float32", local=None, saves=None, callbacks=())
            found["ddp"] = found["whole"].but(may_not_matter=of_model)
        return found


STRATEGIES = {
    **{name: lambda name=name: {"compressor": name} for name in sorted(COMPRESSORS)},
    "lags by updates": lambda: {"compressor": LAGS(error_feedback="update")},
    "dgc masked": lambda: {"compressor": DGC(masks_momentum=True)},
    "a2sgd often": lambda: {"compressor": A2SGD(param_sync_every=3)},
    # "switching" changes between compression and DDP, independent of measured times.
    **{name: lambda: {"compressor": "lags", "schedule": "auto"} for name in ("auto", "switching")},
}
MEASURED = ("auto", "switching")
CALLBACKS = {
    "MomentumCorrection": MomentumCorrection,
    "AdaptiveDensity": lambda: AdaptiveDensity([ErrorBudget(budget=2.0)], max_density=0.5, every_n_steps=2),
}
OPTIMIZERS = {
    "sgd": lambda parameters: SGD(parameters, lr=0.1, weight_decay=1e-2),
    # No weight decay, because decay acts differently if momentum is accumulated before selection.
    "momentum": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
    # The betas let the second moment adapt in few steps. The large eps dampens rounding differences.
    "adamw": lambda parameters: AdamW(parameters, lr=0.01, betas=(0.8, 0.9), eps=1e-3),
    "rmsprop": lambda parameters: RMSprop(parameters, lr=0.01, eps=1e-2),
}
SCHEDULES = {
    "exponential": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    "stairs": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5),
    # OneCycleLR cycles momentum or the first beta in the opposite direction, if the optimizer has either.
    "cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.05, total_steps=100, cycle_momentum=not {"momentum", "betas"}.isdisjoint(optimizer.defaults)
    ),
}
BY_HAND = ["together", "by turns", "toggled", "toggled by turns"]
# Forms of clipping: a norm per optimizer, a shared norm, only the first epoch, torch's function.
CLIPS = ["each its own", "Lightning's", "stops", "torch's"]


# Changes without effect ---------------------------------------------------------------------------------------------

_ARGUMENTS = {
    "layerwise": {"schedule": "layerwise"},
    "single": {"schedule": "single"},
    "merged": {"schedule": "merged"},
    "exchange after backward": {"overlaps_backward": False},
    "gradients of their own": {"gradient_as_bucket_view": False},
    "find_unused_parameters": {"find_unused_parameters": True},
}
_OBSERVERS = {
    "CompressionMonitor": lambda folder: CompressionMonitor(by_parameter=True),
    "ReplicaSentinel": lambda folder: ReplicaSentinel(every_n_steps=1),
    "OverlapTimeline": lambda folder: OverlapTimeline(range(0, 100, 2), path=f"{folder}/timeline.json"),
    "average at validation": lambda folder: AverageAtValidation(),
    "rank 0 alone looks": lambda folder: LambdaCallback(on_train_batch_end=look_alone),
    "a backward before Lightning's": lambda folder: LambdaCallback(on_train_batch_start=go_backward_before),
    "a rank dawdles": lambda folder: LambdaCallback(on_train_batch_start=dawdle),
    "memory moves before forward": lambda folder: LambdaCallback(on_train_batch_start=move_memory),
    "memory moves before the step": lambda folder: LambdaCallback(on_before_optimizer_step=move_memory),
}
# Changes that DDP supports, too.
_OF_MODEL = ("buffers assigned", "memory moves before forward", "memory moves before the step")
MAY_NOT_MATTER = (*_ARGUMENTS, *_OBSERVERS, "buffers assigned", "exchanges dawdle")


class AverageAtValidation(Callback):
    """A weight average that replaces the weights during validation."""

    def __init__(self):
        self.average = {}
        self.failures = 0  # number of validations with wrong weights

    def on_train_batch_end(self, trainer, pl_module, *batch):
        for name, parameter in pl_module.named_parameters():
            self.average.setdefault(name, parameter.detach().clone()).lerp_(parameter.detach(), 0.1)

    def on_validation_start(self, trainer, pl_module):
        self.own = {name: parameter.detach().clone() for name, parameter in pl_module.named_parameters()}
        write(pl_module, self.average)

    def on_validation_batch_start(self, trainer, pl_module, *batch):
        parameters = dict(pl_module.named_parameters())
        self.failures += any(not torch.equal(parameters[name], average) for name, average in self.average.items())

    def on_validation_end(self, trainer, pl_module):
        write(pl_module, self.own)

    def state_dict(self):
        return {"average": self.average}

    def load_state_dict(self, state_dict):
        self.average = state_dict["average"]


@torch.no_grad()
def write(module, tensors):
    for name, parameter in module.named_parameters():
        if name in tensors:
            parameter.copy_(tensors[name])


def look_alone(trainer, *batch):
    if trainer.is_global_zero and isinstance(trainer.strategy, SparseDDPStrategy):
        trainer.strategy.compression_stats()
        trainer.strategy.exchange_plan()


def dawdle(trainer, pl_module, batch, batch_idx):
    if batch_idx % trainer.world_size == trainer.global_rank:
        time.sleep(0.02)


def go_backward_before(trainer, *batch):
    held = (each for optimizer in trainer.optimizers for each in optimizer_parameters(optimizer))
    if trained := [each for each in held if each.requires_grad]:
        sum((1 + trainer.global_rank) * each.sum() for each in trained).backward()


def move_memory(trainer, pl_module, *rest):
    for parameter in pl_module.parameters():
        parameter.data = parameter.data.clone()


# The model --------------------------------------------------------------------------------------------------------

_PARAMETERS = ("frozen", "thawing", "tied", "never used", "used by a rank", "used by turns")
_BUFFERS = ("running mean", "mask", "normalized", "counter")
PARTS = (*_PARAMETERS, *_BUFFERS, "teacher", "averaged", "written by hand", "dead")


class Drawn(LightningModule):
    outer = ()  # wrapped model of a plain loop

    def __init__(self, training, has_more=False):
        super().__init__()
        self.drawn = training
        self.has_more = has_more
        self.automatic_optimization = not training.by_hand
        self._build(training.seed)
        if has_more:
            self.more = nn.Linear(8, 8)
        self.batches_seen = []  # state after each batch
        self.validated = []

    def _build(self, seed):
        torch.manual_seed(seed)
        parts, is_sharded = self.drawn.parts, self.drawn.is_sharded
        self.first = nn.Linear(WIDTH, 8, bias="normalized" not in parts)
        self.norm = nn.BatchNorm1d(8) if "normalized" in parts else nn.Identity()
        self.middle = nn.Linear(8, 8)
        if "tied" in parts:
            self.again = nn.Linear(8, 8)
            self.again.weight = self.middle.weight
        if self.drawn.seldom:
            self.seldom = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones((1,) if is_sharded else ()))  # FSDP does not shard 0-dim parameters
        self.head = nn.Linear(8, WIDTH)
        if "teacher" in parts:
            self.teacher = deepcopy(self.first).requires_grad_(False)
        if "averaged" in parts:  # the copy in torch's class requires gradients
            self.averaged = AveragedModel(self.first)
        if "frozen" in parts or "thawing" in parts:
            self.middle.requires_grad_(False)
        if "dead" in parts:  # the second half always has zero gradients
            self.dead = nn.Parameter(torch.zeros(8))
        self._build_buffers(parts)

    def _build_buffers(self, parts):
        if "mask" in parts:
            self.register_buffer("mask", torch.full((8, 8), -torch.inf).triu(1))
        if "running mean" in parts:
            self.register_buffer("mean", torch.zeros(8))
        if "counter" in parts:
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    @property
    def called(self):
        return self.outer[0] if self.outer else self

    def rows(self, batch_index):
        number = 1000 * self.current_epoch + 10 * batch_index + self.global_rank
        generator = torch.Generator().manual_seed(100_000 * self.drawn.seed + number)
        return torch.randn(5, WIDTH, generator=generator).to(self.device, self.dtype)

    def forward(self, rows, batch_index):
        parts = self.drawn.parts
        hidden = torch.tanh(self.norm(self.first(rows)))
        error = self._distance(hidden, rows)
        hidden = hidden + torch.tanh(self.middle(hidden))
        if self.has_more:
            hidden = hidden + torch.tanh(self.more(hidden))
        if "tied" in parts:
            hidden = hidden + torch.tanh(self.again(hidden))
        used = self.drawn.seldom
        if (used == "used by a rank" and self.global_rank == 0) or (used == "used by turns" and batch_index % 2):
            hidden = hidden + torch.tanh(self.seldom(hidden))
        if "mask" in parts:
            hidden = hidden @ torch.softmax(self.mask, dim=1)
        if "running mean" in parts:
            if self.training:
                self._follow("mean", hidden.detach().mean(dim=0))
            hidden = hidden - self.mean
        if self.training:
            self._count()
        if "dead" in parts:
            hidden = hidden + self.dead * (torch.arange(8, device=rows.device) < 4)
        return (self.head(hidden) * self.scale - rows).square() + 0.1 * error

    def _distance(self, hidden, rows):
        """Return the distance of the first layer's output from the output of its teacher and average."""
        error = torch.zeros((), device=rows.device)
        if "teacher" in self.drawn.parts:
            error = (hidden - torch.tanh(self.teacher(rows))).square().mean()
        if "averaged" in self.drawn.parts:
            with torch.no_grad():
                followed = torch.tanh(self.averaged(rows))
            error = error + (hidden - followed).square().mean()
        return error

    def _count(self):
        if "counter" in self.drawn.parts:
            self.count += 1

    def _follow(self, name, new):
        buffer = getattr(self, name)
        followed = 0.9 * buffer + 0.1 * new.to(buffer.dtype)
        if "buffers assigned" in self.drawn.may_not_matter:
            setattr(self, name, followed)
        else:
            buffer.copy_(followed)

    def training_step(self, batch, batch_index):
        if not self.drawn.by_hand:
            return self._loss(batch_index, 0, 1)
        self._step_by_hand(_listed(self.optimizers()), batch_index)
        return None

    def _step_by_hand(self, optimizers, batch_index):
        drawn = self.drawn
        is_first, is_last = batch_index % drawn.accumulates == 0, (batch_index + 1) % drawn.accumulates == 0
        if drawn.by_hand == "together":
            for optimizer in optimizers if is_first else ():
                optimizer.zero_grad()
            self._go_backward(batch_index)
            for number, optimizer in enumerate(optimizers if is_last else ()):
                self._step(optimizer, number)
            return
        for number, optimizer in enumerate(optimizers):
            if "by turns" in drawn.by_hand and batch_index % len(optimizers) != number:
                continue
            toggled = optimizer.toggle_model(sync_grad=is_last)
            with toggled if "toggled" in drawn.by_hand else nullcontext():
                if is_first:
                    optimizer.zero_grad()
                self._go_backward(batch_index, number)
                if is_last:
                    self._step(optimizer, number)

    def _go_backward(self, batch_index, number=0):
        for piece in range(self.drawn.backwards):
            self.manual_backward(self._loss(batch_index, piece + number, self.drawn.backwards))

    def _step(self, optimizer, number):
        self._clip(optimizer, self._norm(number))
        optimizer.step()
        if self.drawn.falls:
            _listed(self.lr_schedulers())[number].step()

    def _clip(self, optimizer, norm):
        if norm is not None and self.drawn.clips == "torch's":
            clip_as_torch_does(optimizer, norm)
        elif norm is not None:
            self.clip_gradients(optimizer, norm, "norm")

    def _norm(self, number):
        drawn = self.drawn
        if not drawn.clips or (drawn.clips == "stops" and self.current_epoch > 0):
            return None
        return drawn.norm * (1 + number) if drawn.clips == "each its own" else drawn.norm

    def configure_gradient_clipping(self, optimizer, *given, **named):
        self._clip(optimizer, self._norm(0))

    def _loss(self, batch_index, piece, pieces):
        drawn = self.drawn
        error = self.called(self.rows(batch_index), batch_index)
        weight = 1.0 + piece
        loss = weight * error[piece % 5 :: max(2, pieces)].mean() if pieces > 1 else weight * error.mean()
        return loss / (pieces * (drawn.accumulates if drawn.by_hand else 1))

    def validation_step(self, batch, batch_index):
        if not self.trainer.sanity_checking:
            self.called(self.rows(batch_index), batch_index)
            self.validated.append(self.state())

    def configure_optimizers(self):
        drawn, layers = self.drawn, [list[nn.Parameter]() for _ in range(self.drawn.optimizers)]
        names = [name for name in ("first", "head", "norm", "seldom", "middle", "again") if hasattr(self, name)]
        children = (child for child in map(self.get_submodule, names) if any(True for _ in child.parameters()))
        for number, child in enumerate(children):
            owned = set(chain.from_iterable(layers))  # skips parameters of tied layers
            layers[number % drawn.optimizers] += [each for each in child.parameters() if each not in owned]
        layers[0] += [self.dead] if "dead" in drawn.parts else []
        for number, mine in enumerate(layers):
            if number == 0 or drawn.shares:
                mine.append(self.scale)
        optimizers = [OPTIMIZERS[drawn.optimizer](mine) for mine in layers]
        if self.has_more:
            add_to(optimizers[-1], self.more)
        if not drawn.falls:
            return optimizers
        schedules = [SCHEDULES[drawn.falls](each) for each in optimizers]
        return optimizers, [{"scheduler": each, "interval": "step"} for each in schedules]

    def on_train_batch_start(self, batch, batch_idx):
        if "thawing" in self.drawn.parts:
            self.middle.requires_grad_(self.current_epoch % 2 == 1)
        batch_of_all = self.current_epoch * self.drawn.batches + batch_idx
        if self.drawn.adds == batch_of_all:
            torch.manual_seed(self.global_rank)
            self.more, self.has_more = nn.Linear(8, 8).to(self.device, self.dtype), True
            add_to(self.trainer.optimizers[-1], self.more)
        if self.drawn.renews == batch_of_all:
            self.trainer.optimizers = self.configure_optimizers()

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        drawn = self.drawn
        if "teacher" in drawn.parts:
            for teacher, student in zip(self.teacher.parameters(), self.first.parameters()):
                teacher.lerp_(student, 0.1)
        if "averaged" in drawn.parts:
            self.averaged.update_parameters(self.first)
        if "written by hand" in drawn.parts:
            self.head.weight.clamp_(-0.4, 0.4)
        self.batches_seen.append(self.state())
        self.saver.count(self.trainer, "batch")  # callbacks run before this hook

    def state(self):
        return state(chain(self.named_parameters(), self.named_buffers()))


def add_to(optimizer, layer):
    optimizer.add_param_group({"params": list(layer.parameters())})


class InShards(Drawn):
    def configure_model(self):
        if self.device_mesh is not None:
            for module in (self.first, self.head, self):
                fully_shard(module, mesh=self.device_mesh["data_parallel"])


def _listed(one_or_more):
    return one_or_more if isinstance(one_or_more, list) else [one_or_more]


def state(tensors):
    whole = ((name, each.full_tensor() if isinstance(each, DTensor) else each) for name, each in tensors)
    real = ((name, torch.view_as_real(each) if each.is_complex() else each) for name, each in whole)
    return {name: tensor.detach().flatten().tolist() for name, tensor in real}


def clip_as_torch_does(optimizer, norm):
    trained = [each for each in optimizer_parameters(optimizer) if each.grad is not None]
    if trained:
        nn.utils.clip_grad_norm_(trained, norm)


# Running ----------------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    batches: list[State]  # model after each batch
    validated: list[State]
    start: State
    saved: State  # state that this rank would write to a file
    end: State
    optimizers: list[Any]  # optimizer states at the end
    failures: int  # failures that callbacks count


class Saver(Callback):
    def __init__(self, point, path):
        self.point, self.path = point, path
        self.counts = {"batch": 0, "validation": 0, "epoch": 0}
        self.start = {}  # empty if no batch remains
        self.saved = {}

    def count(self, trainer, what):
        self.counts[what] += 1
        if self.point == (what, self.counts[what]):
            trainer.save_checkpoint(self.path)
            # Rank 0 writes the file, and the state of the other ranks must be equal. All ranks write shards together.
            is_sharded = isinstance(trainer.strategy, SparseModelParallelStrategy)
            saved = {} if is_sharded else trainer.strategy.lightning_module_state_dict()
            self.saved = state(saved.items()) or {"all ranks": []}

    def on_train_start(self, trainer, pl_module):
        self.start = pl_module.state()

    def on_validation_end(self, trainer, *rest):
        if not trainer.sanity_checking:
            self.count(trainer, "validation")

    def on_train_epoch_end(self, trainer, *rest):
        self.count(trainer, "epoch")


def settings_of(training):
    density = {} if training.subject.default_density is None else {"density": training.density, "warmup_steps": 0}
    whole = {} if training.is_sharded else {"schedule": training.schedule, "levels": training.levels}
    return {
        **whole,
        "wire": training.wire,
        "exchange": training.exchange,
        "optimizer_correction": training.correction,
        **({} if training.local is None else {"local_steps": training.local}),
        **density,
        **STRATEGIES[training.strategy](),
    }


def build_strategy(training, is_ddp=False):
    if is_ddp:
        return DDPStrategy(gradient_as_bucket_view=True, find_unused_parameters=training.uses_partly)
    if training.is_sharded:
        return SparseModelParallelStrategy(**settings_of(training))
    arguments = {}
    for name in training.may_not_matter:
        arguments |= _ARGUMENTS.get(name, {})
    return SparseDDPStrategy(**{**settings_of(training), **arguments})


def expect_warnings():
    expect(*_EXPECTED_WARNINGS)


def switch(choice):
    while True:
        choice.wants_dense = False
        yield
        yield from choice._change_to_ddp()


def fit(rank, training, folder, goes_on_from=None, is_ddp=False, has_more=False):
    if training.is_sharded:
        forget_groups()
    kind = InShards if training.is_sharded else Drawn
    model = kind(training, has_more)
    model.saver = saver = Saver(training.saves if goes_on_from is None else None, f"{folder}/mid.ckpt")
    observers = [build(folder) for name, build in _OBSERVERS.items() if name in training.may_not_matter]
    callbacks = [] if is_ddp else [CALLBACKS[name]() for name in training.callbacks]
    automatic = {} if training.by_hand else {"accumulate_grad_batches": training.accumulates}
    if not training.by_hand and training.clips:
        automatic["gradient_clip_val"] = training.norm
    validates = {} if training.validates is None else {"val_check_interval": training.validates}
    trainer = make_trainer(
        rank,
        build_strategy(training, is_ddp),
        local_world_size=training.ranks // training.nodes,
        callbacks=[*callbacks, *observers, saver],
        max_epochs=training.epochs,
        limit_val_batches=len(validates),
        num_sanity_val_steps=len(validates),
        precision=training.precision,
        logger=DummyLogger() if "CompressionMonitor" in training.may_not_matter else False,
        log_every_n_steps=2,
        use_distributed_sampler=False,
        default_root_dir=folder,
        **automatic,
        **validates,
    )
    expect_warnings()
    loaders = [DataLoader(range(batches), batch_size=None) for batches in (training.batches, 1)]
    with ExitStack() as patched:
        patched.enter_context(changing_hands())
        patched.enter_context(learning_in_turns(training.seed % 2 == 1))
        if "exchanges dawdle" in training.may_not_matter:
            patched.enter_context(mock.patch.object(engine_module, "ExchangeWorker", Sluggish))
        if training.strategy == "switching":
            patched.enter_context(mock.patch.object(AutoBackend, "_run", switch))
        trainer.fit(model, *loaders, ckpt_path=goes_on_from)
    failures = sum(getattr(each, "failures", 0) for each in observers)
    states = [
        {
            **state((name, each) for name, each in of_one.items() if isinstance(each, Tensor)),
            **{name: each for name, each in of_one.items() if not isinstance(each, Tensor)},
        }
        for optimizer in trainer.optimizers
        for _, of_one in sorted(optimizer.state_dict()["state"].items())
    ]
    return Outcome(model.batches_seen, model.validated, saver.start, saver.saved, model.state(), states, failures)


def train(rank, training, folder):
    outcomes = {}
    for name, each in training.variants().items():
        first = "all" if "all" in outcomes else "plain"
        if name != "resumed":
            outcomes[name] = fit(rank, each, f"{folder}/{name}", is_ddp=name == "ddp")
        elif outcomes[first].saved:
            outcomes[name] = go_on(rank, each, folder, first, outcomes[first].saved)
    return outcomes


def go_on(rank, training, folder, first, saved):
    has_more = "more.weight" in saved
    return fit(rank, training, f"{folder}/gone on {first}", f"{folder}/{first}/mid.ckpt", has_more=has_more)


# Drawing ----------------------------------------------------------------------------------------------------------


CHOICES = {  # values to draw; repeated values are more frequent
    "strategy": [*STRATEGIES, "topk", "topk", "lags", "dense"],
    "density": [0.05, 0.1, 0.3],
    "wire": ["float32", "float32", "bfloat16", "float16", "4bit", "2bit"],
    "schedule": ["layerwise", "single"],
    "exchange": ["auto", "auto", "gather", "owners"],
    "optimizer": ["sgd", "momentum", "momentum", "adamw", "adamw", "adamw", "rmsprop"],
    "optimizers": [1, 1, 2, 2, 3],
    "accumulates": [1, 1, 1, 2, 3],
    "precision": [*["32-true"] * 6, "bf16-mixed", "bf16-true"],
    "epochs": [1, 2, 3],
    "batches": [3, 4, 5, 6],
}
_DEFAULT = Training()


def is_refused(training):
    """Return whether the strategy refuses the settings. Tests of pages check that no other settings are refused."""
    try:
        build_strategy(training)
    except ValueError:
        return True
    return False


_IN_SHARDS = ("frozen", "tied", "never used", "used by turns", "mask", "teacher", "written by hand", "dead")
_KEPT_IN_SHARDS = ("seed", "strategy", "density", "wire", "exchange", "correction", "local", "accumulates", "falls")
_KEPT_IN_SHARDS += ("epochs", "batches", "validates", "saves")
_BESIDE_SHARDS = ("a rank dawdles", "exchanges dawdle")


def in_shards(training):
    sharded = Training(
        **{name: getattr(training, name) for name in _KEPT_IN_SHARDS},
        ranks=4,
        nodes=2,
        is_sharded=True,
        optimizer="momentum" if training.optimizer == "rmsprop" else training.optimizer,
        clips=training.clips and "Lightning's",
        parts=tuple(part for part in training.parts if part in _IN_SHARDS),
        may_not_matter=tuple(name for name in training.may_not_matter if name in _BESIDE_SHARDS),
    )
    is_known = training.strategy not in MEASURED and not is_refused(sharded)
    return sharded if is_known else sharded.but(strategy="topk")


def drawn(seed):
    chance = random.Random(seed)
    training = Training(seed=seed, **{name: chance.choice(values) for name, values in CHOICES.items()})
    for draw in (_with_exchange, _with_steps, _with_course):
        training = draw(training, chance)
    return in_shards(training) if seed % 12 == 5 else training


def _with_exchange(training, chance):
    local = _local(chance) if chance.random() < 0.35 else None
    nodes = chance.choice([1, 1, 1, 2] if local is None else [1, 2])
    corrected = [] if local else [AdamCorrection(2, chance.choice([0, 2]), chance.choice([1, 2, 3]))] * 4
    training = training.but(
        local=local,
        nodes=nodes,
        ranks=4 if nodes == 2 else chance.choice([2, 2, 2, 3]),
        levels=chance.choice(["auto", 1, 2, 2, 2]) if nodes == 2 else 1,
        correction=chance.choice(["auto", None, *corrected]) if training.has_adam else "auto",
    )
    for name in ("exchange", "wire", "levels", "correction", "local"):
        if is_refused(training):
            training = training.but(**{name: getattr(_DEFAULT, name)})
    is_adaptive = training.optimizer == "rmsprop" or training.correction is None
    if training.has_momentum and is_adaptive:
        training = training.but(optimizer="momentum", correction="auto")
    takes = {
        "MomentumCorrection": ("topk", "lags", "omgs") if training.optimizer == "momentum" else (),
        "AdaptiveDensity": ("topk", "lags", "dgc"),
    }
    drawn = tuple(name for name in CALLBACKS if training.strategy in takes[name] and chance.random() < 0.15)
    return training.but(callbacks=() if training.local else drawn)


def _local(chance):
    momentum = chance.choice([0.0, 0.0, 0.5])
    return LocalSteps(
        chance.choice([2, 2, 3, 4]),
        outer_lr=chance.choice([1.0, 1.0, 0.7]),
        outer_momentum=momentum,
        nesterov=momentum > 0 and chance.random() < 0.5,
        residual_decay=0.9 if chance.random() < 0.3 else 1.0,
    )


def _with_steps(training, chance):
    by_hand = chance.choice(BY_HAND) if training.optimizers > 1 or chance.random() < 0.2 else ""
    parts = [part for part in PARTS if chance.random() < 0.15]
    seldom = [part for part in parts if "used" in part]
    training = training.but(
        by_hand=by_hand,
        accumulates=1 if by_hand == "by turns" else training.accumulates,
        backwards=chance.choice([1, 1, 2, 3]) if by_hand else 1,
        parts=tuple(part for part in parts if part not in seldom[1:]),  # only one partly used layer
        clips=chance.choice(CLIPS if by_hand else CLIPS[1:]) if chance.random() < 0.3 else "",
        falls=chance.choice([*SCHEDULES]) if chance.random() < 0.3 else "",
    )
    # The loss of each optimizer needs a gradient.
    has_idle = not {"frozen", "thawing"}.isdisjoint(parts) or (training.optimizers == 3 and bool(seldom))
    training = training.but(shares=training.optimizers > 1 and (has_idle or chance.random() < 0.3))
    if training.has_momentum and by_hand:  # momentum correction needs one exchanged backward per step
        training = training.but(by_hand="together" if by_hand == "by turns" else by_hand, backwards=1, accumulates=1)
    return training


def _with_course(training, chance):
    """Add validations, saves and changes of the model at drawn batches."""
    batches = training.epochs * training.batches
    # Lightning drops the gradients of a manual accumulation in a validation.
    drops = training.by_hand != "" and training.accumulates > 1
    validates = None if drops else chance.choice([None, *range(1, training.batches + 1)])
    points = ["batch", "batch", "epoch", *(["validation"] if validates else [])]
    rare = 0.12 * (training.falls == "")  # the schedule holds the optimizers and their groups
    shares_and_values = {
        "saves": (0.6, (chance.choice(points), chance.randint(1, batches))),
        "renews": (rare * (training.accumulates == 1), chance.randrange(batches)),
        "adds": (rare, chance.randrange(batches)),
        "moves": (0.3, chance.choice([ranks for ranks in (1, 2, 3, 4) if ranks != training.ranks])),
    }
    more = {name: value for name, (share, value) in shares_and_values.items() if chance.random() < share}
    training = training.but(validates=validates, **more)
    free = tuple(name for name in MAY_NOT_MATTER if chance.random() < 0.2 and _can(training, name))
    return training.but(may_not_matter=free)


def _can(training, name):
    """Return whether a change has no effect on a training, according to the documentation."""
    if name in ("layerwise", "single", "merged"):
        return training.strategy not in MEASURED and not training.subject.selects_across_bucket
    if name == "gradients of their own":
        # DDP, which also runs dense steps, rounds differently if it reduces a gradient several times.
        return training.backwards == 1 and (training.by_hand == "" or training.accumulates == 1)
    if name == "a backward before Lightning's":  # inside a step, this backward would add to existing gradients
        return training.by_hand == "" and training.accumulates == 1
    if name == "OverlapTimeline":
        return training.local is None
    if name == "ReplicaSentinel":
        return not training.drifts
    if name == "average at validation":
        return training.validates is not None and not training.subject.replicas_diverge
    return True
