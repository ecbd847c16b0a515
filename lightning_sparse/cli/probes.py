"""The rows of ``lightning-sparse check``: small trainings, and timings of devices and of the network."""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Union

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sparse.callbacks import ReplicaSentinel
from lightning_sparse.cli.rows import NotApplicableError, Rows
from lightning_sparse.engine.collectives import all_gather_object
from lightning_sparse.engine.store import default_store
from lightning_sparse.functional.topk import top_k_indices
from lightning_sparse.schedule.costs import Line, fit
from lightning_sparse.schedule.network import sent_bytes
from lightning_sparse.strategy.lightning import LightningModule, Trainer
from lightning_sparse.strategy.trainer import SparseDDPStrategy

_STEPS = 40
_SLOW = 1 / 3  # minimum rate of a link, relative to the fastest
_CLOSE = 1e-4  # maximum difference between two orders of summation, relative to the largest element
_SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
_ADAM = partial(torch.optim.AdamW, lr=1e-3)


class _OddModel(LightningModule):
    """Prime sizes, a tied weight, an embedding, a bf16 layer, a layer for the last rank and another for the rest."""

    def __init__(self, optimizer: Callable[..., Any], coarse: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.optimizer = optimizer
        self.embedding, self.head = nn.Embedding(211, 97), nn.Linear(97, 211)
        self.head.weight = self.embedding.weight
        self.first, self.coarse = nn.Linear(97, 131), nn.Linear(131, 97, dtype=coarse)
        self.most, self.last = nn.Linear(97, 97), nn.Linear(97, 97)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        words = torch.arange(8 * index, 8 * index + 8, device=self.device)  # a resumed loader starts again
        words = (words.view(-1, 1) * 31 + torch.arange(8, device=self.device) * (rank + 1)) % 211
        hidden = torch.tanh(self.first(self.embedding(words)))
        hidden = self.coarse(hidden.to(self.coarse.weight.dtype)).float()
        hidden = hidden + (self.last if rank == ranks - 1 else self.most)(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), ((words * 3 + 1) % 211).flatten())

    def train_dataloader(self) -> Any:
        return DataLoader(range(2 * _STEPS))  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


class Probes:
    """The rows of a run, for Trainers with the given arguments. ``nodes`` has each rank's host.

    Attributes:
        exchange, select: seconds of an all-reduce by the bytes that a rank sends, and of a selection by elements.
        latency, memory: one-way seconds of a message, and bytes per second of the slowest device.
    """

    exchange, select, latency, memory = Line(), Line(), 0.0, 0.0

    def __init__(self, trainer: dict[str, Any], device: torch.device, rows: Rows, nodes: list[str]) -> None:
        self._trainer, self._device, self._rows, self._nodes = trainer, device, rows, nodes
        self.ranks = dist.get_world_size()

    def table(self) -> dict[str, Callable[[], str]]:
        """Return the rows by name."""
        accumulated = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "max_steps": _STEPS // 2}
        of_two: dict[str, Callable[[], str]] = {
            "one seed, one model": lambda: self._agreement(_OddModel(_SGD)),
            "density 1 equals DDP": self._equals_ddp,
            "replicas at density 0.01": self._replicas,
            "mass": self._conserves,
            "AdamW, accumulation, clipping": partial(self._equals_ddp, _ADAM, **accumulated),
            "save and resume": self._resumes,
            "owners": partial(self._replicas, exchange="owners"),
            "two levels": partial(self._replicas, levels=2),
            "local steps": partial(self._replicas, local_steps=4),
            "links": self._links,
            "all-reduce": self._all_reduce,
        }
        if self.ranks < 2:
            of_two = dict.fromkeys(of_two, self._alone)
        return of_two | {"memory bandwidth": self._memory, "selection of 1 %": self._selection}

    def _alone(self) -> str:
        raise NotApplicableError("needs two processes")

    def _fit(self, strategy: Union[str, SparseDDPStrategy], model: Any, path: Any = None, **more: Any) -> Any:
        diverges = isinstance(strategy, str) or strategy.settings.replicas_diverge
        watch = {"callbacks": [] if diverges else [ReplicaSentinel(1)], "max_steps": _STEPS}
        trainer = Trainer(strategy=strategy, **{**watch, **self._trainer, **more})
        trainer.fit(model, ckpt_path=path)
        return trainer

    def _agreement(self, model: Any) -> str:
        names, each = zip(*((name, float(each.detach().double().sum())) for name, each in model.named_parameters()))
        for rank, others in zip(self._rows.names, sums := all_gather_object(each)):
            if apart := [name for name, own, first in zip(names, others, sums[0]) if own != first]:
                raise ValueError(f"{rank}: {apart[0]} differs from that of rank 0")
        return f"the same parameters on {self.ranks} ranks"

    def _equals_ddp(self, optimizer: Any = _SGD, **more: Any) -> str:
        # More ranks sum in another order than DDP, which bfloat16 magnifies.
        dtype = torch.bfloat16 if self.ranks == 2 else torch.float32
        ddp, ours, sparse = (_OddModel(optimizer, dtype) for _ in range(3))
        self._fit("ddp_find_unused_parameters_true", ddp, **more)
        self._fit(SparseDDPStrategy("lags", 1.0), ours, **more)
        if more:
            self._fit(SparseDDPStrategy("lags", 0.01), sparse, **more)
        apart, name = _difference(ours, ddp)
        if not apart <= (0 if self.ranks == 2 else _CLOSE):
            raise ValueError(f"{name} differs from DDP's by {apart:.2g} of its largest element")
        return f"the largest relative difference is {apart:.2g}"

    def _replicas(self, **settings: Any) -> str:
        local = self.ranks // len(set(self._nodes))
        if "levels" in settings and not 1 < local < self.ranks:
            raise NotApplicableError(f"{local} of {self.ranks} ranks on each host: no second level")
        if "exchange" in settings and self.ranks < 3:
            raise NotApplicableError("needs three processes: two owners send as much as an all-gather")
        model = _OddModel(_SGD)
        density = self._fit(SparseDDPStrategy("lags", 0.01, **settings), model).strategy.compression_stats()["density"]
        self._agreement(model)
        if not 0.005 <= density <= 0.06 or not _difference(model, _OddModel(_SGD))[0]:
            raise ValueError(f"{density:.3%} of the elements are sent, not 1 %, or no parameter has changed")
        return f"bitwise identical after each step, {density:.2%} sent"

    def _conserves(self) -> str:
        from lightning_sparse.testing import invariants  # imports the device setting
        from lightning_sparse.testing.tensors import moved

        book = invariants.balance(dist.get_rank(), {"compressor": "lags", "density": 0.05, "wire": "bfloat16"}, 4)
        invariants.assert_mass_is_conserved(all_gather_object(moved(book, "cpu")))
        return "residual before + gradient = sent + residual after, with values in bfloat16"

    def _resumes(self) -> str:
        path = Path(f".check-{os.environ['MASTER_PORT']}").resolve() / "half.ckpt"
        whole, half, resumed = (_OddModel(_SGD) for _ in range(3))
        try:
            self._fit(SparseDDPStrategy("lags", 0.01), whole)
            self._fit(SparseDDPStrategy("lags", 0.01), half, max_steps=_STEPS // 2).save_checkpoint(path)
            if not all(all_gather_object(path.exists())):
                raise NotApplicableError(f"hosts do not share {path.parents[1]}, the current folder")
            self._fit(SparseDDPStrategy("lags", 0.01), resumed, path)
            dist.barrier()
        finally:
            shutil.rmtree(path.parent, ignore_errors=True)
        apart, name = _difference(resumed, whole)
        if apart:
            raise ValueError(f"{name} differs from that of a training without a pause by {apart:.2g}")
        return f"bitwise that of a training without a pause, after step {_STEPS // 2}"

    def _memory(self) -> str:
        source = torch.ones(1 << 25, device=self._device)
        speeds = all_gather_object(2 * source.nbytes / min(self._times(partial(source.clone().copy_, source), 3)))
        self.memory = min(speeds)
        return f"{self.memory / 1e9:.3g} GB/s on the slowest, {self._slowest(speeds)}"

    def _selection(self) -> str:
        samples, seconds = list[tuple[float, float]](), list[float]()
        for elements in (10_000_000, 100_000_000):
            if all_gather_object(self._rows.seconds_left > 25 or not samples)[0]:
                gradient = torch.randn(elements, device=self._device)
                seconds = all_gather_object(min(self._times(partial(top_k_indices, gradient, elements // 100), 2)))
                samples.append((elements, max(seconds)))
        self.select = fit(samples) or Line(0.0, samples[0][1] / samples[0][0])
        words = ", ".join(f"{1e3 * each:.3g} ms from {elements / 1e6:g} M" for elements, each in samples)
        return f"{words}, on the slowest, {self._slowest([-each for each in seconds])}"

    def _links(self) -> str:
        firsts = [rank for rank, node in enumerate(self._nodes) if node not in self._nodes[:rank]]
        ring = firsts if len(firsts) > 1 else list(range(self.ranks))
        message, own = torch.ones(1 << 20, device=self._device), dict[tuple[int, int], float]()
        for sender, receiver in ((ring[at], ring[(at + by) % len(ring)]) for at in range(len(ring)) for by in (1, -1)):
            if dist.get_rank() == sender:
                self._times(partial(dist.send, message, receiver), 3)
            elif dist.get_rank() == receiver:
                own[sender, receiver] = 8 * message.nbytes / min(self._times(partial(dist.recv, message, sender), 3))
        links = {pair: rate for of_rank in all_gather_object(own) for pair, rate in of_rank.items()}
        ways = (0, 1) if len(ring) > 2 else (0,)  # with two ranks, the sender is named
        rates = [min(max(links[pair] for pair in links if pair[way] == rank) for way in ways) for rank in ring]
        words = f"{min(rates) / 1e9:.3g} Gbit/s on the slowest, {self._rows.names[ring[rates.index(min(rates))]]}"
        if min(rates) < _SLOW * max(rates):
            raise ValueError(f"{words}, and up to {max(rates) / 1e9:.3g} on others")
        return words

    def _all_reduce(self) -> str:
        samples = list[tuple[float, float]]()
        for size in (1, 25, 100):
            expected = samples[-1][1] * size / (samples[-1][0] / 1e6) if samples else 0.0
            if all_gather_object(3 * expected < self._rows.seconds_left)[0]:
                message = torch.ones(size * 250_000, device=self._device)
                seconds = median(self._times(partial(dist.all_reduce, message), 3 if expected < 1 else 1))
                samples.append((size * 1e6, max(all_gather_object(seconds))))
        left = [(sent_bytes("all_reduce", size, self.ranks), seconds) for size, seconds in samples]
        self.exchange = fit(left) or Line(0.0, left[0][1] / left[0][0])
        store = default_store()
        # The time of a request within the host of the store is not the network's.
        trips = all_gather_object(min(self._times(lambda: store.check(["none"]), 100)))
        self.latency = max(0.0, (max(trips) - trips[0]) / 2)
        words = ", ".join(f"{1e3 * seconds:.3g} ms for {size / 1e6:g} MB" for size, seconds in samples)
        rate = 8e-9 / max(self.exchange.per_unit, 1e-15)
        return f"{words}: {rate:.3g} Gbit/s, {1e6 * self.latency:.3g} us one way"

    def _times(self, function: Callable[[], Any], count: int) -> list[float]:
        times = []
        for _ in range(count + 1):
            wait_for_device(self._device)
            began = perf_counter()
            function()
            wait_for_device(self._device)
            times.append(perf_counter() - began)
        return times[1:]

    def _slowest(self, speeds: list[float]) -> str:
        return self._rows.names[speeds.index(min(speeds))]


def wait_for_device(device: torch.device) -> None:
    """Wait until a device has completed all work."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def _difference(one: Any, other: Any) -> tuple[float, str]:
    names, ours = zip(*one.named_parameters())
    pairs = zip(ours, (each.to(own) for own, each in zip(ours, other.parameters())))
    apart = torch.tensor([float((own - each).detach().abs().max() / each.abs().max()) for own, each in pairs])
    return float(apart.max()), names[apart.argmax()]  # NaN is the largest
