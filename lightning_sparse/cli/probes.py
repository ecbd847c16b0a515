"""The command ``lightning-sparse check``: run small trainings and timings on the machines of a training."""

import argparse
import logging
import os
import socket
import sys
import timeit
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from math import inf
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest import SkipTest

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing import SignalException, errors
from torch.distributed.run import main as torchrun
from torch.testing import assert_close
from torch.utils.data import DataLoader

from lightning_sparse.callbacks import ReplicaSentinel
from lightning_sparse.cli.estimate import COUNTS, PASSES, SECONDS, Estimate, read
from lightning_sparse.cli.rows import Row, Rows
from lightning_sparse.compressors.topk import top_k_indices
from lightning_sparse.engine.collectives import all_gather_object, backend_of
from lightning_sparse.engine.store import default_store
from lightning_sparse.schedule.costs import Line, dense_bytes, fit
from lightning_sparse.strategy.lightning import NAME, LightningModule, Trainer
from lightning_sparse.strategy.trainer import SparseDDPStrategy

_QUIET = ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler"]
_STEPS = 40
_CLOSE = 1e-4  # accepted difference between two orders of summation
_SLOW = 1 / 3  # share of the fastest link's rate below which a link is too slow
_SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def check(args: Sequence[str]) -> None:
    """Run all checks, if necessary in new local processes. Exit with status 1 if a check has failed."""
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
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    if "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_STEP_ID" in os.environ:
        probes = Probes(options)
        probes.rows.run(probes.table(), options.output)
    local = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={options.devices}"]
    try:
        torchrun([*local, "-m", "lightning_sparse", "check", *args])
    except (errors.ChildFailedError, SignalException):
        sys.exit(1)


class _OddModel(LightningModule):
    """A model with prime sizes, a tied embedding, a bf16 layer, and two layers that not all ranks use."""

    def __init__(self, optimizer: Callable[..., Any] = _SGD, coarse: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.optimizer = optimizer
        self.embedding, self.head = nn.Embedding(211, 97), nn.Linear(97, 211)
        self.head.weight = self.embedding.weight
        self.coarse, self.most, self.last = nn.Linear(97, 97).to(coarse), nn.Linear(97, 97), nn.Linear(97, 97)

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
        ranks = {"devices": self._local, "num_nodes": self._hosts}
        self._trainer: dict[str, Any] = {**dict.fromkeys(_QUIET, False), **ranks}
        strategy: Any = Trainer(strategy="ddp", **self._trainer).strategy
        strategy.setup_environment()
        self._rank, self._device = dist.get_rank(), strategy.root_device
        self._lines = {"network": Line()}  # seconds by size: sent bytes; for "memory" and "selection" elements
        names = all_gather_object(f"rank {self._rank} ({socket.gethostname()})")
        self.rows = Rows(self._rank, names, options.time)

    def table(self) -> dict[str, Row]:
        """Return the rows of the report by name. A row is a check, or the reason why the check is not applicable."""
        two = "" if self._ranks > 1 else "needs two processes"
        three = "" if self._ranks > 2 else "needs three processes"
        hosts = "" if self._hosts > 1 else "all processes run on one host"
        levels = "" if 1 < self._local < self._ranks else "needs several hosts with several processes"
        adamw = partial(self._equals_ddp, torch.optim.AdamW, accumulate_grad_batches=2, gradient_clip_val=1.0)
        rows: dict[str, Row] = {
            "environment": self._environment,
            "one seed, one model": lambda: self._agree(_OddModel().state_dict()),
            "density 1 equals DDP": two or self._equals_ddp,
            "replicas at density 0.01": two or partial(self._replicas, [ReplicaSentinel(1)]),
            "mass": two or self._conserves,
            "AdamW, accumulation, clipping": two or adamw,
            "save and resume": two or self._resumes,
            "owners": three or partial(self._replicas, exchange="owners"),
            "two levels": levels or partial(self._replicas, levels=2),
            "local steps": two or partial(self._replicas, local_steps=4),
            "links": hosts or self._links,
            "all-reduce": two or self._all_reduce,
            "memory bandwidth": self._memory,
            "selection of 1 %": self._selection,
        }
        return {**rows, "advice": self._advise} if self._options.parameters else rows

    def _environment(self) -> str:
        torch.get_device_module(self._device).set_device(self._device)  # a new thread's device is the first one
        packages = ("torch", NAME.split(".")[0], "lightning-sparse")
        versions = ", ".join(f"{each} {version(each)}" for each in packages)
        if (backend := backend_of(self._device)) == "nccl":
            versions += f", nccl {torch.cuda.nccl.version()}, {torch.cuda.get_device_name()}"
        if len(found := set(all_gather_object(versions))) > 1:
            raise ValueError(f"versions differ: {' | '.join(sorted(found))}; make all equal")
        network = [os.environ[name] for name in os.environ if name.endswith("_SOCKET_IFNAME")]
        where = f"{self._ranks} ranks on {self._hosts} hosts, {self._device}, {backend}"
        return f"{where}, network interface {network or 'default'}, {versions}"

    def _agree(self, weights: dict[str, Tensor]) -> str:
        for name, each in zip(self.rows.names, everyone := all_gather_object(weights)):
            assert_close(each, everyone[0], rtol=0, atol=0, msg=partial("{} differs from rank 0: {}".format, name))
        return f"the same parameters on {self._ranks} ranks"

    def _train(self, strategy: Any, model: _OddModel, path: Any = None, **more: Any) -> dict[str, Tensor]:
        trainer = Trainer(strategy=strategy, **{"max_steps": _STEPS, **self._trainer, **more})
        trainer.fit(model, DataLoader(range(2 * _STEPS)), ckpt_path=path)  # type: ignore[arg-type]
        self._agree(weights := model.state_dict())
        return weights

    def _equals_ddp(self, optimizer: Any = _SGD, **more: Any) -> str:
        # On three or more ranks, DDP sums in another order. Rounding to bfloat16 would magnify the difference.
        coarse, close = (torch.bfloat16, 0.0) if self._ranks == 2 else (torch.float32, _CLOSE)
        ddp = self._train("ddp_find_unused_parameters_true", _OddModel(optimizer, coarse), **more)
        dense = self._train(SparseDDPStrategy("lags", 1.0), _OddModel(optimizer, coarse), **more)
        assert_close(dense, ddp, rtol=close, atol=close / 10)
        if more:
            self._train("sparse_lags", _OddModel(optimizer), callbacks=[ReplicaSentinel(1)], **more)
        return f"the same parameters as DDP's, with a tolerance of {close:g}"

    def _replicas(self, callbacks: Sequence[ReplicaSentinel] = (), **settings: Any) -> str:
        self._train(strategy := SparseDDPStrategy("lags", 0.01, **settings), _OddModel(), callbacks=[*callbacks])
        return f"replicas are bitwise identical, {strategy.compression_stats()['density']:.2%} of elements sent"

    def _conserves(self) -> str:
        os.environ["LIGHTNING_SPARSE_TEST_DEVICE"] = str(self._device)  # the next imports read the variable
        from lightning_sparse.testing import invariants
        from lightning_sparse.testing.tensors import moved

        book = invariants.balance(self._rank, {"compressor": "lags", "density": 0.05, "wire": "bfloat16"}, 4)
        invariants.assert_mass_is_conserved(all_gather_object(moved(book, "cpu")))
        return "residual before + gradient = sent + residual after, with values in bfloat16"

    def _resumes(self) -> str:
        whole, half = self._train("sparse_lags", _OddModel()), _OddModel()
        self._train("sparse_lags", half, max_steps=_STEPS // 2)
        with TemporaryDirectory(prefix=".check-", dir=Path.cwd()) as own:
            file = Path(all_gather_object(own)[0], "half.ckpt")
            if not all(all_gather_object(file.parent.exists())):
                raise SkipTest("hosts do not share the current folder")
            half.trainer.save_checkpoint(file)
            resumed = self._train("sparse_lags", _OddModel(), file)
        assert_close(resumed, whole, rtol=0, atol=0)
        return f"bitwise identical to a training without a pause after step {_STEPS // 2}"

    def _links(self) -> str:
        # A link inside a host is no network link: a transfer is a memory copy, and other programs change the time.
        seconds = dict.fromkeys(range(0, self._ranks, self._local), inf)
        message = torch.ones(1 << 20, device=self._device)
        for first in seconds:
            pair = [first, (first + self._local) % self._ranks]
            exchange = partial(dist.all_reduce, message, group=dist.new_group(pair))  # no-op on other ranks
            slower = max(all_gather_object(min(self._times(exchange))))
            seconds.update({each: min(seconds[each], slower) for each in pair})
        slowest = max(seconds, key=seconds.__getitem__)
        low, high = (8e-9 * message.nbytes / each for each in (seconds[slowest], min(seconds.values())))
        words = (
            f"{low:.3g} Gbit/s from the slowest host, {self.rows.names[slowest]}, up to {high:.3g} Gbit/s from others"
        )
        if low < _SLOW * high:
            raise ValueError(words)
        return words

    def _all_reduce(self) -> str:
        words = self._measure("network", dist.all_reduce, 250_000, 6_250_000, 25_000_000)
        startup, per_element = self._lines["network"]
        self._lines["network"] = line = Line(startup, per_element / dense_bytes(1, self._ranks))
        # Rank 0's request stays on the host of the store, and so takes no time on the network.
        trips = all_gather_object(min(self._times(partial(default_store().check, ["none"]), 100)))
        latency, rate = max(0.0, (max(trips) - trips[0]) / 2), 8e-9 / max(line.per_unit, 1e-15)
        return f"{words}: {rate:.3g} Gbit/s, {1e6 * latency:.3g} us one way"

    def _memory(self) -> str:
        words = self._measure("memory", Tensor.neg_, 32_000_000)
        return f"{words}: {8e-9 / self._lines['memory'].per_unit:.3g} GB/s"

    def _selection(self) -> str:
        return self._measure("selection", lambda each: top_k_indices(each, len(each) // 100), 10_000_000, 100_000_000)

    def _advise(self) -> str:
        elements, lines = self._options.parameters, self._lines
        own = max(lines["selection"](elements), PASSES["adamw"] / 2 * lines["memory"](elements))
        found = Estimate(elements, self._ranks, self._options.compute, lines["network"], own)
        advice = str(found).replace("\n", ". ")
        return f"r = {found.r:.3g} as measured; compression adds {1e3 * own:.3g} ms to a step; {advice}"

    def _measure(self, key: str, call: Callable[[Tensor], Any], *sizes: int) -> str:
        line, samples, words = Line(), list[tuple[float, float]](), list[str]()
        for size in sizes:
            if line(size) < self._options.time / 16:  # `_times` runs a function four times
                numbers = torch.randn(size, device=self._device)
                seconds = all_gather_object(median(self._times(partial(call, numbers))))
                slowest = max(seconds)
                samples.append((size, slowest))
                line = fit(samples) or Line(0.0, slowest / size)
                name = self.rows.names[seconds.index(slowest)]
                words.append(f"{1e3 * slowest:.3g} ms for {size / 1e6:g} M elements on {name}")
        self._lines[key] = line
        return ", ".join(words)

    def _times(self, call: Callable[[], Any], count: int = 3) -> list[float]:
        synchronize = torch.get_device_module(self._device).synchronize
        return timeit.repeat(lambda: (call(), synchronize()), synchronize, repeat=count + 1, number=1)[1:]
