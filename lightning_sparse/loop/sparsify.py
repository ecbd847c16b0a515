"""The entry point for loops without a Trainer: :func:`sparsify_gradients`."""

import logging
from collections.abc import Iterable
from datetime import timedelta
from typing import Optional, Union

import torch.distributed as dist
from torch.amp import GradScaler
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import Unpack

from lightning_sparse.compressors import Compressor
from lightning_sparse.engine.requirements import missing_capabilities, refuse
from lightning_sparse.engine.settings import Compression
from lightning_sparse.loop.arguments import pop_settings, with_settings_signature
from lightning_sparse.loop.checks import check_facts
from lightning_sparse.loop.handle import GradientSparsifier
from lightning_sparse.loop.levels import own_node
from lightning_sparse.loop.optimizers import unwrapped
from lightning_sparse.loop.training import RuntimeOptions

_LOGGER = logging.getLogger(__name__)


@with_settings_signature()
def sparsify_gradients(
    model: Module,
    optimizer: Union[Optimizer, Iterable[Optimizer]],
    compressor: Union[str, Compressor] = "lags",
    density: Optional[float] = None,
    *,
    scaler: Optional[GradScaler] = None,
    total_steps: Optional[int] = None,
    timeout: Optional[timedelta] = None,
    **given: Unpack[Compression],
) -> "GradientSparsifier":
    """Exchange only the largest part of each gradient of a model, in a custom training loop.

    Call the function once on all ranks, before the first backward. Parameters and buffers are broadcast from rank 0.
    Gradients are exchanged during backward. When backward ends, ``.grad`` holds the mean over ranks. On one process the
    function only checks the arguments.

    Args:
        model: a module without a wrapper; the training loop calls the module as before. Buffers are broadcast from rank
            0 before the first training forward of a step, as with DDP. The model may also be a
            ``DistributedDataParallel`` of all processes, which then reduces no gradient.
        optimizer: one or several optimizers of the model. If a library such as Accelerate wraps an optimizer, the inner
            optimizer is used.
        compressor: name of a compressor, or an object. Compressors with diverging replicas are not supported.
        density: fraction of elements sent; ``None`` for the default density.
        scaler: the gradient scaler, or ``None``. Residuals are stored unscaled.
        total_steps: optimizer steps of the whole training, which Adam's warm-up depends on; ``None`` if unknown.
            Required if ``warmup_steps`` is a fraction, as by default with ``"dgc"`` and ``"sdagc"``.
        timeout: maximum time that an exchange waits for other ranks; ``None`` for the timeout of the process group.
        **given: settings of :class:`~lightning_sparse.Compression`. ``levels`` identifies nodes by torchrun's node
            numbers, or by host names. With ``local_steps`` all ranks must make equally many steps, and call
            :meth:`~lightning_sparse.GradientSparsifier.close` at the end. Evaluate and save inside
            :meth:`~lightning_sparse.GradientSparsifier.shared_model`.

    Raises:
        ValueError: for a value out of range, an unknown name, or a setting that only the Trainer supports.
        TypeError: for an object of the wrong type, or an unknown argument.
        RuntimeError: if the model has a communication hook, or gradients of the model are already exchanged.
    """
    optimizers = [unwrapped(each) for each in ([optimizer] if isinstance(optimizer, Optimizer) else optimizer)]
    settings = pop_settings(sparsify_gradients, compressor, density, given)
    refuse(missing_capabilities("in a plain loop or Fabric", settings))
    check_facts(scaler, total_steps)
    wrapped = getattr(model, "_orig_mod", None)  # Accelerate compiles the DDP wrapper
    model = wrapped if isinstance(wrapped, DistributedDataParallel) else model
    options = RuntimeOptions(timeout, scaler)
    return GradientSparsifier(model, optimizers, settings, options, own_node(), total_steps, _log)


def _log(line: str) -> None:
    if dist.get_rank() == 0:
        _LOGGER.info("sparsify_gradients: %s", line)
