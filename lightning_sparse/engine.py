"""The engine: builds the nouns for one wrapped model, starts the worker and registers the hook."""

from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Optional, Union

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.collectives import Collectives
from lightning_sparse.compressors import COMPRESSORS, Compressor
from lightning_sparse.feedback import ErrorFeedback, Hyperparameters
from lightning_sparse.hook import GradientStream
from lightning_sparse.layout import ModelLayout
from lightning_sparse.memory import Memory, NoMemory, build_memory
from lightning_sparse.observe import Recorder
from lightning_sparse.pipeline import Pipeline, StepContext
from lightning_sparse.replicas import ReplicaAverager
from lightning_sparse.schedule import SCHEDULES, ExchangeWorker, Schedule
from lightning_sparse.wire import WIRE_FORMATS, wire_dtype


class Settings:
    """What the user chose, checked and with names turned into objects.

    Args:
        compressor: name or object.
        density: fraction of elements sent, ``0 < density <= 1``; ``None`` for the compressor's own default.
        schedule: name or object.
        wire: name of the type of the values that travel.
        warmup_epochs: epochs over which the density falls to its target; ``None`` for the compressor's own default.

    Raises:
        ValueError: for an unknown name, a density out of range, a density for a compressor that has none, or a
            warm-up that is negative.
        TypeError: for an object of the wrong kind.
    """

    def __init__(
        self,
        compressor: Union[str, Compressor],
        density: Optional[float],
        schedule: Union[str, Schedule],
        wire: str,
        warmup_epochs: Optional[int] = None,
    ) -> None:
        self.compressor = COMPRESSORS.resolve(compressor)
        self.density = _checked_density(density, self.compressor)
        self.warmup_epochs = _checked_warmup(warmup_epochs, self.compressor)
        self.schedule = SCHEDULES.resolve(schedule)
        self.wire = wire_dtype(wire)

    def density_at(self, epoch: int) -> float:
        """Return the density of an epoch: during warm-up it falls geometrically, from near a quarter at 0.001.

        With a density of 0.001 and four epochs it is 0.25, 0.063, 0.016, 0.004 and then 0.001, as in Deep Gradient
        Compression (arXiv 1712.01887, section 3.3; the exponent is that of its released code).
        """
        if epoch >= self.warmup_epochs:
            return self.density
        return float(self.density ** ((epoch + 1) / (self.warmup_epochs + 1)))

    def memory_for(self, gradient_dtypes: set[torch.dtype], ranks: int) -> Memory:
        """Choose the memory: what the compressor asks for, or none where nothing can be left over."""
        wire_is_exact = gradient_dtypes <= {self.wire} and self.wire == torch.float32
        feedback = self.compressor.feedback
        if self.compressor.is_lossless and wire_is_exact and feedback == ErrorFeedback():
            return NoMemory()
        return build_memory(feedback, ranks)


class Engine:
    """Exchange the gradients of one wrapped model, until closed.

    Args:
        ddp: the wrapped model. It should have been built with ``bucket_cap_mb=BUCKET_CAP_MB``, see
            :mod:`lightning_sparse.hook`; its communication hook is registered here.
        settings: what the user chose.
        timeout: how long an exchange may wait for its peers; ``None`` for the backend's default.

    Raises:
        RuntimeError: if the backend lacks a collective that the compressor needs.
    """

    def __init__(self, ddp: DistributedDataParallel, settings: Settings, timeout: Optional[timedelta] = None) -> None:
        parameters = {name: tensor for name, tensor in ddp.module.named_parameters() if tensor.requires_grad}
        device = next(iter(parameters.values())).device
        self._density = settings.density_at(0)
        self._settings = settings
        self._recorder = Recorder(device)
        self._collectives = Collectives(dist.get_process_group_ranks(ddp.process_group), device, timeout)
        compressor = settings.compressor
        wire_format = WIRE_FORMATS[compressor.wire_format]
        self._collectives.check(wire_format.collectives)
        ranks = self._collectives.ranks
        numels = tuple(tensor.numel() for tensor in parameters.values())
        compressor.begin(ModelLayout(tuple(parameters), numels, self._collectives.rank, ranks, device))
        self.memory = settings.memory_for({tensor.dtype for tensor in parameters.values()}, ranks)
        self.pipeline = Pipeline(
            compressor,
            self.memory,
            wire_format(settings.wire, self._collectives.rank, ranks),
            self._collectives,
            self._recorder,
            density_of=lambda name: compressor.density_of(name, self._density),
        )
        self._worker = ExchangeWorker(device)
        self._averager = (
            ReplicaAverager(ddp.module, self._collectives, compressor.param_sync_every)
            if compressor.replicas_diverge
            else None
        )
        self._stream = GradientStream(ddp, self.pipeline, settings.schedule, self._worker, self._recorder)

    def begin_backward(
        self,
        loss_scale: Optional[Tensor] = None,
        hyperparameters: Mapping[str, Hyperparameters] = MappingProxyType({}),
        epoch: int = 0,
        samples_deltas: bool = False,
    ) -> None:
        """Take note of what the outside knows of the step whose backward comes next.

        Args:
            loss_scale: what its loss was multiplied by, tensor of one element on the gradients' device; ``None`` for 1.
            hyperparameters: what the optimizer does, by parameter name.
            epoch: from 0.
            samples_deltas: whether to compute :meth:`layer_deltas` in this step; the same on all ranks.
        """
        self.pipeline.context = StepContext(loss_scale, hyperparameters, samples_deltas)
        self._density = self._settings.density_at(epoch)

    def end_step(self) -> None:
        """Take note that the optimizer has made a step; average the replicas where that is due."""
        if self._averager is not None and self._averager.count_step():
            self.synchronize_replicas()

    def synchronize_replicas(self) -> None:
        """Average parameters and buffers over ranks, where the method has let them drift apart; all ranks must call."""
        if self._averager is not None and self._averager.have_drifted:
            self._worker.run(self._averager.average)
            if self._recorder.last is not None:
                self._recorder.last.wire_bytes += self._averager.sent_bytes

    def raise_error(self) -> None:
        """Raise what the exchange worker has raised, if it has."""
        self._worker.raise_error()

    def compression_stats(self) -> dict[str, float]:
        """Return the facts of the last step that ended; empty before the first."""
        if self._recorder.last is None:
            return {}
        stats = {**self._recorder.last.as_stats(), "total_wire_bytes": float(self._recorder.total_wire_bytes)}
        return stats if self._averager is None else {**stats, "replica_divergence": float(self._averager.divergence)}

    def layer_deltas(self) -> dict[str, Tensor]:
        """Return the last step's ``delta`` of every layer; empty if it was not sampled."""
        return {} if self._recorder.last is None else dict(self._recorder.last.deltas)

    def settle(self) -> None:
        """Wait until the exchanges that are queued have been done, so that :meth:`state_dict` is that of a whole step.

        Raises:
            BaseException: what the exchange worker has raised.
        """
        self._worker.run(lambda: None)

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept and what the method has learned, as plain tensors and numbers (not copied)."""
        state = {"memory": self.memory.state_dict(), "compressor": self._settings.compressor.state_dict()}
        return state if self._averager is None else {**state, "averager": self._averager.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace those parts that ``state`` holds by a copy; the others stay as they are.

        Raises:
            ValueError: if a part is that of another method.
        """
        self.settle()
        if "memory" in state:
            self.memory.load_state_dict(state["memory"])
        if "compressor" in state:
            self._settings.compressor.load_state_dict(state["compressor"])
        if "averager" in state and self._averager is not None:
            self._averager.load_state_dict(state["averager"])

    def close(self) -> bool:
        """End the worker and give the process group back; safe to call twice.

        Returns:
            whether what is kept is that of a whole step: no exchange has failed, or hangs.
        """
        self._stream.close()
        # A worker that hangs in a collective still needs the process group that it hangs in.
        has_ended = self._worker.close()
        if has_ended:
            self._collectives.close()
        return has_ended and self._worker.error is None


def _checked_density(density: Optional[float], compressor: Compressor) -> float:
    name = type(compressor).__name__
    if compressor.default_density is None:
        if density is not None:
            raise ValueError(
                f"density={density} was given to {name}, which has no density: leave it out, or choose a sparsifier"
                " such as compressor='topk'"
            )
        return 1.0
    if density is None:
        return compressor.default_density
    if not isinstance(density, (int, float)) or not 0 < density <= 1:
        raise ValueError(
            f"density={density} must be a fraction of elements with 0 < density <= 1; 0.01 sends one in a hundred."
            " For a compression ratio such as 100, pass its inverse."
        )
    return float(density)


def _checked_warmup(epochs: Optional[int], compressor: Compressor) -> int:
    if epochs is None:
        return compressor.default_warmup_epochs
    if compressor.default_density is None and epochs:
        raise ValueError(
            f"warmup_epochs={epochs} was given to {type(compressor).__name__}, which has no density to warm up: leave"
            " it out"
        )
    if not isinstance(epochs, int) or epochs < 0:
        raise ValueError(f"warmup_epochs={epochs!r} must be a whole number of epochs, at least 0 (0 = no warm-up)")
    return epochs
