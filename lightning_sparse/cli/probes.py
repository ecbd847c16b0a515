"""What ``lightning-sparse check`` runs: small trainings, and timings of devices and of the network."""

import tempfile
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
from lightning_sparse.engine.collectives import all_gather_object, default_store
from lightning_sparse.functional.topk import top_k_indices
from lightning_sparse.schedule.costs import Line, fit
from lightning_sparse.schedule.network import sent_bytes
from lightning_sparse.strategy.lightning import Callback, LightningModule, Trainer
from lightning_sparse.strategy.trainer import SparseDDPStrategy

Found = tuple[str, dict[str, Any]]
_STEPS = 40
_SLOW = 1 / 3  # of the median, below which a link is too slow
_CLOSE = 0.1  # of the largest element, between two orders of summation with a bf16 layer


class _OddModel(LightningModule):
    """Prime sizes, a tied weight, an embedding, a bf16 layer, and two layers of which no rank uses both."""

    def __init__(self, optimizer: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.optimizer = optimizer
        self.embedding, self.head = nn.Embedding(211, 97), nn.Linear(97, 211)
        self.head.weight = self.embedding.weight
        self.first, self.coarse = nn.Linear(97, 131), nn.Linear(131, 97).bfloat16()
        self.most, self.last = nn.Linear(97, 97), nn.Linear(97, 97)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        words = torch.arange(8 * index, 8 * index + 8, device=self.device)  # a resumed loader starts from its first
        words = (words.view(-1, 1) * 31 + torch.arange(8, device=self.device) * (rank + 1)) % 211
        hidden = self.coarse(torch.tanh(self.first(self.embedding(words))).bfloat16()).float()
        hidden = hidden + (self.last if rank == ranks - 1 else self.most)(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), ((words * 3 + 1) % 211).flatten())

    def train_dataloader(self) -> Any:
        return DataLoader(range(2 * _STEPS))  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


class _Saves(Callback):
    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_batch_end(self, trainer: Any, *batch: Any) -> None:
        if trainer.global_step == _STEPS // 2:
            trainer.save_checkpoint(self._path)


_SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


class Probes:
    """The rows of a run, for Trainers with the given arguments; ``nodes`` has each rank's host.

    Attributes:
        exchange: seconds of an all-reduce by the bytes that leave a rank; ``latency`` is a link's, one way, ``memory``
            the bytes per second of the slowest device, ``select`` the seconds of a selection by elements.
    """

    exchange, select, latency, memory = Line(), Line(), 0.0, 0.0

    def __init__(self, trainer: dict[str, Any], device: torch.device, rows: Rows, nodes: list[str]) -> None:
        self._trainer, self._device, self._rows, self._nodes = trainer, device, rows, nodes
        self.ranks, self._local_ranks = dist.get_world_size(), dist.get_world_size() // len(set(nodes))

    def correctness(self) -> dict[str, Callable[[], Found]]:
        """Return small trainings by name."""
        clipped = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "max_steps": _STEPS // 2}
        adam = partial(torch.optim.AdamW, lr=1e-3)
        rows: dict[str, Callable[[], Found]] = {
            "density 1 equals DDP": self._equals_ddp,
            "replicas at density 0.01": partial(self._trains, compressor="lags", density=0.01),
            "mass, float32 wire": partial(self._conserves, "float32"),
            "mass, bfloat16 wire": partial(self._conserves, "bfloat16"),
            "AdamW, accumulation, clipping": partial(self._equals_ddp, adam, **clipped),
            "save and resume": self._resumes,
            "owners": partial(self._trains, compressor="lags", density=0.01, exchange="owners"),
            "two levels": partial(self._trains, compressor="lags", density=0.01, levels=2),
            "local steps": partial(self._trains, compressor="lags", density=0.01, local_steps=4),
        }
        return {"one seed, one model": self._same_start} | {name: self._of_two(row) for name, row in rows.items()}

    def speed(self) -> dict[str, Callable[[], Found]]:
        """Return timings by name."""
        rows = {"links": self._of_two(self._links), "all-reduce": self._of_two(self._all_reduce)}
        return {"memory bandwidth": self._memory, "selection of 1 %": self._selection, **rows}

    def _of_two(self, row: Callable[[], Found]) -> Callable[[], Found]:
        def checked() -> Found:
            if self.ranks < 2:
                raise NotApplicableError("needs two processes")
            return row()

        return checked

    def _fit(
        self, strategy: Union[str, SparseDDPStrategy], optimizer: Any = _SGD, path: Any = None, **more: Any
    ) -> Any:
        watch = [] if isinstance(strategy, str) or strategy.settings.replicas_diverge else [ReplicaSentinel(1)]
        more = {"max_steps": _STEPS, "callbacks": [], **self._trainer, **more}
        more["callbacks"] = [*more["callbacks"], *watch]
        trainer = Trainer(strategy=strategy, **more)
        trainer.fit(_OddModel(optimizer), ckpt_path=path)
        return trainer

    def _same_start(self) -> Found:
        sums = all_gather_object([float(each.detach().double().sum()) for each in _OddModel(_SGD).parameters()])
        if apart := [self._rows.names[rank] for rank, own in enumerate(sums) if own != sums[0]]:
            raise ValueError(f"{', '.join(apart)}: the same seed builds another model than on rank 0")
        return f"the same parameters on {self.ranks} ranks", {}

    def _equals_ddp(self, optimizer: Any = _SGD, **more: Any) -> Found:
        ddp = _weights(self._fit("ddp_find_unused_parameters_true", optimizer, **more))
        ours = _weights(self._fit(SparseDDPStrategy("lags", 1.0), optimizer, **more))
        if more:
            self._fit(SparseDDPStrategy("lags", 0.01), optimizer, **more)
        apart = {name: float((ours[name] - ddp[name]).abs().max() / ddp[name].abs().max()) for name in ddp}
        name = max(apart, key=lambda each: apart[each])
        if not apart[name] <= (0 if self.ranks == 2 else _CLOSE):
            raise ValueError(f"{name} differs from DDP's by {apart[name]:.2g} of its largest element")
        return f"the largest relative difference is {apart[name]:.2g}", {"difference": apart[name]}

    def _trains(self, **settings: Any) -> Found:
        if "levels" in settings and not 1 < self._local_ranks < self.ranks:
            raise NotApplicableError(f"{self._local_ranks} of {self.ranks} ranks on each host: no second level")
        if "exchange" in settings and self.ranks < 3:
            raise NotApplicableError("needs three processes: two own nothing that a gather does not send")
        trainer = self._fit(SparseDDPStrategy(**settings))
        stats, weights = trainer.strategy.compression_stats(), _weights(trainer)
        sums = all_gather_object([float(each.double().sum()) for each in weights.values()])
        if apart := [name for name, *column in zip(weights, *sums) if len(set(column)) > 1]:
            raise ValueError(f"after {_STEPS} steps {apart[0]} differs between ranks")
        if not 0.005 <= stats["density"] <= 0.06 or all(
            map(Tensor.equal, weights.values(), _OddModel(_SGD).parameters())
        ):
            raise ValueError(f"{stats['density']:.3%} of the elements are sent, not 1 %, or no parameter has changed")
        return f"bitwise identical after each step, {stats['density']:.2%} sent", stats

    def _conserves(self, wire: str) -> Found:
        from lightning_sparse.testing import invariants  # after its device has been set
        from lightning_sparse.testing.tensors import moved

        book = invariants.balance(dist.get_rank(), {"compressor": "lags", "density": 0.05, "wire": wire}, 4)
        invariants.assert_mass_is_conserved(all_gather_object(moved(book, "cpu")))
        return "residual before + gradient = sent + residual after", {}

    def _resumes(self) -> Found:
        with tempfile.TemporaryDirectory(dir=".", prefix=".check-") as own:
            path = Path(all_gather_object(str(Path(own).resolve()))[0]) / "half.ckpt"
            if not all(all_gather_object(path.parent.is_dir())):
                raise NotApplicableError(f"hosts do not share {path.parent.parent}, the current folder")
            whole = _weights(self._fit(SparseDDPStrategy("lags", 0.01), callbacks=[_Saves(path)]))
            resumed = _weights(self._fit(SparseDDPStrategy("lags", 0.01), path=path))
            dist.barrier()
        if apart := [name for name, each in whole.items() if not each.equal(resumed[name])]:
            raise ValueError(f"{apart[0]} differs from that of a training without a pause")
        return f"bitwise that of a training without a pause, after step {_STEPS // 2}", {}

    def _memory(self) -> Found:
        source = torch.ones(1 << 25, device=self._device)
        speeds = all_gather_object(2 * source.nbytes / min(self._times(partial(source.clone().copy_, source), 3)))
        self.memory = min(speeds)
        return f"{self.memory / 1e9:.3g} GB/s on the slowest, {self._slowest(speeds)}", {"bytes_per_second": speeds}

    def _selection(self) -> Found:
        samples = list[tuple[float, float]]()
        for elements in (10_000_000, 100_000_000):
            if self._rows.seconds_left > 25 or not samples:
                gradient = torch.randn(elements, device=self._device)
                seconds = all_gather_object(min(self._times(partial(top_k_indices, gradient, elements // 100), 2)))
                samples.append((elements, max(seconds)))
        self.select = fit(samples) or Line(0.0, samples[0][1] / samples[0][0])
        words = ", ".join(f"{1e3 * seconds:.3g} ms from {elements / 1e6:g} M" for elements, seconds in samples)
        return f"{words}, on the slowest, {self._slowest([-each for each in seconds])}", {"seconds": samples}

    def _links(self) -> Found:
        firsts = [rank for rank, node in enumerate(self._nodes) if node not in self._nodes[:rank]]
        ring = firsts if len(firsts) > 1 else list(range(self.ranks))
        message, own = torch.ones(1 << 20, device=self._device), dict[tuple[int, int], float]()
        for sender, receiver in ((ring[at], ring[(at + by) % len(ring)]) for at in range(len(ring)) for by in (1, -1)):
            if dist.get_rank() == sender:
                self._times(partial(dist.send, message, receiver), 3)
            elif dist.get_rank() == receiver:
                own[sender, receiver] = min(self._times(partial(dist.recv, message, sender), 3))
        links = {
            pair: 8 * message.nbytes / each for of_rank in all_gather_object(own) for pair, each in of_rank.items()
        }
        ways = (0, 1) if len(ring) > 2 else (0,)  # of two, the sender is named
        rates = [min(max(links[pair] for pair in links if pair[way] == rank) for way in ways) for rank in ring]
        words = f"{min(rates) / 1e9:.3g} Gbit/s on the slowest, {self._rows.names[ring[rates.index(min(rates))]]}"
        if min(rates) < _SLOW * max(rates):
            raise ValueError(f"{words}, and up to {max(rates) / 1e9:.3g} on others")
        return words, {"bits_per_second": rates}

    def _all_reduce(self) -> Found:
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
        # What a request takes within the host of the store is not the network's.
        trips = all_gather_object(min(self._times(lambda: store.check(["none"]), 100)))
        self.latency = max(0.0, (max(trips) - trips[0]) / 2)
        rate = 8e-9 / max(self.exchange.per_unit, 1e-15)
        words = ", ".join(f"{1e3 * seconds:.3g} ms for {size / 1e6:g} MB" for size, seconds in samples)
        values = {"seconds": samples, "bits_per_second": 1e9 * rate, "latency_seconds": self.latency}
        return f"{words}: {rate:.3g} Gbit/s, {1e6 * self.latency:.3g} us one way", values

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
    """Wait until a device has done all work that was issued."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def _weights(trainer: Any) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in trainer.lightning_module.named_parameters()}
