"""Replicas of the model, one per rank: identical after every step, or averaged after several steps."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, Optional
from zlib import crc32

import torch
from torch import Tensor, nn
from torch._utils import _take_tensors
from typing_extensions import override

from lightning_sparse.engine.collectives import (
    Communicator,
    ExchangeWorker,
    SharedOnCopy,
    all_gather_object,
    broadcast_tensors,
    ddp_ignored_names,
    default_group,
)
from lightning_sparse.engine.wire.base import Payload
from lightning_sparse.functional.elements import local_tensor
from lightning_sparse.functional.reductions import fingerprint

_AVERAGED_BYTES = 1 << 26  # bytes of one all-reduce, because the mean needs memory


def sync_module_states(module: nn.Module, known: Iterable[str] = ()) -> None:
    """Copy a module's parameters and buffers from rank 0, except names in ``known``. Parameter shapes must agree."""
    left_out = ddp_ignored_names(module) | set(known)
    parameters: list[Tensor] = [each for name, each in module.named_parameters() if name not in left_out]
    if len(set(map(str, all_gather_object([list(each.shape) for each in parameters])))) > 1:
        raise RuntimeError("ranks differ in the number or shapes of parameters. Build the same model on all ranks.")
    buffers = (each for name, each in module.named_buffers() if name not in left_out)
    broadcast_tensors([*parameters, *buffers], default_group())


class Replicas(SharedOnCopy):
    """Replicas that are identical after every step, because all ranks apply mean gradients. All methods are no-ops."""

    def reset_shared_model(self) -> None:
        """Average the model over ranks, and set the shared model to the mean. All ranks must call this."""
        self.synchronize()

    @contextmanager
    def shared_model(self) -> Iterator[None]:
        """Inside the context, set the model to the weights that all ranks share. All ranks must call this."""
        self.synchronize()
        yield

    def count_step(self, optimizer: int) -> None:
        """Count a step of the optimizer with the index ``optimizer``."""

    def synchronize(self) -> None:
        """Make all replicas equal. All ranks must call this."""

    def statistics(self, steps: int) -> dict[str, float]:
        """Return statistics about the replicas, after an exchange that covers ``steps`` optimizer steps."""
        return {}

    def state_dict(self, together: bool = False) -> dict[str, Any]:
        """Return the replicas' part of a checkpoint. With ``together``, all ranks call this, and may communicate."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy the replicas' part of a checkpoint, if ``state`` has this part. The worker thread must call this."""


class AveragedReplicas(Replicas):
    """Replicas that diverge. Ranks average after ``every`` steps, or with ``None`` only in :meth:`synchronize`."""

    def __init__(self, averager: "ReplicaAverager", every: Optional[int], worker: ExchangeWorker) -> None:
        self._averager = averager
        self._every = every
        self._worker = worker
        self._steps = 0

    @override
    def count_step(self, optimizer: int) -> None:
        self._steps += 1
        if self._every is not None and self._steps >= self._every:
            with self._averager.recorder.waiting():
                self.synchronize()

    @override
    def synchronize(self) -> None:
        self._worker.run(self._averager.average)
        self._steps = 0

    @override
    def statistics(self, steps: int) -> dict[str, float]:
        return {"replica_divergence": float(self._averager.divergence)}

    @override
    def state_dict(self, together: bool = False) -> dict[str, Any]:
        return {"averager": {"steps": self._steps, "divergence": self._averager.divergence}}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "averager" in state:
            self._steps = int(state["averager"]["steps"])
            self._averager.divergence = state["averager"]["divergence"].to(self._averager.device, copy=True)


class ReplicaAverager:
    """Average the ranks' models. ``divergence`` is their RMS distance from the mean, divided by the mean's norm."""

    def __init__(self, module: nn.Module, communicator: Communicator) -> None:
        self._module = module
        self._communicator = communicator
        self.recorder = communicator.recorder
        self.device = communicator.device
        self.divergence = torch.zeros(())

    def average(self, tensors: Optional[Mapping[str, Tensor]] = None) -> None:
        """Make tensors, by default of the whole model, bitwise identical on all ranks, in place.

        Floats that differ between ranks are averaged. Other dtypes are copied from rank 0.
        """
        tensors = averaged(self._module) if tensors is None else tensors
        differing = {name: tensors[name] for name in self.differing(tensors)}
        floats = {name: each for name, each in differing.items() if each.is_floating_point()}
        firsts = [each for name, each in differing.items() if name not in floats]
        with self.recorder.of_last_step("the average of the replicas"):
            if floats:
                self._average(floats)
            with self._communicator.translate_errors(f"{len(firsts)} tensors that are not averaged", "broadcast"):
                broadcast_tensors(firsts, self._communicator.group)

    def differing(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Return the names of tensors that differ between ranks. If names or shapes differ, return an empty list."""
        forms = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
        form = torch.tensor(crc32(repr(forms).encode()), device=self._communicator.device)
        # A rank without tensors must call the all-gather, too.
        prints = torch.stack(list(map(fingerprint, tensors.values()))) if tensors else form.view(1)
        everywhere = self._communicator.gather_numbers(torch.stack([form, fingerprint(prints)])).tolist()
        if len({theirs for theirs, _ in everywhere}) > 1 or all(each == everywhere[0] for each in everywhere):
            return []
        are_apart = (each := self._communicator.gather_numbers(prints)).ne(each[0]).any(dim=0).tolist()
        return [name for name, is_apart in zip(tensors, are_apart) if is_apart]

    def _average(self, tensors: Mapping[str, Tensor]) -> None:
        distance = torch.zeros(1, device=self._communicator.device, dtype=torch.float32)
        norm = torch.zeros_like(distance)
        parameters = {name for name, _ in self._module.named_parameters()}
        for alike in _take_tensors([tensors[name] for name in tensors if name in parameters], _AVERAGED_BYTES):
            mean, flat = self._write_mean(alike)
            distance += torch.linalg.vector_norm(flat - mean).square().float()
            norm += torch.linalg.vector_norm(mean).square().float()
        for alike in _take_tensors([tensors[name] for name in tensors if name not in parameters], _AVERAGED_BYTES):
            self._write_mean(alike)
        distances = self._communicator.call(Payload("all_gather", distance))
        self.divergence = (distances.mean() / norm.clamp(min=torch.finfo(norm.dtype).tiny)).sqrt().squeeze()

    def _write_mean(self, tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Overwrite tensors of one dtype with the means over ranks. Return the means and this rank's values, flat."""
        flat = torch.cat([each.reshape(-1) for each in tensors])
        flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
        mean = self._communicator.call(Payload("all_reduce", flat / self._communicator.world_size))
        pieces = mean.split([each.numel() for each in tensors])
        torch._foreach_copy_(tensors, [piece.view_as(each) for piece, each in zip(pieces, tensors)])
        return mean, flat


def averaged(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model that must be equal in all replicas. Complex tensors become pairs of real numbers.

    Two kinds of frozen tensors are omitted: views of trained tensors, and subclasses, for example quantized tensors.
    """
    named = chain(module.named_parameters(), module.named_buffers())
    held = {name: (tensor.requires_grad, local_tensor(tensor)) for name, tensor in named if tensor.numel()}
    trained = {each.data_ptr() for is_trained, each in held.values() if is_trained and _is_plain(each)}
    return {
        name: torch.view_as_real(each) if each.is_complex() else each
        for name, (is_trained, each) in held.items()
        if is_trained or (_is_plain(each) and each.data_ptr() not in trained)
    }


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided
