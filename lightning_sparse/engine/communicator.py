"""HOW payloads travel: collectives, in the order they are asked for, on a process group of their own, and recorded."""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from functools import cached_property, reduce
from typing import Optional, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from lightning_sparse.engine.collectives import SharedOnCopy, backend_of, timeout_of_job, translate_backend_errors
from lightning_sparse.engine.observe import Recorder
from lightning_sparse.engine.wire.base import Payload
from lightning_sparse.schedule.network import DIRECT_BYTES, sent_bytes

# Renamed in torch 2.13, where the old name warns.
_all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Result = TypeVar("Result")
Phases = Generator[Payload, Tensor, Result]


class Communicator(SharedOnCopy):
    """The collectives that payloads name, over a process group of ``ranks`` (global numbers) of its own, and recorded.

    On a shared one, the order of exchanges and of users' collectives, on several threads, would differ between ranks.
    ``parts`` divide all ranks into those that exchange among themselves; ``None`` where all exchange with all.
    ``shared`` is a group that others use, too: NCCL takes memory of a GPU for each, and wants one order of all anyway.
    A group waits as long as the job's own, unless a ``timeout`` is given. An engine's communicators share a recorder;
    ``is_inside_node`` says that all bytes stay in a node.
    """

    def __init__(
        self,
        ranks: list[int],
        device: torch.device,
        timeout: Optional[timedelta] = None,
        parts: Optional[Sequence[list[int]]] = None,
        shared: Optional[dist.ProcessGroup] = None,
        recorder: Optional[Recorder] = None,
        is_inside_node: bool = False,
    ) -> None:
        timeout = timeout_of_job(device) if timeout is None else timeout
        self._timeout = timeout
        self._is_shared = shared is not None
        self.group = shared
        if shared is not None and timeout is not None:
            with suppress(AttributeError):  # of a backend that TORCH_DISTRIBUTED_DEBUG has wrapped
                shared._get_backend(device)._set_default_timeout(timeout)  # meshes give their groups torch's own
        elif shared is None:
            # A group is set up by all ranks of the job. Set up by its own alone (use_local_synchronization), it would
            # get the name of one that was given back before, and find the addresses of that one's ranks in the store.
            groups = [(part, dist.new_group(part, timeout=timeout)) for part in parts or [ranks]]
            self.group = next(group for part, group in groups if part == ranks)
        self.device = device
        self.rank = dist.get_rank(self.group)
        self.ranks = dist.get_world_size(self.group)
        self.recorder = Recorder(device, self.ranks) if recorder is None else recorder
        self._is_inside_node = is_inside_node
        self._goes_around = self.backend == "gloo" and self.ranks > _ONE_HOP

    @property
    def backend(self) -> str:
        """Name of the backend that the group has for the device."""
        return backend_of(self.device, self.group)

    def run(self, phases: Phases[Result]) -> Result:
        """Run the collective that each phase names, and hand its result to the next phase."""
        received: Optional[Tensor] = None
        while True:
            try:
                with self.recorder.span("encode"):
                    payload = phases.send(received)  # type: ignore[arg-type]  # a generator starts with None
            except StopIteration as stop:
                result: Result = stop.value
                return result
            received = self.call(payload)

    def call(self, payload: Payload) -> Tensor:
        """Call one collective, and record its bytes and seconds."""
        self.recorder.add_bytes(self.sent_bytes(payload.collective, payload.tensor), self._is_inside_node)
        with self.recorder.span("exchange"), self.translate_errors(self.recorder.subject, payload.collective):
            return self.issue(*payload)

    def issue(self, name: str, tensor: Tensor, out: Optional[Tensor] = None) -> Tensor:
        """Call the collective of a name; ``out`` may hold the result."""
        received: Tensor = getattr(self, name)(tensor, out)
        return received

    def translate_errors(self, subject: str, name: str = "all_gather") -> AbstractContextManager[None]:
        """Raise :class:`ExchangeError` about a subject for a backend's error inside, not for this device's."""
        return translate_backend_errors(subject, name, self._timeout)

    @cached_property
    def _shares(self) -> dict[str, float]:
        """How often a rank sends what it hands in, by collective."""
        return {name: sent_bytes(name, 1, self.ranks) for name in _PROBE_SHAPES}

    def sent_bytes(self, name: str, tensor: Tensor) -> float:
        """Return the bytes that leave this rank when every rank hands in a tensor like this one."""
        return self._shares[name] * (tensor.numel() * tensor.element_size())

    def all_gather(self, tensor: Tensor, out: Optional[Tensor] = None) -> Tensor:
        """Gather a flat tensor of equal size from every rank into ``[ranks, numel]``."""
        gathered = tensor.new_empty(self.ranks, tensor.numel()) if out is None else out
        # gloo's own goes around a ring; a short tensor goes to every rank at once: the same bytes in one round trip.
        if self._goes_around and 0 < gathered.nbytes <= DIRECT_BYTES:
            return self.all_to_all(tensor.expand(self.ranks, -1).contiguous(), gathered)
        _all_gather_into(gathered.view(-1), tensor, group=self.group)
        return gathered

    def all_to_all(self, tensor: Tensor, out: Optional[Tensor] = None) -> Tensor:
        """Send row ``r`` of ``[ranks, numel]`` to rank ``r``; row ``r`` of the result came from rank ``r``."""
        received = torch.empty_like(tensor) if out is None else out
        # gloo moves bytes of every width, but has no name for some 16-bit types.
        dist.all_to_all_single(received.view(torch.uint8), tensor.view(torch.uint8), group=self.group)
        return received

    def all_reduce(self, tensor: Tensor, out: Optional[Tensor] = None) -> Tensor:
        """Add up a tensor over ranks, in place."""
        if not self._goes_direct(tensor):
            dist.all_reduce(tensor, group=self.group)
            return tensor
        # Parts go to their owners and back as sums.
        parts = functional.pad(tensor.flatten(), (0, -tensor.numel() % self.ranks)).view(self.ranks, -1)
        mine = self.all_to_all(parts).sum(dim=0, dtype=tensor.dtype)
        return tensor.copy_(self.all_gather(mine).view(-1)[: tensor.numel()].view_as(tensor))

    def _goes_direct(self, tensor: Tensor) -> bool:
        """Tell whether two round trips take less time for a tensor than gloo's way, twice around a ring."""
        return self._goes_around and 0 < tensor.nbytes <= DIRECT_BYTES

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        """Begin to add up a tensor over ranks, in place, and return what waits for it."""
        if self._goes_direct(tensor):
            self.all_reduce(tensor)
            return lambda: None
        work = dist.all_reduce(tensor, group=self.group, async_op=True)

        def wait() -> None:
            with self.translate_errors(f"{tensor.numel()} elements of gradients", "all_reduce"):
                work.wait()

        return wait

    def gather_numbers(self, numbers: Sequence[float]) -> Tensor:
        """Gather equally many numbers from every rank, as float64 ``[ranks, numbers]`` on the device."""
        handed_in = torch.tensor(numbers, dtype=torch.float64).to(self.device, non_blocking=True)
        with self.translate_errors(f"{len(numbers)} numbers on which ranks agree"):
            return self.all_gather(handed_in)

    def mean_of_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Return the means over ranks of many numbers, some at a time: from each of many ranks they are gigabytes.

        The host adds up, rank by rank: GPUs of several kinds may round otherwise, and ranks would decide otherwise.
        """
        count = max(1, _NUMBERS_AT_ONCE // self.ranks)
        parts = (numbers[start : start + count] for start in range(0, len(numbers), count))
        sums = (reduce(torch.add, self.gather_numbers(part).cpu()) for part in parts)
        return [total / self.ranks for of_part in sums for total in of_part.tolist()]

    def check(self, names: Iterable[str]) -> None:
        """Try collectives once, on a few bytes, and refuse a backend that cannot run one of them on this device."""
        # NCCL's first all-to-all connects all pairs of ranks, which takes gigabytes that most trainings never need.
        knows_all = self.backend in ("gloo", "nccl")
        for name in names:
            if knows_all and name != "all_gather":
                continue
            try:
                self.issue(name, torch.zeros(self.ranks, 4, device=self.device).view(_PROBE_SHAPES[name]))
            except (RuntimeError, NotImplementedError, ValueError) as error:
                raise RuntimeError(
                    f"process_group_backend={self.backend!r} cannot run {name} on {self.device}, which"
                    " this compressor needs. Use process_group_backend='gloo' on CPU or 'nccl' on CUDA, or another"
                    " compressor."
                ) from error

    def close(self, has_failed: bool = False) -> None:
        """Give the process group back, unless others wait for this rank, which ``has_failed``; safe to call twice."""
        # gloo tells those that wait by the end of the group. NCCL would have this rank wait for them first, with an
        # error that nobody has seen: there the group stays until the process ends.
        is_there = self.group is not None and not self._is_shared and dist.is_initialized()
        if is_there and not (has_failed and self.backend != "gloo"):
            dist.destroy_process_group(self.group)
        self.group = None


_ONE_HOP = 2  # ranks, whose ring is one
_NUMBERS_AT_ONCE = 1 << 20  # of all ranks together, 8 MiB
_PROBE_SHAPES: dict[str, tuple[int, ...]] = {"all_gather": (-1,), "all_to_all": (-1, 4), "all_reduce": (-1,)}
