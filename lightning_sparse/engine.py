"""The engine: builds the nouns for one wrapped model, starts the worker and registers the hook."""

from datetime import timedelta
from typing import Optional, Union

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.collectives import Collectives
from lightning_sparse.compressors import COMPRESSORS, Compressor
from lightning_sparse.hook import GradientStream
from lightning_sparse.memory import Memory, NoMemory, ResidualMemory
from lightning_sparse.observe import Recorder
from lightning_sparse.pipeline import Pipeline
from lightning_sparse.schedule import SCHEDULES, ExchangeWorker, Schedule
from lightning_sparse.wire import WIRE_FORMATS, wire_dtype


class Settings:
    """What the user chose, checked and with names turned into objects.

    Args:
        compressor: name or object.
        density: fraction of elements sent, ``0 < density <= 1``; ``None`` for the compressor's own default.
        schedule: name or object.
        wire: name of the type of the values that travel.

    Raises:
        ValueError: for an unknown name, a density out of range, or a density for a compressor that has none.
        TypeError: for an object of the wrong kind.
    """

    def __init__(
        self,
        compressor: Union[str, Compressor],
        density: Optional[float],
        schedule: Union[str, Schedule],
        wire: str,
    ) -> None:
        self.compressor = COMPRESSORS.resolve(compressor)
        self.density = _checked_density(density, self.compressor)
        self.schedule = SCHEDULES.resolve(schedule)
        self.wire = wire_dtype(wire)

    def memory_for(self, gradient_dtypes: set[torch.dtype]) -> Memory:
        """Choose the memory: none where everything is sent and nothing is rounded."""
        wire_is_exact = gradient_dtypes <= {self.wire} and self.wire == torch.float32
        return NoMemory() if self.compressor.is_lossless and wire_is_exact else ResidualMemory()


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
        parameters = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
        device = parameters[0].device
        self._recorder = Recorder(device)
        self._collectives = Collectives(dist.get_process_group_ranks(ddp.process_group), device, timeout)
        wire_format = WIRE_FORMATS[settings.compressor.wire_format]
        self._collectives.check(wire_format.collectives)
        self.memory = settings.memory_for({parameter.dtype for parameter in parameters})
        self.pipeline = Pipeline(
            settings.compressor,
            self.memory,
            wire_format(settings.wire, self._collectives.rank, self._collectives.ranks),
            self._collectives,
            self._recorder,
            density_of=lambda name: settings.density,
        )
        self._worker = ExchangeWorker(device)
        self._stream = GradientStream(ddp, self.pipeline, settings.schedule, self._worker, self._recorder)

    def begin_backward(self, loss_scale: Optional[Tensor] = None) -> None:
        """Take note of what the loss of the coming backward was multiplied by.

        Args:
            loss_scale: tensor of one element on the gradients' device; ``None`` for 1.
        """
        self.pipeline.loss_scale = loss_scale

    def raise_error(self) -> None:
        """Raise what the exchange worker has raised, if it has."""
        self._worker.raise_error()

    def compression_stats(self) -> dict[str, float]:
        """Return the facts of the last step that ended; empty before the first."""
        return self._recorder.last.as_stats() if self._recorder.last is not None else {}

    def close(self) -> None:
        """End the worker and give the process group back; safe to call twice."""
        self._stream.close()
        # A worker that hangs in a collective still needs the process group that it hangs in.
        if self._worker.close():
            self._collectives.close()


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
