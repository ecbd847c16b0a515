"""Keyword arguments of the strategies and of ``sparsify_gradients``: types, and a check of each call."""

import difflib
import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, Optional, TypeVar, Union

from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.compressors import Compressor
from lightning_sparse.engine.settings import DEFAULTS, Compression, LocalSteps, Settings
from lightning_sparse.removed import refuse_removed

Function = TypeVar("Function", bound=Callable[..., Any])
REFUSED = {
    "ddp_comm_hook": "the strategy reduces gradients itself; use wire='bfloat16', or DDPStrategy for a hook",
    "model_averaging_period": "torch's post-localSGD hook is not used; for local steps use local_steps=...",
    "bucket_cap_mb": "the schedule decides the buckets; use schedule=FixedSize(min_elements=...)",
    "bucket_cap_mb_list": "the schedule decides the buckets; use schedule=FixedSize(min_elements=...)",
    "process_group": "gradients are exchanged between all processes of the training; omit the argument",
    "module": "Lightning wraps the model of fit or Fabric.setup; omit the argument",
    "mixed_precision": "the model is not wrapped; use Trainer(precision='bf16-mixed') or Fabric(precision=...)",
    "device_ids": "Lightning chooses a device for each process; use Trainer(devices=...) or Fabric(devices=...)",
}


class DDPArguments(Compression, total=False):
    """Keyword arguments: settings, and arguments of Lightning's ``DDPStrategy`` and torch's DDP."""

    accelerator: Any
    parallel_devices: Any
    cluster_environment: Any
    checkpoint_io: Any
    precision_plugin: Any
    precision: Any
    process_group_backend: Optional[str]
    timeout: Optional[timedelta]
    start_method: Literal["popen", "spawn", "fork", "forkserver"]
    broadcast_buffers: bool
    init_sync: bool
    find_unused_parameters: bool
    static_graph: bool
    gradient_as_bucket_view: bool  # accepted without effect, because DDP's buckets are not used


class LoopArguments(Compression, total=False):
    """Arguments of :func:`~lightning_sparse.sparsify_gradients`, except the model and the optimizer."""

    compressor: Union[str, Compressor]
    density: Optional[float]
    scaler: Any
    total_steps: Optional[int]
    timeout: Optional[timedelta]


class ShardArguments(Compression, total=False):
    """Keyword arguments: settings, and arguments of Lightning's ``ModelParallelStrategy``."""

    tensor_parallel_size: Union[Literal["auto"], int]
    save_distributed_checkpoint: bool
    process_group_backend: Optional[str]
    timeout: Optional[timedelta]


def with_settings_signature(*left_out: str) -> Callable[[Function], Function]:
    """Show each setting as a parameter in the signature of a function, except the names in ``left_out``.

    Type checkers and editors read ``**settings: Unpack[...]``, but ``help()`` and command lines read the signature.
    """

    def show(function: Function) -> Function:
        signature = inspect.signature(function)
        *own, rest = signature.parameters.values()
        settings = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=DEFAULTS[name], annotation=kind)  # type: ignore[literal-required]
            for name, kind in Compression.__annotations__.items()
            if name not in left_out
        ]
        others = [] if rest.annotation.__args__ == (Compression,) else [rest.replace(annotation=Any)]
        function.__signature__ = signature.replace(parameters=[*own, *settings, *others])  # type: ignore[attr-defined]
        function.__doc__ = function.__doc__ or Compression.__doc__
        return function

    return show


def pop_settings(
    entry: Callable[..., Any],
    compressor: Union[str, Compressor],
    density: Optional[float],
    given: Any,
    *bases: Callable[..., Any],
) -> Settings:
    """Remove the settings from the keyword arguments of a call, and check the remaining arguments.

    Args:
        entry: the called function or class.
        compressor: compressor or name of a compressor.
        density: fraction of elements sent; ``None`` for the compressor's default.
        given: keyword arguments of the call, from which the settings are removed in place.
        bases: functions and classes that accept the remaining arguments.
    """
    own = _names(entry)
    settings = Settings.of(compressor, density, **{name: given.pop(name) for name in own & DEFAULTS.keys() & {*given}})
    for name, value in given.items():
        if value is not None and name in REFUSED and DistributedDataParallel in bases:
            raise ValueError(f"{name}={value!r} cannot be given to {entry.__name__}: {REFUSED[name]}")
        if not any(name in _names(base) for base in bases):
            refuse_removed(f"{name}={value!r} of {entry.__name__}", name)
            hint = _hint(name, settings.compressor, [each for kind in (entry, *bases) for each in _names(kind)])
            raise TypeError(f"{name}={value!r} is no argument of {entry.__name__}: {hint}")
    return settings


def _hint(name: str, compressor: Compressor, known: Sequence[str]) -> str:
    for kind in (type(compressor), LocalSteps):
        if name in _names(kind):
            return f"{kind.__name__} has this argument: use {kind.__name__}({name}=...)"
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else "omit the argument"


def _names(function: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(function).parameters.items()
    return {name for name, parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD}
