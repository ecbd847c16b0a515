"""The rows of ``lightning-sparse check``: small trainings, timings of devices and of the network, and the advice."""

import argparse
import os
import platform
import shutil
import socket
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter
from typing import Any, Union
from unittest import SkipTest

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sparse.callbacks import ReplicaSentinel
from lightning_sparse.cli.estimate import PASSES, Estimate
from lightning_sparse.cli.rows import Rows
from lightning_sparse.engine.collectives import all_gather_object, backend_of
from lightning_sparse.engine.store import default_store
from lightning_sparse.functional.topk import top_k_indices
from lightning_sparse.schedule.costs import Line, fit, sent_bytes
from lightning_sparse.strategy.lightning import NAME, DDPStrategy, LightningModule, Trainer
from lightning_sparse.strategy.trainer import SparseDDPStrategy

_QUIET = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
_STEPS = 40
_SLOW = 1 / 3  # share of the fastest link's rate below which a link is too slow
_CLOSE = 1e-4  # accepted difference between two orders of summation, relative to the largest element
_SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
_ADAM = partial(torch.optim.AdamW, lr=1e-3)


class _OddModel(LightningModule):
    """A model with prime sizes, a tied embedding, and a bf16 layer. The last rank uses ``last``, others ``most``."""

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
        words = torch.arange(8 * index, 8 * index + 8, device=self.device)  # not `batch`, which a resume restarts at 0
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
    """Checks in this process, which torchrun or SLURM has started. ``rows`` runs each check on all ranks together."""

    _exchange, _select, _memory = Line(), Line(), 0.0  # seconds by bytes, seconds by elements, bytes per second

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        if "TORCHELASTIC_RUN_ID" in os.environ:
            ranks, devices = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
        else:
            ranks = int(os.environ["SLURM_NTASKS"])
            devices = ranks // int(os.environ["SLURM_NNODES"])
        self._trainer: dict[str, Any] = {"devices": devices, "num_nodes": ranks // devices}
        self._trainer.update(dict.fromkeys(_QUIET, False))
        timeout = timedelta(seconds=options.time)
        strategy: Any = Trainer(strategy=DDPStrategy(timeout=timeout), **self._trainer).strategy
        strategy.setup_environment()
        self._device: torch.device = strategy.root_device
        os.environ["LIGHTNING_SPARSE_TEST_DEVICE"] = str(self._device)
        self._nodes = all_gather_object((os.environ.get("GROUP_RANK"), socket.gethostname()))
        names = [f"rank {rank} ({host})" for rank, (_, host) in enumerate(self._nodes)]
        self._deadline = monotonic() + options.time
        self._ranks, self.rows = ranks, Rows(dist.get_rank(), names, options.time, options.output)

    def table(self) -> dict[str, Callable[[], str]]:
        """Return the function for each row of the report, by name, in order."""
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
        if self._ranks < 2:
            of_two = dict.fromkeys(of_two, self._alone)
        rows = {"environment": self._environment, **of_two, "memory bandwidth": self._copies}
        rows["selection of 1 %"] = self._selects
        return {**rows, "advice": self._advise} if self._options.parameters else rows

    def _alone(self) -> str:
        raise SkipTest("needs two processes")

    def _environment(self) -> str:
        torch.get_device_module(self._device).set_device(self._device)  # a new thread's device is the first one
        packages = ("torch", NAME.split(".")[0], "lightning-sparse")
        versions = ", ".join([f"python {platform.python_version()}", *(f"{each} {version(each)}" for each in packages)])
        if (backend := backend_of(self._device)) == "nccl":
            versions += f", nccl {torch.cuda.nccl.version()}"
        kind = torch.cuda.get_device_name() if self._device.type == "cuda" else platform.machine()
        network = {name: os.environ[name] for name in os.environ if name.endswith("_SOCKET_IFNAME")}
        found = {"device": f"{self._device} {kind}", "backend": backend, "network": network, "versions": versions}
        ranks = dict(zip(self.rows.names, all_gather_object(found)))
        self.rows.environment = {"time_limit": self._options.time, "ranks": ranks}
        if apart := [name for name, each in ranks.items() if each["versions"] != versions]:
            raise ValueError(f"{', '.join(apart)}: versions differ from {versions} on this rank; make all equal")
        count = f"{self._ranks} ranks on {self._trainer['num_nodes']} hosts"
        return f"{count}, {backend}, {self._device.type} {kind}, {network or 'default network interface'}, {versions}"

    def _fit(self, strategy: Union[str, SparseDDPStrategy], model: Any, path: Any = None, **more: Any) -> Any:
        diverges = isinstance(strategy, str) or strategy.settings.replicas_diverge
        watch = {"callbacks": [] if diverges else [ReplicaSentinel(1)], "max_steps": _STEPS}
        trainer = Trainer(strategy=strategy, **{**watch, **self._trainer, **more})
        trainer.fit(model, ckpt_path=path)
        return trainer

    def _agreement(self, model: Any) -> str:
        names, each = zip(*((name, float(each.detach().double().sum())) for name, each in model.named_parameters()))
        for rank, others in zip(self.rows.names, sums := all_gather_object(each)):
            if apart := [name for name, own, first in zip(names, others, sums[0]) if own != first]:
                raise ValueError(f"{rank}: parameter {apart[0]} differs from rank 0")
        return f"the same parameters on {self._ranks} ranks"

    def _equals_ddp(self, optimizer: Any = _SGD, **more: Any) -> str:
        # On three or more ranks, DDP sums in another order. Rounding to bfloat16 would magnify the difference.
        dtype = torch.bfloat16 if self._ranks == 2 else torch.float32
        ddp, ours, sparse = (_OddModel(optimizer, dtype) for _ in range(3))
        self._fit("ddp_find_unused_parameters_true", ddp, **more)
        self._fit(SparseDDPStrategy("lags", 1.0), ours, **more)
        if more:
            self._fit(SparseDDPStrategy("lags", 0.01), sparse, **more)
        apart, name = _difference(ours, ddp)
        if not apart <= (0 if self._ranks == 2 else _CLOSE):
            raise ValueError(f"{name} differs from DDP by {apart:.2g} of the largest element")
        return f"the largest relative difference is {apart:.2g}"

    def _replicas(self, **settings: Any) -> str:
        local = self._ranks // len(set(self._nodes))
        if "levels" in settings and not 1 < local < self._ranks:
            raise SkipTest(f"{local} of {self._ranks} ranks are on each host, so there is no second level")
        if "exchange" in settings and self._ranks < 3:
            raise SkipTest("needs three processes: with two, owners send the same as a gather")
        model = _OddModel(_SGD)
        density = self._fit(SparseDDPStrategy("lags", 0.01, **settings), model).strategy.compression_stats()["density"]
        self._agreement(model)
        if not 0.005 <= density <= 0.06 or not _difference(model, _OddModel(_SGD))[0]:
            raise ValueError(f"{density:.3%} of the elements are sent, not 1 %, or no parameter has changed")
        when = "at the end" if "local_steps" in settings else "after each step"
        return f"replicas are bitwise identical {when}, {density:.2%} of elements sent"

    def _conserves(self) -> str:
        from lightning_sparse.testing import invariants  # this import reads the device from the environment
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
                raise SkipTest(f"hosts do not share {path.parents[1]}, the current folder")
            self._fit(SparseDDPStrategy("lags", 0.01), resumed, path)
            dist.barrier()
        finally:
            shutil.rmtree(path.parent, ignore_errors=True)
        apart, name = _difference(resumed, whole)
        if apart:
            raise ValueError(f"{name} differs from a training without a pause by {apart:.2g}")
        return f"bitwise identical to a training without a pause after step {_STEPS // 2}"

    def _copies(self) -> str:
        line, words = self._measured("", [32_000_000], lambda n: partial(torch.ones(n).copy_, torch.ones(n)))
        self._memory = 8 / line.per_unit
        return f"{self._memory / 1e9:.3g} GB/s: {words}"

    def _selects(self) -> str:
        sizes = [10_000_000, 100_000_000]
        self._select, words = self._measured("", sizes, lambda n: partial(top_k_indices, torch.randn(n), n // 100))
        return words

    def _links(self) -> str:
        # A link inside a host is no network link: a transfer is a memory copy, and other programs change the time.
        ring = [rank for rank, node in enumerate(self._nodes) if node not in self._nodes[:rank]]
        if len(ring) < 2:
            raise SkipTest("all ranks run on one host")
        message, answer = torch.ones(1 << 20, device=self._device), torch.ones(1, device=self._device)
        rank, own = dist.get_rank(), dict[tuple[int, int], float]()
        for sender, receiver in ((ring[at], ring[(at + by) % len(ring)]) for at in range(len(ring)) for by in (1, -1)):
            # Only the sender's times count: a late receiver would time a copy from a buffer, not the network.
            if rank == sender:
                trips = self._times(partial(_trip, dist.send, message, dist.recv, answer, receiver), 3)
                own[sender, receiver] = 8 * message.nbytes / min(trips)
            elif rank == receiver:
                self._times(partial(_trip, dist.recv, message, dist.send, answer, sender), 3)
        links = {pair: rate for of_rank in all_gather_object(own) for pair, rate in of_rank.items()}
        rates = [max(rate for (sender, _), rate in links.items() if sender == rank) for rank in ring]
        words = f"{min(rates) / 1e9:.3g} Gbit/s on the slowest, {self.rows.names[ring[rates.index(min(rates))]]}"
        if min(rates) < _SLOW * max(rates):
            raise ValueError(f"{words}, and up to {max(rates) / 1e9:.3g} on others")
        return words

    def _all_reduce(self) -> str:
        sizes = [1_000_000, 25_000_000, 100_000_000]
        line, words = self._measured("B", sizes, lambda n: partial(dist.all_reduce, torch.ones(n // 4)))
        self._exchange = Line(line.startup, line.per_unit / sent_bytes("all_reduce", 1.0, self._ranks))
        store = default_store()
        # Rank 0's request stays on the host of the store, and so takes no time on the network.
        trips = all_gather_object(min(self._times(lambda: store.check(["none"]), 100)))
        latency, rate = max(0.0, (max(trips) - trips[0]) / 2), 8e-9 / max(self._exchange.per_unit, 1e-15)
        return f"{words}: {rate:.3g} Gbit/s, {1e6 * latency:.3g} us one way"

    def _advise(self) -> str:
        elements = self._options.parameters
        own = max(self._select(elements), PASSES["adamw"] * 4 * elements / self._memory)
        found = Estimate(elements, self._ranks, self._options.compute, self._exchange, own)
        advice = str(found).replace("\n", ". ")
        return f"r = {found.r:.3g} as measured; compression adds {1e3 * own:.3g} ms to a step; {advice}"

    def _measured(self, unit: str, sizes: list[int], make: Callable[[int], Callable[[], Any]]) -> tuple[Line, str]:
        samples, rank = list[tuple[float, float]](), 0
        for size in sizes:
            expected = samples[-1][1] * size / samples[-1][0] if samples else 0.0
            if all_gather_object(4 * expected < self._deadline - monotonic())[0]:
                with self._device:
                    function = make(size)
                seconds = all_gather_object(median(self._times(function, 3 if expected < 1 else 1)))
                samples.append((size, max(seconds)))
                rank = seconds.index(max(seconds))
        words = ", ".join(f"{1e3 * seconds:.3g} ms for {size / 1e6:g} M{unit}" for size, seconds in samples)
        return fit(samples) or Line(0.0, samples[0][1] / samples[0][0]), f"{words} on {self.rows.names[rank]}"

    def _times(self, function: Callable[[], Any], count: int) -> list[float]:
        times, synchronize = list[float](), torch.get_device_module(self._device).synchronize
        for _ in range(count + 1):
            synchronize()
            began = perf_counter()
            function()
            synchronize()
            times.append(perf_counter() - began)
        return times[1:]


def _trip(first: Callable[..., Any], message: Tensor, second: Callable[..., Any], answer: Tensor, rank: int) -> None:
    first(message, rank)
    second(answer, rank)


def _difference(one: Any, other: Any) -> tuple[float, str]:
    names, ours = zip(*one.named_parameters())
    pairs = zip(ours, (each.to(own) for own, each in zip(ours, other.parameters())))
    apart = torch.tensor([float((own - each).detach().abs().max() / each.abs().max()) for own, each in pairs])
    return float(apart.max()), names[apart.argmax()]  # max() and argmax() treat NaN as the largest
