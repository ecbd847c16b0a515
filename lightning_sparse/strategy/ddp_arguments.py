"""The arguments that go on to DDPStrategy and DistributedDataParallel: which there are, and which are refused."""

import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.compressors import Compressor
from lightning_sparse.engine.settings import LocalSteps, Settings

_REFUSED = {
    "ddp_comm_hook": "the strategy takes the gradients itself; for a hook use DDPStrategy",
    "ddp_comm_state": "it belongs to a hook, and the strategy takes the gradients itself; for a hook use DDPStrategy",
    "ddp_comm_wrapper": "it wraps a hook; to send 16-bit values use wire='float16' or wire='bfloat16'",
    "model_averaging_period": "it belongs to torch's post-localSGD hook; for local steps use local_steps=...",
    "bucket_cap_mb": "the schedule decides what travels together; use schedule=FixedSize(min_elements=...)",
    "bucket_cap_mb_list": "the schedule decides what travels together; use schedule=FixedSize(min_elements=...)",
    "process_group": "gradients are exchanged between all processes of the training",
    "module": "Lightning wraps the model that fit or Fabric.setup is given; leave it out",
    "device_ids": "Lightning chooses a device for each process; use Trainer(devices=...) or Fabric(devices=...)",
}
_DENSITY = "did you mean density, the fraction of elements that is sent?"
# What people call things elsewhere, where no likeness of letters leads to our name.
_CALLED_ELSEWHERE = {
    "compress_ratio": _DENSITY,
    "densities": "did you mean density? Those of single parameters are given by compressor=LAGS(densities=...)",
    "compression_ratio": "did you mean density, its inverse?",
    "learning_rate": "the learning rate is the optimizer's: give it in configure_optimizers, or where you build it",
    "lr": "the learning rate is the optimizer's: give it in configure_optimizers, or where you build it",
    "momentum": "it is the optimizer's; to accumulate it before compression use compressor='dgc', or the Trainer's"
    " callback MomentumCorrection",
    "ratio": _DENSITY,
    "sparsity": "did you mean density, which is 1 - sparsity?",
    "warmup_steps": "did you mean warmup_epochs, which counts epochs? For steps use the callback"
    " AdaptiveDensity([Warmup(length)])",
    "levels": "two levels are taken by the Trainer's SparseDDPStrategy alone",
}


def check_ddp_arguments(strategy: type, base: type, settings: Settings, given: Mapping[str, Any]) -> None:
    """Check the arguments of a strategy that it has no parameters for."""
    theirs = _names(base) | _names(DistributedDataParallel)
    timeout = given.get("timeout")
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(f"timeout={timeout!r} must be a datetime.timedelta, such as timedelta(seconds=60)")
    for name, value in given.items():
        if value is not None and name in _REFUSED:
            raise ValueError(f"{name}={value!r} cannot be given to {strategy.__name__}: {_REFUSED[name]}")
        if name not in theirs:
            own = sorted(_names(strategy))
            hint = _hint(name, settings.compressor, own, theirs)
            raise TypeError(
                f"{name}={value!r} is no argument of {strategy.__name__}: {hint}{'' if hint.endswith('?') else '.'}"
                f" It takes {', '.join(own)}, and the arguments of DDPStrategy and DistributedDataParallel"
            )


def check_device(strategy: type, device: torch.device) -> None:
    """Refuse a device whose tensors cannot be exchanged, which Lightning refuses for names that contain "ddp"."""
    if device.type == "mps":
        raise ValueError(
            f"accelerator='mps' cannot go together with {strategy.__name__}, as its tensors cannot be exchanged between"
            " processes: use accelerator='cpu', or strategy='auto' for one device"
        )


def _hint(name: str, compressor: Compressor, own: Sequence[str], theirs: Iterable[str]) -> str:
    kind = type(compressor)
    if name in _names(kind):
        return f"it is one of {kind.__name__}, so give compressor={kind.__name__}({name}=...)"
    if name in _names(LocalSteps):
        return f"it is one of LocalSteps, so give local_steps=LocalSteps(5, {name}=...)"
    near = difflib.get_close_matches(name, [*own, *theirs], n=1)
    return _CALLED_ELSEWHERE.get(name) or (f"did you mean {near[0]}?" if near else "leave it out")


def _names(kind: type) -> set[str]:
    """Return the names of the arguments of a class."""
    return {
        name
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
