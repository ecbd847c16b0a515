"""The command ``lightning-sparse check``: DOES IT WORK HERE, AND WILL IT PAY? Runs small trainings and timings."""

import argparse
import json
import logging
import os
import platform
import socket
import subprocess
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
from typing_extensions import override

from lightning_sparse.cli.estimate import COUNTS, PASSES, SECONDS, Estimate, read
from lightning_sparse.cli.probes import Found, Probes, wait_for_device
from lightning_sparse.cli.rows import Row, Rows
from lightning_sparse.engine.collectives import all_gather_object, backend_of, default_store
from lightning_sparse.schedule.network import dense_bytes, sent_bytes
from lightning_sparse.strategy.lightning import NAME, Callback, DDPStrategy, Trainer
from lightning_sparse.strategy.trainer import SparseDDPStrategy

_QUIET = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
_BACKWARD = 2 / 3  # of a step, behind which exchanges hide at best
_DENSITY, _ELEMENT_BYTES = 0.01, 8  # of a value and an index


def check(args: Sequence[str]) -> None:
    """Run the command on what follows the word ``check``; status 1 if a row has failed."""
    parser = argparse.ArgumentParser("lightning-sparse check", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--devices", type=int, default=torch.cuda.device_count() or 1, help="local processes, without torchrun and srun"
    )
    add("--accelerator", default="auto", help="as of the Trainer, such as cpu")
    add("--time", type=float, default=60.0, help="seconds after which the command ends, %(default)g if left out")
    add("--output", type=Path, help="a JSON file with the report, such as check.json")
    add("--parameters", help="of your model, such as 124M: for advice, together with --compute")
    add("--compute", help="of a step without communication, such as 120ms")
    add("--model", help="in their place, module.Class of a LightningModule that runs without arguments")
    options = parser.parse_args(args)
    try:
        sizes = options.parameters and read("parameters", options.parameters, COUNTS, "124M")
        compute = options.compute and read("compute", options.compute, SECONDS, "120ms")
    except ValueError as error:
        parser.error(str(error))
    if (sizes is None) is not (compute is None):
        parser.error("--parameters and --compute go together")
    if "TORCHELASTIC_RUN_ID" not in os.environ and "SLURM_STEP_ID" not in os.environ:
        _launch(options.devices, args)
    sys.exit(_Check(options).run(sizes, compute))


def _launch(devices: int, args: Sequence[str]) -> None:
    """Start local processes as torchrun would, and exit with their status; return in the only one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "check", "GROUP_RANK": "0"}
    shared |= {"WORLD_SIZE": str(devices), "LOCAL_WORLD_SIZE": str(devices)}
    shared |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // devices)))}
    ranks = [{**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(devices)]
    if devices == 1:
        os.environ.update(ranks[0])
        return
    words = [sys.executable, "-m", "lightning_sparse", "check", *args]
    processes = [subprocess.Popen(words, env=each) for each in ranks]  # noqa: S603
    try:
        sys.exit(max(abs(process.wait()) for process in processes))
    except KeyboardInterrupt:  # which they have received, too
        sys.exit(max(abs(process.wait(10)) for process in processes) or 1)
    finally:
        for process in processes:
            process.kill()


class _Check:
    def __init__(self, options: argparse.Namespace) -> None:
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
        self._options, self._advice, self._facts = options, dict[str, Any](), dict[str, Any]()
        slurm = "TORCHELASTIC_RUN_ID" not in os.environ
        names = ("SLURM_NTASKS", "SLURM_NNODES") if slurm else ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
        count, other = (int(os.environ[name]) for name in names)
        nodes = other if slurm else count // other
        self._trainer = {"accelerator": options.accelerator, "devices": count // nodes, "num_nodes": nodes}
        self._trainer |= dict.fromkeys(_QUIET, False)
        timeout = timedelta(seconds=options.time + 60)
        strategy: Any = Trainer(strategy=DDPStrategy(timeout=timeout), **self._trainer).strategy
        strategy.setup_environment()  # of the cluster, as a training has it
        self._device: torch.device = strategy.root_device
        os.environ["LIGHTNING_SPARSE_TEST_DEVICE"] = str(self._device)

    def run(self, sizes: Any, compute: Any) -> int:
        hosts = all_gather_object((os.environ.get("GROUP_RANK"), socket.gethostname()))
        names = [f"rank {rank} ({host})" for rank, (_, host) in enumerate(hosts)]
        self._rows = rows = Rows(default_store(), dist.get_rank(), names, self._options.time, self._report)
        self._probes = probes = Probes(self._trainer, self._device, rows, [str(each) for each in hosts])
        todo = {"environment": self._environment, **probes.correctness(), **probes.speed()}
        if self._options.model:
            todo["model"] = self._time_model
        for name, function in todo.items():
            rows.run(name, function)
            self._say(self._line(rows.ended[-1]))
        if sizes or "compute" in self._advice:
            self._advise(sizes or self._advice["parameters"], compute or self._advice["compute"])
        self._report()
        rows.close()
        return int(any(row.state == "failed" for row in rows.ended))

    def _environment(self) -> Found:
        versions = {"python": platform.python_version(), "torch": torch.__version__, NAME: version(NAME.split(".")[0])}
        versions["lightning-sparse"] = version("lightning-sparse")
        backend = backend_of(self._device)
        if backend == "nccl":
            versions[backend] = ".".join(map(str, torch.cuda.nccl.version()))
        kind = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else platform.machine()
        network = {name: os.environ[name] for name in os.environ if name.endswith("_SOCKET_IFNAME")}
        ranks = all_gather_object({"device": f"{self._device} {kind}", "versions": versions, "network": network})
        self._facts = {
            "backend": backend,
            "time_limit": self._options.time,
            "ranks": dict(zip(self._rows.names, ranks)),
        }
        if apart := [name for name, each in zip(self._rows.names, ranks) if each["versions"] != versions]:
            raise ValueError(f"other versions than here on {', '.join(apart)}; here {versions}")
        count = f"{self._probes.ranks} ranks on {self._trainer['num_nodes']} hosts, {backend}, {self._device.type}"
        words = ", ".join(f"{name} {each}" for name, each in versions.items())
        return f"{count}, {network or 'default network interface'}, {words}", {}

    def _time_model(self) -> Found:
        module, _, name = self._options.model.rpartition(".")
        seconds = {}
        for label, strategy in {"ddp": DDPStrategy(), "alone": SparseDDPStrategy(local_steps=1000)}.items():
            clock, model = _Clock(self._device), getattr(import_module(module), name)()
            Trainer(strategy=strategy, callbacks=[clock], max_steps=13, **self._trainer).fit(model)
            seconds[label] = max(all_gather_object(median(clock.steps[3:])))
        count = sum(each.numel() for each in model.parameters() if each.requires_grad)
        self._advice = {"parameters": count, "compute": seconds["alone"], "ddp_measured": seconds["ddp"]}
        return (
            f"{1e3 * seconds['ddp']:.3g} ms a step with DDP, {1e3 * seconds['alone']:.3g} without exchange",
            self._advice,
        )

    def _advise(self, elements: float, compute: float) -> None:
        probes, line = self._probes, self._probes.exchange
        found = Estimate(line(dense_bytes(elements, probes.ranks)), compute, probes.latency)
        own = max(probes.select(elements), PASSES["adamw"] * 4 * elements / probes.memory)
        sent = sent_bytes("all_gather", _DENSITY * _ELEMENT_BYTES * elements, probes.ranks)
        exchanges = {"ddp": found.exchange_seconds, "bf16 hook": line(dense_bytes(elements / 2, probes.ranks))}
        steps = {name: compute + max(0.0, each - _BACKWARD * compute) for name, each in exchanges.items()}
        steps["sparse_lags"] = compute + own + max(0.0, line(sent) - _BACKWARD * compute)
        pays = steps["sparse_lags"] < steps["ddp"] or found.strategy == "local steps"
        self._advice |= {
            "r": found.r,
            "own_seconds": own,
            "steps": steps,
            "strategy": found.strategy if pays else "ddp",
        }
        words = ", ".join(f"{name} {1e3 * each:.3g} ms" for name, each in steps.items())
        self._say(
            f"r = {found.r:.3g} as measured; compression adds {1e3 * own:.3g} ms to a step\na step takes about {words}"
        )
        self._say(str(found) if pays else "Take ddp: compression takes more time than it saves.")

    def _report(self, reason: str = "") -> None:
        rows, options = self._rows.ended, self._options
        failed = [row.name for row in rows if row.state == "failed"]
        if reason:
            print(self._line(rows[-1]), flush=True)
        if reason or dist.get_rank() == 0:
            print(f"FAILED: {', '.join(failed)}" if failed else "All rows passed.", flush=True)
            found = {"passed": not failed, "environment": self._facts, "advice": self._advice}
            if options.output:
                options.output.write_text(json.dumps({**found, "rows": [row._asdict() for row in rows]}, indent=1))

    def _line(self, row: Row) -> str:
        return f"{row.state:14} {row.name:30} {row.detail} [{row.seconds:.1f} s]"

    def _say(self, text: str) -> None:
        if self._rows.rank == 0:
            print(text, flush=True)


class _Clock(Callback):
    def __init__(self, device: torch.device) -> None:
        self.steps, self._device, self._began = list[float](), device, perf_counter()

    @override
    def on_train_batch_end(self, *batch: Any) -> None:
        wait_for_device(self._device)
        self.steps.append(perf_counter() - self._began)
        self._began = perf_counter()
