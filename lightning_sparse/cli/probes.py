"""The command ``lightning-sparse check``: run small trainings and timings on the machines of a training."""

import argparse
import logging
import os
import platform
import socket
import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any
from unittest import SkipTest

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun
from torch.testing import assert_close
from torch.utils.data import DataLoader

from lightning_sparse.callbacks import ReplicaSentinel
from lightning_sparse.cli.estimate import COUNTS, PASSES, SECONDS, Estimate, read
from lightning_sparse.cli.rows import Row, Rows
from lightning_sparse.engine.collectives import all_gather_object, backend_of
from lightning_sparse.engine.store import default_store
from lightning_sparse.functional.topk import top_k_indices
from lightning_sparse.schedule.costs import Line, fit, sent_bytes
from lightning_sparse.strategy.lightning import NAME, DDPStrategy, LightningModule, Trainer
from lightning_sparse.strategy.trainer import SparseDDPStrategy

_QUIET = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler"), False
)
_STEPS = 40
_CLOSE = 1e-4  # accepted difference between two orders of summation
_SLOW = 1 / 3  # share of the fastest link's rate below which a link is too slow
_SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
_sparse = partial(SparseDDPStrategy, "lags", 0.01)


def check(args: Sequence[str]) -> None:
    """Run all checks, if necessary in new local processes. Exit with status 1 if a check has failed."""
    options = _parsed(args)
    if "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_STEP_ID" in os.environ:
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
        probes = Probes(options)
        probes.rows.run(probes.table())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.devices)))
    local = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={options.devices}"]
    try:
        torchrun([*local, "-m", "lightning_sparse", "check", *args])
    except (ChildFailedError, SignalException):
        sys.exit(1)


def _parsed(args: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("lightning-sparse check", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--devices", type=int, default=torch.cuda.device_count() or 1, help="processes, without torchrun and srun")
    add("--time", type=float, default=60.0, help="time limit of the command in seconds, default %(default)g")
    add("--output", type=Path, help="a JSON file for the report, such as check.json")
    add("--parameters", help="trained parameters of your model, such as 124M, for advice; needs --compute")
    add("--compute", help="time of a step without communication, such as 120ms; needs --parameters")
    options = parser.parse_args(args)
    try:
        if options.parameters or options.compute:
            options.parameters = read("--parameters", options.parameters or "", COUNTS, "124M")
            options.compute = read("--compute", options.compute or "", SECONDS, "120ms")
    except ValueError as error:
        parser.error(str(error))
    return options


class _OddModel(LightningModule):
    """A model with prime sizes, a tied embedding, a bf16 layer, and two layers that not all ranks use."""

    def __init__(self, optimizer: Callable[..., Any] = _SGD, coarse: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.optimizer = optimizer
        self.embedding, self.head = nn.Embedding(211, 97), nn.Linear(97, 211)
        self.head.weight = self.embedding.weight
        self.coarse, self.most, self.last = nn.Linear(97, 97, dtype=coarse), nn.Linear(97, 97), nn.Linear(97, 97)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        seed = torch.Generator().manual_seed(ranks * index + rank)  # `batch` restarts at 0 after a resume
        words = torch.randint(211, (8, 8), generator=seed).to(self.device)
        hidden = self.coarse(self.embedding(words).to(self.coarse.weight.dtype)).float().tanh()
        hidden = hidden + (self.last if rank == ranks - 1 else self.most)(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), ((words * 3 + 1) % 211).flatten())

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


class Probes:
    """Checks in this process, which torchrun or SLURM has started. ``rows`` runs each check on all ranks together."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        is_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        sizes = ("WORLD_SIZE", "GROUP_WORLD_SIZE") if is_torchrun else ("SLURM_NTASKS", "SLURM_NNODES")
        self._ranks, self._hosts = (int(os.environ[name]) for name in sizes)
        self._local = self._ranks // self._hosts
        self._trainer: dict[str, Any] = {"devices": self._local, "num_nodes": self._hosts, **_QUIET}
        strategy: Any = Trainer(strategy=DDPStrategy(timeout=timedelta(seconds=options.time)), **self._trainer).strategy
        strategy.setup_environment()
        self._rank, self._device = dist.get_rank(), strategy.root_device
        os.environ["LIGHTNING_SPARSE_TEST_DEVICE"] = str(self._device)
        names = all_gather_object(f"rank {self._rank} ({socket.gethostname()})")
        self._lines = {"network": Line()}  # seconds by size: sent bytes; for "copy" bytes; for "selection" elements
        self.rows = Rows(self._rank, names, options.time, options.output)

    def table(self) -> dict[str, Row]:
        """Return the rows of the report by name. A row is a check, or the reason why the check is not applicable."""
        accumulated = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "max_steps": _STEPS // 2}
        two_levels = partial(self._replicas, levels=2)
        of_two: dict[str, Row] = {
            "one seed, one model": lambda: self._agree(_OddModel().state_dict()),
            "density 1 equals DDP": self._equals_ddp,
            "replicas at density 0.01": self._replicas,
            "mass": self._conserves,
            "AdamW, accumulation, clipping": partial(self._equals_ddp, torch.optim.AdamW, **accumulated),
            "save and resume": self._resumes,
            "owners": partial(self._replicas, exchange="owners") if self._ranks > 2 else "needs three processes",
            "two levels": two_levels if 1 < self._local < self._ranks else "needs several hosts with several processes",
            "local steps": partial(self._replicas, local_steps=4),
            "links": self._links if self._hosts > 1 else "all processes run on one host",
            "all-reduce": self._all_reduce,
        }
        if self._ranks < 2:
            of_two = dict.fromkeys(of_two, "needs two processes")
        select = partial(self._measure, "selection", "", lambda n: partial(top_k_indices, torch.randn(n), n // 100))
        select = partial(select, 10_000_000, 100_000_000)
        of_one: dict[str, Row] = {"memory bandwidth": self._copies, "selection of 1 %": select}
        advice = {"advice": self._advise} if self._options.parameters else {}
        return {"environment": self._environment, **of_two, **of_one, **advice}

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
        count = f"{self._ranks} ranks on {self._hosts} hosts"
        return f"{count}, {backend}, {self._device.type} {kind}, {network or 'default network interface'}, {versions}"

    def _train(self, strategy: Any, model: Any, path: Any = None, **more: Any) -> dict[str, Tensor]:
        trainer = Trainer(strategy=strategy, **{"max_steps": _STEPS, **self._trainer, **more})
        trainer.fit(model, DataLoader(range(2 * _STEPS)), ckpt_path=path)  # type: ignore[arg-type]
        weights: dict[str, Tensor] = model.state_dict()
        return weights

    def _agree(self, weights: dict[str, Tensor]) -> str:
        for name, each in zip(self.rows.names, everyone := all_gather_object(weights)):
            assert_close(each, everyone[0], rtol=0, atol=0, msg=partial("{} differs from rank 0: {}".format, name))
        return f"the same parameters on {self._ranks} ranks"

    def _equals_ddp(self, optimizer: Any = _SGD, **more: Any) -> str:
        # On three or more ranks, DDP sums in another order. Rounding to bfloat16 would magnify the difference.
        coarse, close = (torch.bfloat16, 0.0) if self._ranks == 2 else (torch.float32, _CLOSE)
        ddp = self._train("ddp_find_unused_parameters_true", _OddModel(optimizer, coarse), **more)
        dense = self._train(SparseDDPStrategy("lags", 1.0), _OddModel(optimizer, coarse), **more)
        assert_close(dense, ddp, rtol=close, atol=close / 10)
        if more:
            self._train(_sparse(), _OddModel(optimizer), callbacks=[ReplicaSentinel(1)], **more)
        return f"the same parameters as DDP's, with a tolerance of {close:g}"

    def _replicas(self, **settings: Any) -> str:
        watch, when = ([ReplicaSentinel(1)], "after each step") if "local_steps" not in settings else ([], "at the end")
        weights = self._train(strategy := _sparse(**settings), _OddModel(), callbacks=watch)
        self._agree(weights)
        density = strategy.compression_stats()["density"]
        if not 0.005 <= density <= 0.06 or weights["head.weight"].equal(_OddModel().head.weight):
            raise ValueError(f"either {density:.3%} of elements are sent instead of 1 %, or no parameter has changed")
        return f"replicas are bitwise identical {when}, {density:.2%} of elements sent"

    def _conserves(self) -> str:
        from lightning_sparse.testing import invariants  # this import reads the device from the environment
        from lightning_sparse.testing.tensors import moved

        book = invariants.balance(self._rank, {"compressor": "lags", "density": 0.05, "wire": "bfloat16"}, 4)
        invariants.assert_mass_is_conserved(all_gather_object(moved(book, "cpu")))
        return "residual before + gradient = sent + residual after, with values in bfloat16"

    def _resumes(self) -> str:
        whole, half = self._train(_sparse(), _OddModel()), _OddModel()
        self._train(_sparse(), half, max_steps=_STEPS // 2)
        with TemporaryDirectory(prefix=".check-", dir=Path.cwd()) as own:
            folder = Path(all_gather_object(own)[0])
            if not all(all_gather_object(folder.exists())):
                raise SkipTest("hosts do not share the current folder")
            half.trainer.save_checkpoint(folder / "half.ckpt")
            resumed = self._train(_sparse(), _OddModel(), folder / "half.ckpt")
            dist.barrier()
        assert_close(resumed, whole, rtol=0, atol=0)
        return f"bitwise identical to a training without a pause after step {_STEPS // 2}"

    def _links(self) -> str:
        # A link inside a host is no network link: a transfer is a memory copy, and other programs change the time.
        ring = range(0, self._ranks, self._local)
        links = [(ring[at], ring[(at + by) % len(ring)]) for at, by in product(range(len(ring)), (1, -1))]
        rates = all_gather_object(max(self._rate(*link) for link in links))[:: self._local]
        words = f"{min(rates) / 1e9:.3g} Gbit/s from the slowest host, {self.rows.names[ring[rates.index(min(rates))]]}"
        if min(rates) < _SLOW * max(rates):
            raise ValueError(f"{words}, and up to {max(rates) / 1e9:.3g} Gbit/s from other hosts")
        return words

    def _rate(self, sender: int, receiver: int) -> float:
        message, answer = torch.ones(1 << 20, device=self._device), torch.ones(1, device=self._device)
        calls = {sender: (dist.send, dist.recv), receiver: (dist.recv, dist.send)}.get(self._rank, ())
        trip, peer = list(zip(calls, (message, answer))), receiver if self._rank == sender else sender
        seconds = min(self._times(lambda: [call(tensor, peer) for call, tensor in trip]))
        # Only the sender's times count: a late receiver would time a copy from a buffer, not the network.
        return 8 * message.nbytes / seconds if self._rank == sender else 0.0

    def _all_reduce(self) -> str:
        sizes = (1_000_000, 25_000_000, 100_000_000)
        words = self._measure("network", "B", lambda n: partial(dist.all_reduce, torch.ones(n // 4)), *sizes)
        share, store = sent_bytes("all_reduce", 1.0, self._ranks), default_store()
        startup, per_byte = self._lines["network"]
        self._lines["network"] = line = Line(startup, per_byte / share)
        # Rank 0's request stays on the host of the store, and so takes no time on the network.
        trips = all_gather_object(min(self._times(lambda: store.check(["none"]), 100)))
        latency, rate = max(0.0, (max(trips) - trips[0]) / 2), 8e-9 / max(line.per_unit, 1e-15)
        return f"{words}: {rate:.3g} Gbit/s, {1e6 * latency:.3g} us one way"

    def _copies(self) -> str:
        words = self._measure("copy", "B", lambda n: partial(torch.ones(n // 8).copy_, torch.ones(n // 8)), 256_000_000)
        return f"{1e-9 / self._lines['copy'].per_unit:.3g} GB/s: {words}"

    def _advise(self) -> str:
        elements, lines = self._options.parameters, self._lines
        own = max(lines["selection"](elements), PASSES["adamw"] * lines["copy"](4 * elements))
        found = Estimate(elements, self._ranks, self._options.compute, lines["network"], own)
        advice = str(found).replace("\n", ". ")
        return f"r = {found.r:.3g} as measured; compression adds {1e3 * own:.3g} ms to a step; {advice}"

    def _measure(self, key: str, unit: str, make: Callable[[int], Callable[[], Any]], *sizes: int) -> str:
        line, samples, slowest = Line(), list[tuple[float, float]](), ""
        for size in sizes:
            if line(size) < self._options.time / 16:  # `_times` runs a function four times
                with self._device:
                    function = make(size)
                seconds = all_gather_object(median(self._times(function)))
                samples.append((size, max(seconds)))
                line = fit(samples) or Line(0.0, max(seconds) / size)
                slowest = self.rows.names[seconds.index(max(seconds))]
        self._lines[key] = line
        words = ", ".join(f"{1e3 * seconds:.3g} ms for {size / 1e6:g} M{unit}" for size, seconds in samples)
        return f"{words} on {slowest}"

    def _times(self, function: Callable[[], Any], count: int = 3) -> list[float]:
        times, synchronize = list[float](), torch.get_device_module(self._device).synchronize
        for _ in range(count + 1):
            synchronize()
            began = perf_counter()
            function()
            synchronize()
            times.append(perf_counter() - began)
        return times[1:]
