"""Run random trainings in a plain or Fabric loop. The result must be bitwise identical to the Trainer's."""

import os
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse import GradientSparsifier, SparseFabricStrategy, sparsify_gradients
from lightning_sparse.engine.memory import optimizer_parameters
from tests.compatibility.running import changing_hands
from tests.helpers.devices import DEVICE
from tests.helpers.random_trainings import (
    MEASURED,
    Drawn,
    Outcome,
    Training,
    clip_as_torch_does,
    expect_warnings,
    fit,
    settings_of,
)
from tests.helpers.trainers import accelerator, learning_in_turns

_OF_THE_TRAINER = ("callbacks", "renews", "may_not_matter")
# Local buffers: the entry points broadcast at different times.
_OWN_BUFFERS = ("running mean", "normalized", "counter")


def in_a_loop(training):
    by_hand = "together" if training.by_hand else ""
    is_known = not training.subject.replicas_diverge and training.strategy not in MEASURED
    found = training.but(
        is_sharded=False,  # only the Trainer supports shards
        by_hand=by_hand,
        backwards=1,
        accumulates=1 if by_hand else training.accumulates,
        strategy=training.strategy if is_known else "topk",
        **{name: Training.__dataclass_fields__[name].default for name in _OF_THE_TRAINER},
    )
    # A plain loop sends frozen parameters as zeros until the end, but the Trainer stops. So frozen parameters must not
    # compete.
    competes = found.subject.selects_across_bucket or found.subject.wire_format == "union"
    left_out = ("thawing",) if competes or found.local else ()
    left_out += _OWN_BUFFERS if by_hand or found.validates or found.local else ()
    return found.but(parts=tuple(part for part in found.parts if part not in left_out))


class Alone(Drawn):
    trainer = None


class PlainLoop:
    wrap = staticmethod(lambda module: module)

    def __init__(self, rank, training, has_more=False):
        self.rank, self.training = rank, training
        self.model = model = Alone(training, has_more)
        facts = {"global_rank": rank, "current_epoch": 0, "should_stop": False, "sanity_checking": False}
        model._trainer = model.trainer = self.trainer = SimpleNamespace(**facts)
        model.saver = SimpleNamespace(count=lambda *given: None)
        self.path = ""
        steps = training.epochs * -(-training.batches // training.accumulates)
        self.set_up({**settings_of(training), "total_steps": steps})
        model.outer = (self.outer,)  # the tuple prevents registration as a submodule
        self.trainer.optimizers = self.optimizers

    def set_up(self, settings):
        self.model.to(DEVICE, *([torch.bfloat16] if self.training.precision == "bf16-true" else []))
        self.configure_optimizers()
        self.outer = self.wrap(self.model)
        self.handle = sparsify_gradients(self.outer, self.optimizers, **settings)

    def configure_optimizers(self):
        given = self.model.configure_optimizers()
        self.optimizers, schedules = given if isinstance(given, tuple) else (given, [])
        self.schedules = [each["scheduler"] for each in schedules]

    def run(self, first=0):
        training, model = self.training, self.model
        for number in range(first, training.epochs * training.batches):
            self.trainer.current_epoch, index = divmod(number, training.batches)
            model.on_train_batch_start(None, index)
            is_last = (index + 1) % training.accumulates == 0 or index + 1 == training.batches
            self.train_batch(index, is_last)
            model.on_train_batch_end(None, None, index)
            if training.seed % 2 and is_last:
                self.look()
            if training.validates and (index + 1) % training.validates == 0:
                self.validate()
            if is_last and self.path and training.saves == ("batch", number + 1):
                self.save()
        self.handle.close()
        return Outcome(model.batches_seen, model.validated, {}, {}, model.state(), [], 0)

    def train_batch(self, index, is_last):
        with nullcontext() if is_last else self.no_sync():
            with self.computing():
                loss = self.model._loss(index, 0, 1)
            self.backward(loss if self.training.by_hand else loss / self.training.accumulates)
        for number, optimizer in enumerate(self.optimizers if is_last else ()):
            self.clip(number)
            optimizer.step()
            if self.training.falls:
                self.schedules[number].step()
        for optimizer in self.optimizers if is_last else ():
            optimizer.zero_grad()

    def clip(self, number):
        trained = optimizer_parameters(self.optimizers[number])
        if (norm := self.model._norm(number)) is not None and any(each.grad is not None for each in trained):
            self.clip_gradients(self.optimizers[number], norm)

    def validate(self):
        self.handle.synchronize()
        self.outer.eval()
        with self.handle.shared_model(), torch.no_grad(), self.computing():
            self.model.validation_step(None, 0)
        self.outer.train()

    def look(self):
        """Read statistics and state, on some ranks only. Reading must change no bit."""
        handle = self.handle if isinstance(self.handle, GradientSparsifier) else self.handle.handle(self.outer)
        handle.check_replicas()
        if handle.training is not None:
            handle.training.state(together=True)
        if self.rank == 0:
            handle.compression_stats(), handle.exchange_plan()
            self.model.eval()
            with handle.shared_model(), torch.no_grad(), self.computing():
                self.model(self.model.rows(0), 0)
            self.model.train()

    @property
    def parts(self):
        return {"model": self.model, **{str(n): each for n, each in enumerate([*self.optimizers, *self.schedules])}}

    # Operations of the entry point, for subclasses.

    def backward(self, loss):
        loss.backward()

    def no_sync(self):
        return self.handle.no_sync()

    def clip_gradients(self, optimizer, norm):
        clip_as_torch_does(optimizer, norm)

    @contextmanager
    def computing(self):
        precision, before = self.training.precision, torch.get_default_dtype()
        with torch.autocast(DEVICE.type, torch.bfloat16, precision == "bf16-mixed", cache_enabled=False):
            torch.set_default_dtype(torch.bfloat16 if precision == "bf16-true" else before)
            try:
                yield
            finally:
                torch.set_default_dtype(before)

    def save(self):
        self.handle.save_state(f"{self.path}-state")
        with self.handle.shared_model():
            if self.rank == 0:
                torch.save({name: part.state_dict() for name, part in self.parts.items()}, self.path)
        dist.barrier()

    def load(self, path):
        saved = torch.load(path, weights_only=True)
        for name, part in self.parts.items():
            part.load_state_dict(saved[name])
        self.handle.load_state(f"{path}-state")


class WrappedLoop(PlainLoop):
    wrap = DistributedDataParallel


class FabricLoop(PlainLoop):
    def set_up(self, settings):
        self.handle = SparseFabricStrategy(**settings)
        devices = self.training.ranks // self.training.nodes
        fabric = self.fabric = Fabric(
            strategy=self.handle,
            accelerator=accelerator(),
            devices=devices,
            num_nodes=self.training.nodes,
            precision=self.training.precision,
        )
        fabric.launch()
        self.model.to(fabric.device)
        self.model = fabric._precision.convert_module(self.model)
        self.configure_optimizers()
        self.outer, *self.optimizers = fabric.setup(self.model, *self.optimizers)

    def backward(self, loss):
        self.fabric.backward(loss)

    def no_sync(self):
        return self.fabric.no_backward_sync(self.outer)

    def clip_gradients(self, optimizer, norm):
        self.fabric.clip_gradients(self.outer, optimizer, max_norm=norm)

    def computing(self):
        return self.fabric.autocast()

    @property
    def parts(self):
        return {**super().parts, "model": self.outer}

    def save(self):
        self.fabric.save(self.path, self.parts)

    def load(self, path):
        self.fabric.load(path, self.parts)


LOOPS = {"plain": PlainLoop, "wrapped": WrappedLoop, "fabric": FabricLoop}


def train_everywhere(rank, training, folder, loop):
    outcomes = {"trainer": fit(rank, training, f"{folder}/trainer")}
    node, local = divmod(rank, training.ranks // training.nodes)
    there = {"GROUP_RANK": str(node), "NODE_RANK": str(node), "LOCAL_RANK": str(local)}
    path = f"{folder}/kept.ckpt"
    with ExitStack() as around:
        around.enter_context(mock.patch.dict(os.environ, there))
        around.enter_context(changing_hands())
        around.enter_context(learning_in_turns(training.seed % 2 == 1))
        expect_warnings()
        first = LOOPS[loop](rank, training)
        first.path = path if training.is_resumable else ""
        outcomes["loop"] = first.run()
        if os.path.exists(path):
            number = training.saves[1]
            again = LOOPS[loop](rank, training, training.adds is not None and training.adds < number)
            again.load(path)
            outcomes["resumed"] = again.run(number)
    return outcomes
