"""The command ``lightning-sparse check`` tests this package here with small trainings, and times the machines."""

import argparse
import json
import logging
import os
import platform
import socket
import sys
import warnings
from collections.abc import Sequence
from datetime import timedelta
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from typing_extensions import override

from lightning_sparse.cli.estimate import COUNTS, PASSES, SECONDS, Estimate, read
from lightning_sparse.cli.probes import Probes, wait_for_device
from lightning_sparse.cli.rows import Rows
from lightning_sparse.engine.collectives import all_gather_object, backend_of
from lightning_sparse.strategy.lightning import NAME, Callback, DDPStrategy, Trainer
from lightning_sparse.strategy.trainer import SparseDDPStrategy

_QUIET = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")


def check(args: Sequence[str]) -> None:
    """Run the command with the arguments after ``check``. The exit status is 1 if a row has failed."""
    parser = argparse.ArgumentParser("lightning-sparse check", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    devices = torch.cuda.device_count() or 1
    add("--devices", type=int, default=devices, help="local processes, without torchrun and srun")
    add("--time", type=float, default=60.0, help="seconds after which the command ends, %(default)g if left out")
    add("--output", type=Path, help="a JSON file with the report, such as check.json")
    add("--parameters", help="parameters of your model, such as 124M, for advice together with --compute")
    add("--compute", help="time of a step without communication, such as 120ms")
    add("--model", help="instead of both: module.Class of a LightningModule that runs without arguments")
    options = parser.parse_args(args)
    if (options.parameters is None) is not (options.compute is None):
        parser.error("--parameters and --compute go together")
    try:
        options.parameters = options.parameters and read("parameters", options.parameters, COUNTS, "124M")
        options.compute = options.compute and read("compute", options.compute, SECONDS, "120ms")
    except ValueError as error:
        parser.error(str(error))
    if "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_STEP_ID" in os.environ:
        sys.exit(_Check(options).run())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.devices)))
    where: dict[str, Any] = {
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "127.0.0.1:0",
        "local_addr": "127.0.0.1",
        "max_restarts": 0,
        "run_id": "check",
    }
    try:
        launch = elastic_launch(LaunchConfig(1, 1, options.devices, **where), sys.executable)
        launch("-m", "lightning_sparse", "check", *args)
    except (ChildFailedError, SignalException):
        sys.exit(1)


class _Check:
    def __init__(self, options: argparse.Namespace) -> None:
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
        self._options, self._report = options, dict[str, Any]()
        if "TORCHELASTIC_RUN_ID" in os.environ:
            devices = int(os.environ["LOCAL_WORLD_SIZE"])
            self._nodes = int(os.environ["WORLD_SIZE"]) // devices
        else:
            self._nodes = int(os.environ["SLURM_NNODES"])
            devices = int(os.environ["SLURM_NTASKS"]) // self._nodes
        self._trainer: dict[str, Any] = {"devices": devices, "num_nodes": self._nodes, **dict.fromkeys(_QUIET, False)}
        timeout = timedelta(seconds=options.time)
        strategy: Any = Trainer(strategy=DDPStrategy(timeout=timeout), **self._trainer).strategy
        strategy.setup_environment()  # forms the process group in the same way as a training
        self._device: torch.device = strategy.root_device
        os.environ["LIGHTNING_SPARSE_TEST_DEVICE"] = str(self._device)

    def run(self) -> int:
        options, hosts = self._options, all_gather_object((os.environ.get("GROUP_RANK"), socket.gethostname()))
        names = [f"rank {rank} ({host})" for rank, (_, host) in enumerate(hosts)]
        self._rows = rows = Rows(dist.get_rank(), names, options.time, self._write)
        self._probes = probes = Probes(self._trainer, self._device, rows, [str(each) for each in hosts])
        todo = {"environment": self._environment, **probes.table()}
        if options.model:
            todo["model"] = self._time_model
        if options.model or options.compute:
            todo["advice"] = self._advise
        for name, function in todo.items():
            rows.run(name, function)
        if dist.get_rank() == 0:
            self._conclude()
        rows.close()
        return int(any(row.state == "failed" for row in rows.ended))

    def _conclude(self) -> None:
        failed = [row.name for row in self._rows.ended if row.state == "failed"]
        print(f"FAILED: {', '.join(failed)}" if failed else "All rows passed.", flush=True)

    def _environment(self) -> str:
        versions = {"python": platform.python_version(), "torch": torch.__version__, NAME: version(NAME.split(".")[0])}
        versions["lightning-sparse"] = version("lightning-sparse")
        backend = backend_of(self._device)
        if backend == "nccl":
            versions[backend] = ".".join(map(str, torch.cuda.nccl.version()))
        kind = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else platform.machine()
        network = {name: os.environ[name] for name in os.environ if name.endswith("_SOCKET_IFNAME")}
        ranks = all_gather_object({"device": f"{self._device} {kind}", "versions": versions, "network": network})
        self._report = {
            "backend": backend,
            "time_limit": self._options.time,
            "ranks": dict(zip(self._rows.names, ranks)),
        }
        if apart := [name for name, each in zip(self._rows.names, ranks) if each["versions"] != versions]:
            raise ValueError(f"versions differ from {versions} on {', '.join(apart)}")
        words = ", ".join(f"{name} {each}" for name, each in versions.items())
        count = f"{self._probes.ranks} ranks on {self._nodes} hosts, {backend}, {self._device.type} {kind}"
        return f"{count}, {network or 'default network interface'}, {words}"

    def _time_model(self) -> str:
        module, _, name = self._options.model.rpartition(".")
        seconds = {}
        for label, strategy in {"DDP": DDPStrategy(), "no exchange": SparseDDPStrategy(local_steps=1000)}.items():
            clock, model = _Clock(self._device), getattr(import_module(module), name)()
            Trainer(strategy=strategy, callbacks=[clock], max_steps=13, **self._trainer).fit(model)
            seconds[label] = max(all_gather_object(median(clock.steps[3:])))
        self._options.parameters = sum(each.numel() for each in model.parameters() if each.requires_grad)
        self._options.compute = seconds["no exchange"]
        return ", ".join(f"{1e3 * each:.3g} ms a step with {label}" for label, each in seconds.items())

    def _advise(self) -> str:
        probes, elements = self._probes, self._options.parameters
        own = max(probes.select(elements), PASSES["adamw"] * 4 * elements / probes.memory)
        found = Estimate(elements, probes.ranks, self._options.compute, probes.exchange, own)
        advice = str(found).replace("\n", ". ")
        return f"r = {found.r:.3g} as measured; compression adds {1e3 * own:.3g} ms to a step; {advice}"

    def _write(self, is_last: bool) -> None:
        rows = self._rows.ended
        name, state, detail, seconds = rows[-1]
        print(f"{state:14} {name:30} {detail} [{seconds:.1f} s]", flush=True)
        if is_last:
            self._conclude()
        if self._options.output:
            passed = all(row.state != "failed" for row in rows)
            report = {"passed": passed, **self._report, "rows": [row._asdict() for row in rows]}
            self._options.output.write_text(json.dumps(report, indent=1))


class _Clock(Callback):
    def __init__(self, device: torch.device) -> None:
        self.steps, self._device, self._began = list[float](), device, perf_counter()

    @override
    def on_train_batch_end(self, *batch: Any) -> None:
        wait_for_device(self._device)
        self.steps.append(perf_counter() - self._began)
        self._began = perf_counter()
