"""The command ``lightning-sparse check``: run small trainings and timings on the machines of a training."""

import argparse
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Timer, get_ident
from timeit import default_timer, repeat
from typing import Any, NoReturn, Union
from unittest import SkipTest

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing import SignalException, errors
from torch.distributed.elastic.utils.store import barrier
from torch.distributed.run import main as torchrun
from torch.testing import assert_close

from lightning_sparse.callbacks import ReplicaSentinel
from lightning_sparse.cli.estimate import LOCAL_STEPS, Estimate, add_model_options
from lightning_sparse.compressors.topk import top_k_indices
from lightning_sparse.engine.adam.correction import AdamCorrection
from lightning_sparse.engine.collectives import all_gather_object, backend_of
from lightning_sparse.engine.store import ExchangeError, default_store
from lightning_sparse.schedule.costs import Line, dense_bytes, fit
from lightning_sparse.strategy.lightning import NAME, LightningModule, Trainer
from lightning_sparse.strategy.trainer import SparseDDPStrategy

_OFF = ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler"]
_STEPS = 40
_SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
_STATES = ("passed", "not applicable", "waits", "failed", "stopped")  # a row has its ranks' rightmost state
_DIED = ("stopped", "died")  # state and detail of a rank that does not answer
_WAITS = {"torch", "threading.py", "engine"}  # in the path of code that waits for other ranks

Row = Union[str, Callable[[], str]]  # the reason why a check is not applicable, or a function that returns a detail


def check(args: Sequence[str]) -> None:
    """Run all checks, if necessary in new local processes. Exit with status 1 if a check has failed."""
    parser = argparse.ArgumentParser("lightning-sparse check", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--devices", type=int, default=torch.cuda.device_count() or 1, help="processes, without torchrun and srun")
    add("--time", type=float, default=60.0, help="time limit of the command in seconds, default %(default)g")
    add("--output", type=Path, help="a JSON file for the report, such as check.json")
    add_model_options(parser)
    options = parser.parse_args(args)
    logging.disable(logging.WARNING)
    logging.captureWarnings(True)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        Probes(options, os.environ["WORLD_SIZE"], os.environ["GROUP_WORLD_SIZE"]).run()
    if "SLURM_STEP_ID" in os.environ:
        Probes(options, os.environ["SLURM_NTASKS"], os.environ["SLURM_NNODES"]).run()
    local = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={options.devices}"]
    try:
        torchrun([*local, "-m", "lightning_sparse", "check", *args])
    except (errors.ChildFailedError, SignalException):
        sys.exit(1)


class _OddModel(LightningModule):
    """A model with prime sizes, a tied embedding, a bf16 layer, and two layers that not all ranks use."""

    def __init__(self, optimizer: Any = _SGD, coarse: torch.dtype = torch.bfloat16, words: int = 211) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.optimizer, self.words = optimizer, words
        self.embedding, self.head = nn.Embedding(words, 97), nn.Linear(97, words)
        self.head.weight = self.embedding.weight
        self.coarse, self.most, self.last = nn.Linear(97, 97).to(coarse), nn.Linear(97, 97), nn.Linear(97, 97)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        seed = torch.Generator().manual_seed(1000 * self.global_rank + index)  # `batch` restarts at 0 after a resume
        words = torch.randint(self.words, (64,), generator=seed).to(self.device)
        hidden = self.coarse(self.embedding(words).to(self.coarse.weight.dtype)).float().tanh()
        hidden = hidden + (self.last if self.global_rank == self.trainer.world_size - 1 else self.most)(hidden)
        return nn.functional.cross_entropy(self.head(hidden), (words * 3 + 1) % self.words)

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


class Probes:
    """Checks (rows of a report) in this process, which torchrun or SLURM has started. Each check runs on all ranks."""

    def __init__(self, options: argparse.Namespace, ranks: str, hosts: str) -> None:
        self._options, self._ranks, self._hosts = options, int(ranks), int(hosts)
        self._local = self._ranks // self._hosts  # processes per host
        self._trainer: dict[str, Any] = dict.fromkeys(_OFF, False) | {"devices": self._local, "num_nodes": self._hosts}
        strategy: Any = Trainer(strategy="ddp", **self._trainer).strategy
        strategy.setup_environment()
        self._rank, self._device = dist.get_rank(), strategy.root_device
        self._names = all_gather_object(f"rank {self._rank} ({socket.gethostname()})")
        self._store = default_store().clone()  # threads cannot share a store
        self._network = Line()  # seconds of an all-reduce by the bytes that a rank sends

    def run(self) -> NoReturn:
        """Run the checks. Print and store the results. End the process with exit status 1 if a row has failed."""
        over = Event()
        Timer(self._options.time, over.set).start()
        signal.signal(signal.SIGTERM, lambda *_: over.set())  # torchrun sends SIGTERM after a rank has died
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process at once
        worker = ThreadPoolExecutor(1)  # checks run in a thread, because signals do not interrupt a collective
        thread = worker.submit(get_ident).result()
        rows = list[dict[str, Any]]()
        for name, row in self.table().items():
            began, running = default_timer(), worker.submit(_answer, row)
            while not running.done() and not over.is_set():
                wait([running], timeout=0.1)
            own = running.result() if running.done() else _place(sys._current_frames()[thread])
            answers = self._answers(name, own)
            state, detail = max(answers, key=lambda answer: _STATES.index(answer[0]))
            if state not in ("passed", "not applicable"):
                named = (rank for rank, (each, _) in zip(self._names, answers) if each == state)
                state, detail = "failed", f"{', '.join(named)}: {detail}"
            seconds, ranks = round(default_timer() - began, 1), dict(zip(self._names, answers))
            rows.append({"name": name, "state": state, "seconds": seconds, "detail": detail, "ranks": ranks})
            is_first = answers[: self._rank] == [_DIED] * self._rank  # rank 0, or the first that lives
            if is_first:
                print(f"{state:14} {seconds:4.1f} s  {name:30} {detail}", flush=True)
            if not {"waits", "stopped"}.isdisjoint(each for each, _ in answers):
                break  # ranks are at different places
        failed = [row["name"] for row in rows if row["state"] == "failed"]
        if is_first:
            print(f"Failed rows: {', '.join(failed)}." if failed else "All rows passed.", flush=True)
        if is_first and self._options.output:
            self._options.output.write_text(json.dumps({"passed": not failed, "rows": rows}, indent=1))
        with suppress(RuntimeError):  # another rank has died
            barrier(self._store, self._ranks, "check/end", 10)  # rank 0 may have the store, and so must not end first
        os._exit(bool(failed))

    def _answers(self, name: str, own: tuple[str, str]) -> list[tuple[str, str]]:
        keys = [f"check/{name}/{rank}" for rank in range(self._ranks)]
        answers = [_DIED, *[("waits", "") for _ in keys[1:]]]  # if the store is gone, rank 0 has died
        with suppress(RuntimeError):
            self._store.set(keys[self._rank], json.dumps(own))
            with suppress(RuntimeError):
                self._store.wait(keys, timedelta(seconds=10))
            answers = [json.loads(self._store.get(key)) if self._store.check([key]) else _DIED for key in keys]
        return answers

    def table(self) -> dict[str, Row]:
        """Return the rows of the report by name. A row is a check, or the reason why the check is not applicable."""
        two = "" if self._ranks > 1 else "needs two processes"
        three = "" if self._ranks > 2 else "needs three processes"
        hosts = "" if self._hosts > 1 else "all processes run on one host"
        levels = "" if 1 < self._local < self._ranks else "needs several hosts with several processes"
        model = "" if self._options.parameters and self._options.compute else "needs --parameters and --compute"
        adamw = partial(self._equals_ddp, torch.optim.AdamW, accumulate_grad_batches=2, gradient_clip_val=1.0)
        return {
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
            "memory bandwidth": lambda: self._measure(8, Tensor.neg_, 32)[0],
            "selection of 1 %": self._selection,
            "advice": two or model or self._advise,
        }

    def _environment(self) -> str:
        torch.get_device_module(self._device).set_device(self._device)  # a new thread's device is the first one
        packages = ("torch", NAME.partition(".")[0], "lightning_sparse")
        versions = ", ".join(f"{each} {sys.modules[each].__version__}" for each in packages)
        if (backend := backend_of(self._device)) == "nccl":
            versions += f", nccl {torch.cuda.nccl.version()}, {torch.cuda.get_device_name()}"
        if len(found := set(all_gather_object(versions))) > 1:
            raise ValueError(f"versions differ: {' | '.join(sorted(found))}; make all equal")
        network = [os.environ[name] for name in os.environ if name.endswith("_SOCKET_IFNAME")]
        where = f"{self._ranks} ranks on {self._hosts} hosts, {self._device}, {backend}"
        return f"{where}, network interface {network or 'default'}, {versions}"

    def _agree(self, weights: dict[str, Tensor]) -> str:
        for name, each in zip(self._names, everyone := all_gather_object(weights)):
            assert_close(each, everyone[0], rtol=0, atol=0, msg=partial("{} differs from rank 0: {}".format, name))
        return f"the same parameters on {self._ranks} ranks"

    def _train(self, strategy: Any, model: _OddModel, path: Any = None, **more: Any) -> dict[str, Tensor]:
        trainer = Trainer(strategy=strategy, **{"max_steps": _STEPS, **self._trainer, **more})
        trainer.fit(model, range(2 * _STEPS), ckpt_path=path)
        self._agree(weights := model.state_dict())
        return weights

    def _equals_ddp(self, optimizer: Any = _SGD, **more: Any) -> str:
        # On three or more ranks, DDP sums in another order. Rounding to bfloat16 would magnify the difference.
        coarse, close = (torch.bfloat16, 0.0) if self._ranks == 2 else (torch.float32, 1e-4)
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
        from lightning_sparse.testing import invariants, tensors

        book = invariants.balance(self._rank, {"compressor": "lags", "density": 0.05, "wire": "bfloat16"}, 4)
        invariants.assert_mass_is_conserved(all_gather_object(tensors.moved(book, "cpu")))
        return "residual before + gradient = sent + residual after, with values in bfloat16"

    def _resumes(self) -> str:
        whole, half = self._train("sparse_lags", _OddModel()), _OddModel()
        self._train("sparse_lags", half, max_steps=_STEPS // 2)
        with TemporaryDirectory(prefix=".check-", dir=Path.cwd()) as own:
            file = Path(all_gather_object(own)[0], "half.ckpt")
            if not all(all_gather_object(file.parent.exists())):
                raise SkipTest("hosts do not share the current folder")
            half.trainer.save_checkpoint(file)
            assert_close(self._train("sparse_lags", _OddModel(), file), whole, rtol=0, atol=0)
        return f"bitwise identical to a training without a pause after step {_STEPS // 2}"

    def _links(self) -> str:
        # A link inside a host is no network link: a transfer is a memory copy, and other programs change the time.
        message, seconds = torch.ones(1 << 20, device=self._device), list[float]()
        for first in range(0, self._ranks, self._local):
            pair = dist.new_group([first, (first + self._local) % self._ranks])
            seconds.append(max(self._seconds(partial(dist.all_reduce, message, group=pair))))  # no-op on other ranks
        rates = [8e-9 * message.nbytes / min(links) for links in zip(seconds, seconds[-1:] + seconds)]
        slowest = self._names[self._local * rates.index(min(rates))]
        words = f"{min(rates):.3g} Gbit/s from the slowest host, {slowest}, up to {max(rates):.3g} Gbit/s from others"
        if min(rates) < max(rates) / 3:
            raise ValueError(words)
        return words

    def _all_reduce(self) -> str:
        words, self._network = self._measure(dense_bytes(1, self._ranks), dist.all_reduce, 0.25, 6.25, 25)
        # Rank 0's request stays on the host of the store, and so takes no time on the network.
        trips = self._seconds(partial(default_store().check, ["none"]), 100)
        latency, rate = (max(trips) - trips[0]) / 2, 8e-9 / self._network.per_unit
        return f"{words} = {rate:.3g} Gbit/s, {1e6 * max(0.0, latency):.3g} us one way"

    def _selection(self) -> str:
        return self._measure(4, lambda each: top_k_indices(each, len(each) // 100), 10, 100)[0]

    def _advise(self) -> str:
        options, correction = self._options, AdamCorrection(warmup_steps=2, density_decay_steps=0)
        own = self._own_cost("lags", 0.01, schedule="single", optimizer_correction=correction)
        changes = LOCAL_STEPS * self._own_cost("topk", 0.05, wire="bfloat16", local_steps=LOCAL_STEPS)
        found = Estimate(options.parameters, self._ranks, options.compute, self._network, own, changes)
        costs = f"compression adds {1e3 * own:.3g} ms to a step, {1e3 * changes:.3g} ms to a round of local steps"
        return f"r = {found.r:.3g} as measured; {costs}; {found}"

    def _own_cost(self, *settings: Any, **more: Any) -> float:
        """Return the seconds that compression adds to a step of AdamW with the user's number of parameters."""
        samples = list[tuple[float, float]]()
        for words in (10_000, 50_000):
            strategy, model = SparseDDPStrategy(*settings, **more), _OddModel(torch.optim.AdamW, words=words)
            self._train(strategy, model, max_steps=3 * LOCAL_STEPS)
            stats = strategy.compression_stats()
            costs = all_gather_object(stats["exposed_seconds"] - stats["exchange_seconds"])
            samples.append((sum(map(Tensor.numel, model.parameters())), max(costs)))
        return max(0.0, (fit(samples) or Line())(self._options.parameters))

    def _measure(self, unit: float, call: Callable[[Tensor], Any], *millions: float) -> tuple[str, Line]:
        """Return a text, and the seconds as a function of bytes, with ``unit`` bytes per element."""
        samples, words = list[tuple[float, float]](), list[str]()
        for size in millions:
            elements = torch.randn(int(1e6 * size), device=self._device)
            seconds, name = max(zip(self._seconds(partial(call, elements)), self._names))
            samples.append((unit * len(elements), seconds))
            words.append(f"{1e3 * seconds:.3g} ms for {size:g} M elements on {name}")
            if seconds > self._options.time / 64:
                break  # `_seconds` would call the function with more elements four times
        nbytes, seconds = samples[-1]
        line = fit(samples) or Line(0.0, seconds / nbytes)
        line = line._replace(per_unit=max(line.per_unit, 1e-15))
        return f"{', '.join(words)}: {1e-9 / line.per_unit:.3g} GB/s", line

    def _seconds(self, call: Callable[[], Any], count: int = 4) -> list[float]:
        synchronize = torch.get_device_module(self._device).synchronize
        return all_gather_object(min(repeat(lambda: (call(), synchronize()), synchronize, repeat=count, number=1)))


def _answer(check: Row) -> tuple[str, str]:
    try:
        return ("not applicable", check) if isinstance(check, str) else ("passed", check())
    except SkipTest as reason:
        return "not applicable", str(reason)
    except Exception as error:
        state = "waits" if isinstance(error, ExchangeError) else "failed"  # an ExchangeError: another rank failed
        return state, " ".join(f"{type(error).__name__}: {error}".split())[:400]


def _place(frame: Any) -> tuple[str, str]:
    path = Path(frame.f_code.co_filename)
    state = "waits" if _WAITS.intersection(path.parts) else "stopped"
    return state, f"at {path.name}:{frame.f_lineno}, had not ended the check when the time was over"
