"""The DDP wrapper: built for the engine or for plain DDP, and anew when other parameters are trained."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from operator import is_not
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse.engine.collectives import gather_apart
from lightning_sparse.engine.step.hook import bucket_cap_mb
from lightning_sparse.loop.checks import check_reducer

# The buckets along which torch.compile cuts its graph; DDP's own default.
_COMPILE_BUCKET_BYTES = 25 * 1024 * 1024
_SHOWN = 5  # names in a message
_ALIKE = (
    "What is trained has to change on all ranks before the same training_step: do not let it depend on the rank, on its"
    " own data or on its clock"
)


class TrainedParameters:
    """Notice that other parameters are trained than those that a model was wrapped for.

    What is unfrozen later, DDP leaves alone, so replicas drift apart unnoticed; for what is frozen it waits for ever.

    Example::

        >>> layer = torch.nn.Linear(2, 2)
        >>> trained = TrainedParameters(layer)
        >>> layer.bias.requires_grad = False
        >>> trained.have_changed([]), trained.changes()
        (True, "frozen: 'bias'")
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._parameters = list(module.parameters())
        self._are_trained = [parameter.requires_grad for parameter in self._parameters]
        self._trained = self._present()
        self._handled = -1

    def __len__(self) -> int:
        """Return how many were trained when the model was wrapped."""
        return len(self._trained)

    def have_changed(self, optimizers: Sequence[Optimizer]) -> bool:
        """Tell whether others are trained now; on a few hundred parameters it takes some ten microseconds."""
        handled = sum(len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups)
        if handled != self._handled:
            self._handled = handled
            if self.has_new():  # which takes longer, and without an optimizer they are not trained
                return True
        return [parameter.requires_grad for parameter in self._parameters] != self._are_trained

    def has_new(self) -> bool:
        """Tell whether the model has parameters that it did not have when it was wrapped."""
        present = list(self._module.parameters())
        return len(present) != len(self._parameters) or any(map(is_not, present, self._parameters))

    def frozen(self) -> list[str]:
        """Return the names of those that were trained and are not any more."""
        return _without(self._trained, self._present())

    def unfrozen(self) -> list[str]:
        """Return the names of those that are trained now and were not."""
        return _without(self._present(), self._trained)

    def holds_gradients(self) -> list[str]:
        """Return the names of those that were frozen with a gradient."""
        return [name for name in self.frozen() if self._trained[name].grad is not None]

    def changes(self) -> str:
        """Say what has changed."""
        changes = {"frozen": self.frozen(), "unfrozen": self.unfrozen()}
        return "; ".join(f"{change}: {listed(names)}" for change, names in changes.items() if names)

    def _present(self) -> dict[str, Parameter]:
        return {name: parameter for name, parameter in self._module.named_parameters() if parameter.requires_grad}


def listed(names: Sequence[str]) -> str:
    """Name the first few, and count the others.

    Example::

        >>> listed(["a", "b"]), listed(["a", "b", "c", "d", "e", "f"])
        ("'a', 'b'", "'a', 'b', 'c', 'd', 'e' and 1 more")
    """
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def _without(ones: Mapping[str, Parameter], others: Mapping[str, Parameter]) -> list[str]:
    return [name for name, parameter in ones.items() if others.get(name) is not parameter]


class DDPWrapping:
    """Wrap a model, anew when parameters are frozen, unfrozen, or added to model and optimizer."""

    trained: TrainedParameters  # what the wrapper takes care of

    def __init__(self, is_silent: bool = False) -> None:
        self.is_plain = False  # for plain DDP, and not for the engine
        self._is_silent = is_silent
        self._stream: Optional[torch.cuda.Stream] = None

    def wrap(
        self, module: Module, device_ids: Optional[list[int]], arguments: Mapping[str, Any]
    ) -> DistributedDataParallel:
        """Return the wrapped model."""
        is_silent = self._is_silent and not self.is_plain
        given = {**arguments, "bucket_cap_mb": None if self.is_plain else bucket_cap_mb(module)}
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
        """Check that the same parameters require a gradient as when the forward of this step began."""
        if not self.trained.have_changed(optimizers):
            return
        if self.trained.unfrozen() or not tolerates_unused:
            raise RuntimeError(
                f"{self.trained.changes()}, inside training_step, when gradients are already waited for. Do it before,"
                " such as in on_train_batch_start or on_train_epoch_start; for optimizers that take turns"
                " (toggle_optimizer) use find_unused_parameters=True"
            )

    def agree(self, is_step_begun: bool, rank: int, ranks: int, timeout: Optional[timedelta]) -> None:
        """Raise, on every rank, unless all are about to train the same parameters."""
        if is_step_begun and (names := self.trained.holds_gradients()):
            raise RuntimeError(
                f"frozen: {listed(names)}, between two batches of one optimizer step, with gradients that no other rank"
                " has heard of. Freeze after optimizer steps, such as at the start of an epoch"
            )
        changes = self.trained.changes()
        try:
            everywhere = gather_apart(changes, timeout) if ranks > 1 else [changes]
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {rank}: {changes}; but not every other rank came to say so within the timeout. {_ALIKE}. The"
                f" backend said: {error}"
            ) from error
        if len(set(everywhere)) > 1:
            said = ". ".join(f"Rank {each}: {theirs or 'nothing'}" for each, theirs in enumerate(everywhere))
            raise RuntimeError(f"ranks are about to train different parameters. {said}. {_ALIKE}")

    def close(self) -> None:
        """Let go of the stream, which cannot be pickled; the next model is wrapped for the engine."""
        self._stream = None
        self.is_plain = False


def note_use(ddp: DistributedDataParallel, used: Iterable[Parameter]) -> None:
    """Tell a new wrapper that looks for unused parameters what the step has used: DDP drops the mean of the others."""
    if not ddp.find_unused_parameters:
        return
    gradients = {each: each.grad for each in used if each.requires_grad and each.grad is not None}
    if gradients:
        with ddp.no_sync():
            torch.autograd.backward(list(gradients), [torch.zeros_like(gradient) for gradient in gradients.values()])
