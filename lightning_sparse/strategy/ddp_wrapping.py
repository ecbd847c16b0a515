"""The DDP wrapper: built for the engine or for plain DDP, and anew when other parameters are trained."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse.engine.step.hook import bucket_cap_mb
from lightning_sparse.loop.checks import check_reducer
from lightning_sparse.strategy.trained import TrainedParameters

# The buckets along which torch.compile cuts its graph; DDP's own default.
_COMPILE_BUCKET_BYTES = 25 * 1024 * 1024
ALIKE = (
    "What is trained has to change on all ranks before the same training_step: do not let it depend on the rank, on its"
    " own data or on its clock"
)


class DDPWrapping:
    """Wrap a model in ``DistributedDataParallel``, and know which of its parameters the wrapper takes care of.

    When parameters are frozen, unfrozen, or added to model and optimizer, the model has to be wrapped anew; DDP would
    wait for ever, or let replicas drift apart.

    Args:
        is_silent: whether gradients are never exchanged by the wrapper, unless it is for plain DDP: then it has no
            memory for them.

    Attributes:
        is_plain: whether the wrapper is for plain DDP, and not for the engine.
        trained: the parameters that it takes care of.
    """

    trained: TrainedParameters

    def __init__(self, is_silent: bool = False) -> None:
        self.is_plain = False
        self._is_silent = is_silent
        self._stream: Optional[torch.cuda.Stream] = None

    def wrap(
        self, module: Module, device_ids: Optional[list[int]], arguments: Mapping[str, Any]
    ) -> DistributedDataParallel:
        """Return the wrapped model.

        Args:
            module: the model.
            device_ids: as DDP takes them; ``None`` on CPU.
            arguments: of ``DistributedDataParallel``.
        """
        is_silent = self._is_silent and not self.is_plain
        bucket_cap = None if self.is_plain else bucket_cap_mb(module)
        given = {**arguments, "bucket_cap_mb": bucket_cap}
        if is_silent:  # broadcast_buffers=False would leave buffers as they are, whose changes its user averages
            given.pop("broadcast_buffers", None)
        ddp = self._built(module, device_ids, given)
        if is_silent:
            del ddp  # it has made the replicas alike
            ddp = self._silent(module, device_ids, arguments)
        check_reducer(ddp)
        ddp.bucket_bytes_cap = _COMPILE_BUCKET_BYTES
        self.trained = TrainedParameters(module)
        return ddp

    def _silent(
        self, module: Module, device_ids: Optional[list[int]], arguments: Mapping[str, Any]
    ) -> DistributedDataParallel:
        """Wrap in a DDP that takes care of the smallest parameter alone: its buckets are memory that nobody reads."""
        kept = min((each for each in module.parameters() if each.requires_grad), key=Tensor.numel)
        others = [name for name, each in module.named_parameters(remove_duplicate=False) if each is not kept]
        others += [f".{name}" for name in others]  # as DDP calls those of the module itself
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, others)
        try:
            return self._built(module, device_ids, {**arguments, "init_sync": False})
        finally:
            del module._ddp_params_and_buffers_to_ignore

    def _built(
        self, module: Module, device_ids: Optional[list[int]], arguments: Mapping[str, Any]
    ) -> DistributedDataParallel:
        """Wrap as Lightning does, on a stream beside that of the caller; but always on the same one, and in order."""
        if device_ids is None:
            return DistributedDataParallel(module=module, device_ids=None, **arguments)
        # Gradients are written on the stream on which their parameter was first wrapped, for as long as anybody keeps
        # the graph of a step, such as a loss that is not detached. Those of one group must not come from several.
        if self._stream is None:
            self._stream = torch.cuda.Stream(device_ids[0])
        caller = torch.cuda.current_stream(device_ids[0])
        # DDP broadcasts all parameters where some are new, and replaces gradients that it finds by copies in buckets of
        # its own: after what the last step writes, and before the next reads these, or writes into the memory of those.
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            ddp = DistributedDataParallel(module=module, device_ids=device_ids, **arguments)
        caller.wait_stream(self._stream)
        return ddp

    def check(self, optimizers: Sequence[Optimizer], tolerates_unused: bool) -> None:
        """Check that the same parameters require a gradient as when the forward of this step began.

        Args:
            optimizers: that train the model.
            tolerates_unused: whether DDP goes on where a parameter gets no gradient.

        Raises:
            RuntimeError: if others do.
        """
        if not self.trained.have_changed(optimizers):
            return
        if self.trained.unfrozen() or not tolerates_unused:
            raise RuntimeError(
                f"{self.trained.changes()}, inside training_step, when gradients are already waited for. Do it before,"
                " such as in on_train_batch_start or on_train_epoch_start; for optimizers that take turns"
                " (toggle_optimizer) use find_unused_parameters=True"
            )

    def close(self) -> None:
        """Let go of the stream, which cannot be pickled; the next model is wrapped for the engine."""
        self._stream = None
        self.is_plain = False


def note_use(ddp: DistributedDataParallel, used: Iterable[Parameter]) -> None:
    """Tell a new wrapper what the step in progress has used so far: DDP drops the mean of what seems unused."""
    gradients = {each: each.grad for each in used if each.requires_grad and each.grad is not None}
    if gradients:
        with ddp.no_sync():
            torch.autograd.backward(list(gradients), [torch.zeros_like(gradient) for gradient in gradients.values()])
