"""Several ranks in one process: the package's own pipeline, with collectives between threads instead of machines.

What is sent, kept and applied is what the engine sends, keeps and applies, to the bit
(``tests/test_benchmarks.py``): for comparing how well methods train, on one core, where time does not count.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Optional

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sparse.compressors.base import layout_of
from lightning_sparse.engine.adam.steps import is_correctable
from lightning_sparse.engine.collectives import Communicator, ExchangeWorker, Result
from lightning_sparse.engine.local_steps import LocalStepsController, SharedModel
from lightning_sparse.engine.observe import Recorder
from lightning_sparse.engine.settings import Settings
from lightning_sparse.engine.step.selecting import Densities
from lightning_sparse.engine.step.step import Pipeline
from lightning_sparse.engine.step.topology import FlatTopology, LocalGradient
from lightning_sparse.engine.wire.base import Payload
from lightning_sparse.loop.optimizers import OptimizerView

_DEVICE = torch.device("cpu")
POWER_SGD_WORTH = 2  # torch's hook leaves a matrix alone unless it shrinks by this factor
POST_LOCAL_START = 100  # start_localSGD_iter in the examples of torch's documentation; it has no default


class Rendezvous:
    """Where threads, one for each rank, hand in tensors and receive everybody's.

    Args:
        ranks: how many there are.
    """

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._handed_in: list[Optional[Tensor]] = [None] * ranks

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        """Hand in a tensor, which must not change before the step is over, and receive those of all ranks."""
        self._handed_in[rank] = tensor
        self._barrier.wait()
        everybody = [each for each in self._handed_in if each is not None]
        self._barrier.wait()  # nobody hands in the next one before everybody has looked
        return everybody

    def leave(self) -> None:
        """End the waiting of all others, because this rank has failed."""
        self._barrier.abort()


class ThreadCommunicator(Communicator):
    """Collectives between the threads of a process.

    Args:
        meeting: where they meet.
        rank: of this thread.
        ranks: how many there are.
    """

    def __init__(self, meeting: Rendezvous, rank: int, ranks: int) -> None:
        self.group = None
        self.recorder = Recorder(_DEVICE, ranks)
        self._is_inside_node = False
        self._timeout = None
        self.device = _DEVICE
        self.rank = rank
        self.world_size = ranks
        self._meeting = meeting

    @override
    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack([each.reshape(-1) for each in self._meeting.exchange(self.rank, tensor.clone())])

    @override
    def all_to_all(self, tensor: Tensor) -> Tensor:
        return torch.stack([each[self.rank] for each in self._meeting.exchange(self.rank, tensor.clone())])

    @override
    def all_reduce(self, tensor: Tensor) -> Tensor:
        total, *others = self._meeting.exchange(self.rank, tensor.clone())
        total = total.clone()
        for other in others:
            total += other
        return tensor.copy_(total)


class InlineWorker(ExchangeWorker):
    """A worker that does each task at once, on the rank's own thread: time does not count here."""

    def __init__(self) -> None:
        self.error = None

    @override
    def submit(self, task: Callable[[], Result]) -> Future[Result]:
        result: Future[Result] = Future()
        result.set_result(task())
        return result

    @override
    def wait(self, submitted: Future[Result]) -> Result:
        return submitted.result()


def factored_numel(shape: Sequence[int], rank: int) -> int:
    """Return the elements of a tensor that PowerSGD exchanges, as torch's hook has it.

    A tensor of shape ``[n, ...]`` is a matrix of ``n`` rows and ``m`` columns; of it travel ``P``, ``[n, rank]``, and
    ``Q``, ``[m, rank]``, or the whole where they are not less than half of it.
    """
    rows = shape[0] if shape else 1
    columns = torch.Size(shape).numel() // rows
    factors = (rows + columns) * min(rows, columns, rank)
    return factors if factors * POWER_SGD_WORTH < rows * columns else rows * columns


class PowerSGD:
    """Mean gradients by torch's PowerSGD hook: factors of low rank, with error feedback (Vogels et al., 2019).

    Args:
        rank: of the factors.
        mean: averages tensors over ranks, in place, in one exchange.
    """

    _START = 10  # whole gradients before it starts

    def __init__(self, rank: int, mean: Callable[[Sequence[Tensor]], None]) -> None:
        self._rank = rank
        self._mean = mean
        self._steps = 0
        self._factors: dict[int, Tensor] = {}  # of columns, by the gradient's place
        self._errors: dict[int, Tensor] = {}

    def average(self, gradients: Sequence[Tensor]) -> None:
        """Replace the gradients of this rank by what the hook makes of those of all."""
        self._steps += 1
        matrices: dict[int, Tensor] = {}
        if self._steps > self._START:
            shrinks = [factored_numel(each.shape, self._rank) < each.numel() for each in gradients]
            matrices = {place: gradients[place].flatten(1) for place, does in enumerate(shrinks) if does}
        others = [each for place, each in enumerate(gradients) if place not in matrices]
        rows = {place: self._rows_of(place, matrix) for place, matrix in matrices.items()}
        self._mean([*others, *rows.values()])
        for place, matrix in matrices.items():
            rows[place] = torch.linalg.qr(rows[place]).Q
            self._factors[place] = matrix.T @ rows[place]
        if matrices:
            self._mean([self._factors[place] for place in matrices])
        for place, matrix in matrices.items():
            seen = rows[place] @ self._factors[place].T
            torch.sub(matrix, seen, out=self._errors[place])
            matrix.copy_(seen)

    def _rows_of(self, place: int, matrix: Tensor) -> Tensor:
        """Add what was not seen before to a matrix, and return its product with the last factor of columns."""
        if place not in self._factors:
            rank = min(*matrix.shape, self._rank)
            self._factors[place] = torch.randn(len(matrix.T), rank, generator=torch.Generator().manual_seed(place))
            self._errors[place] = torch.zeros_like(matrix)
        matrix += self._errors[place]
        product: Tensor = matrix @ torch.linalg.qr(self._factors[place]).Q
        return product


class VirtualRank:
    """One rank: a replica of the model, its optimizer, and what it keeps.

    Args:
        network: the replica.
        optimizer: that trains it.
        communicator: between all ranks.
        settings: what the user chose; ``None`` for plain DDP.
        total_steps: optimizer steps of the whole training.
        clip_norm: largest norm of the mean gradient; ``None`` not to clip.
        averages_every: steps between two averages of parameters, in place of gradients, as torch's post-localSGD; only
            with plain DDP.
        averages_after: steps of DDP before those: torch's ``start_localSGD_iter``, which is 100 in its documentation.
        power_rank: of :class:`PowerSGD`; only with plain DDP.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: Optimizer,
        communicator: ThreadCommunicator,
        settings: Optional[Settings],
        total_steps: int,
        clip_norm: Optional[float],
        averages_every: Optional[int] = None,
        averages_after: int = POST_LOCAL_START,
        power_rank: Optional[int] = None,
    ) -> None:
        self.network = network
        self.optimizer = optimizer
        self._communicator = communicator
        self._settings = settings
        self._clip_norm = clip_norm
        self._averages_every = averages_every
        self._averages_after = averages_after
        self._average_gradients = self._mean if power_rank is None else PowerSGD(power_rank, self._mean).average
        self._steps = 0
        self._rounds: Optional[LocalStepsController] = None
        self.recorder = communicator.recorder
        if settings is not None:
            self._build(settings, total_steps)

    def _build(self, settings: Settings, total_steps: int) -> None:
        self._settings = settings = settings.correcting_adam([is_correctable(self.optimizer)])
        compressor = settings.compressor
        rank, ranks = self._communicator.rank, self._communicator.world_size
        wires = settings.wires_for(rank, ranks)
        compressor.begin(layout_of(self.network, rank, ranks, _DEVICE))
        self._densities = Densities(compressor, settings.density, settings.warmup_steps)
        self._densities.expect_steps(total_steps)
        levels = FlatTopology(self._communicator)
        memory = settings.memory_for({torch.float32}, levels)
        self._pipeline = Pipeline(compressor, memory, wires, levels, self._densities.of)

        if settings.local_steps is not None:
            names = [name for name, _ in self.network.named_parameters()]
            local, worker = settings.local_steps, InlineWorker()
            shared = SharedModel(self.network, names, local, self._pipeline, worker)
            self._rounds = LocalStepsController(shared)

        def target_of(name: str) -> float:
            return compressor.densities.get(name, settings.density)

        parameters = dict(self.network.named_parameters())
        self._view = OptimizerView(parameters, [self.optimizer], settings.feedback, target_of, memory, print)
        memory.total_steps = total_steps

    def step(self, loss: Tensor) -> None:
        """Make an optimizer step with the mean gradient, or with what a method makes of it; on all ranks at once."""
        self.optimizer.zero_grad()
        loss.backward()
        self._steps += 1
        rounds = self._rounds
        is_local = rounds is not None or (self._averages_every is not None and self._steps > self._averages_after)
        if rounds is not None:
            rounds.begin_round()
        with torch.no_grad():
            if is_local:
                self._clip()
            elif self._settings is None:
                self._average_gradients([each.grad for each in self.network.parameters() if each.grad is not None])
                self.recorder.end_exchange()
                self._clip()
            else:
                self._exchange()
        self.optimizer.step()
        with torch.no_grad():
            if rounds is not None:
                rounds.count_step(0)
            elif is_local and (self._steps - self._averages_after) % (self._averages_every or 1) == 0:
                self._mean(list(self.network.parameters()))
                self.recorder.end_exchange()

    @contextmanager
    def shared_model(self) -> Iterator[nn.Module]:
        """Have the network be the one that all ranks share."""
        if self._rounds is None:
            yield self.network
            return
        with self._rounds.shared_model():
            yield self.network

    def _mean(self, tensors: Sequence[Tensor]) -> None:
        """Average tensors over ranks, in place, in one exchange."""
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        flat = self._communicator.call(Payload("all_reduce", flat)) / self._communicator.world_size
        for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
            tensor.copy_(mean.view_as(tensor))

    def _exchange(self) -> None:
        context = self._view.next_step()
        self._pipeline.context = context
        self._densities.begin_step(context.warm_up_progress)
        self._densities.count_step(0)  # this one, before the next begins
        named = [(name, parameter.grad) for name, parameter in self.network.named_parameters()]
        # As DDP hands gradients over: the last layer's first.
        step = [LocalGradient(name, grad.view(-1), True) for name, grad in reversed(named) if grad is not None]
        used = torch.ones(len(step), dtype=torch.uint8, device=step[0].gradient.device)
        self.recorder.begin_backward()
        self.recorder.current.backward_end = self.recorder.clock.mark()
        self._pipeline.refresh()
        self._pipeline.commit(self._pipeline.exchange(step, used=used))
        self.recorder.end_exchange()
        if self._view.adam is not None:
            self._view.adam.store_updates(None)
        self._clip()

    def _clip(self) -> None:
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self.network.parameters(), self._clip_norm)


class VirtualRanks:
    """All ranks of a training, each in a thread of its own.

    Args:
        ranks: how many.
        build_network: builds a replica; all have to be equal.
        build_optimizer: builds the optimizer of a replica.
        build_settings: builds what the user chose, anew for each rank; returns ``None`` for plain DDP.
        total_steps: optimizer steps of the whole training.
        clip_norm: largest norm of the mean gradient; ``None`` not to clip.
        averages_every: as for :class:`VirtualRank`.
        averages_after: likewise.
        power_rank: likewise.
    """

    def __init__(
        self,
        ranks: int,
        build_network: Callable[[], nn.Module],
        build_optimizer: Callable[[nn.Module], Optimizer],
        build_settings: Callable[[], Optional[Settings]],
        total_steps: int,
        clip_norm: Optional[float] = None,
        averages_every: Optional[int] = None,
        averages_after: int = POST_LOCAL_START,
        power_rank: Optional[int] = None,
    ) -> None:
        self._meeting = Rendezvous(ranks)
        # How many threads torch takes is a setting of each thread.
        self._pool = ThreadPoolExecutor(ranks, initializer=torch.set_num_threads, initargs=(1,))
        self.ranks = []
        for rank in range(ranks):
            network = build_network()
            optimizer = build_optimizer(network)
            communicator = ThreadCommunicator(self._meeting, rank, ranks)
            ways = (averages_every, averages_after, power_rank)
            member = VirtualRank(network, optimizer, communicator, build_settings(), total_steps, clip_norm, *ways)
            self.ranks.append(member)

    @property
    def wire_bytes(self) -> float:
        """Bytes that have left rank 0 so far."""
        return self.ranks[0].recorder.totals.wire_bytes

    def step(self, losses: Sequence[Callable[[nn.Module], Tensor]]) -> None:
        """Make a step.

        Args:
            losses: for each rank, computes its loss with its replica.
        """

        def step_of(member: VirtualRank, loss_of: Callable[[nn.Module], Tensor]) -> None:
            try:
                member.step(loss_of(member.network))
            except BaseException:
                self._meeting.leave()
                raise

        futures = [self._pool.submit(step_of, *pair) for pair in zip(self.ranks, losses)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda each: isinstance(each, threading.BrokenBarrierError)):
            raise error

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
