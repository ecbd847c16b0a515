"""Write digests of training results, and compare two such files. A refactoring changes no bit.

    python -m tests.digests --output old.json          # before the change
    python -m tests.digests --output new.json          # after the change
    python -m tests.digests --compare old.json new.json

A digest has the parameters (SHA-256 of their bytes in model order, on every rank) and all tensors of the optimizer
and the strategy in the checkpoint. Tensors of the strategy are compared without names, because names may change.

Only public names, arguments and checkpoint files are used. So this file also runs with other versions of the package:
``PYTHONPATH=that/version python tests/digests.py --output old.json``.

Digests depend on the machine and torch. The file records both. All trainings run on the CPU with one thread per rank.
``sparse_auto`` and ``sparse_omgs`` with ``schedule="merged"`` are absent because measured times affect the numbers.
"""

import argparse
import json
import logging
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, Optional

import pytorch_lightning
import torch
import torch.distributed as dist
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_sparse
from lightning_sparse import LocalSteps, SparseDDPStrategy
from lightning_sparse.callbacks import MomentumCorrection
from lightning_sparse.compressors import LAGS

COMPRESSORS = ("topk", "lags", "omgs", "dgc", "exdyna", "micro", "sdagc", "qsgd", "a2sgd", "dense")
WITHOUT_DENSITY = ("qsgd", "a2sgd", "dense")
CLOSELY = ("topk", "lags", "exdyna", "dgc", "sdagc")  # one compressor of each kind, with more situations
CARRYING_MOMENTUM = ("dgc", "sdagc")  # compressors that MomentumCorrection does not support
SCHEDULES = ("layerwise", "single", "merged")
WIRES = ("float32", "bfloat16", "float16")
STEPS = 20
LONG = 120  # steps in which a merged schedule measures, plans, and follows its plan
BATCHES = 8  # batches per epoch, so that training ends and is saved mid-epoch
LONG_VECTOR = 70_001  # a prime number of elements, above 16 bits
PATIENCE = timedelta(seconds=60)  # timeout for a missing rank


class Model(LightningModule):
    """A model with layers of different sizes, including primes and 1. Number and rank determine the batches."""

    def __init__(self, optimizer, leaves_out=False):
        super().__init__()
        torch.manual_seed(0)
        self.optimizer = optimizer
        self.leaves_out = leaves_out
        self.network = nn.Sequential(nn.Linear(16, 67), nn.Tanh(), nn.Linear(67, 37), nn.Tanh(), nn.Linear(37, 16))
        self.sometimes = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(1))
        self.long = nn.Parameter(torch.zeros(LONG_VECTOR))

    def training_step(self, batch, batch_index):
        seed = 1_000_000 * self.global_rank + 1000 * self.current_epoch + batch_index
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(4, 16, generator=generator)
        output = self.scale * self.network(rows)
        if not (self.leaves_out and self.global_rank == 1 and batch_index % 2):
            output = output + self.sometimes(rows)
        distance = (self.long - torch.randn(LONG_VECTOR, generator=generator)).square().mean()
        return (output - rows).square().mean() + distance

    def configure_optimizers(self):
        return self.optimizer(self.parameters())

    def train_dataloader(self):
        return DataLoader(range(1000), batch_size=1)  # only the length matters


SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.01)


class Case(NamedTuple):
    name: str  # key of the digests
    strategy: Callable[[], "str | Strategy"]
    ranks: int = 2
    model: Callable[[], Model] = partial(Model, SGD)
    like: str = ""  # name of a training that must end with the same bits
    saved_at: Optional[int] = None  # step of a checkpoint from which a second Trainer resumes
    callbacks: Callable[[], list[Callback]] = list
    arguments: Mapping[str, Any] = {}


def of(compressor, schedule="layerwise", wire="float32"):
    chosen = {} if compressor in WITHOUT_DENSITY else {"density": 0.1, "warmup_steps": BATCHES}
    return partial(SparseDDPStrategy, compressor=compressor, schedule=schedule, wire=wire, **chosen)


def cases():
    for compressor in COMPRESSORS:
        yield from combined(compressor)
    for compressor in CLOSELY:
        yield from situations(compressor)
    for schedule in SCHEDULES:
        like = "" if schedule == "layerwise" else "lags, one layer whole, layerwise"
        yield Case(f"lags, one layer whole, {schedule}", partial(partly_whole, schedule), like=like)
    yield from rounds()
    long = {"max_steps": LONG}
    yield Case("lags, layerwise, 120 steps", of("lags"), arguments=long)
    yield Case("lags, merged, 120 steps", of("lags", "merged"), arguments=long, like="lags, layerwise, 120 steps")


def combined(compressor):
    buckets_decide = compressor == "omgs"
    for wire in WIRES:
        for schedule in SCHEDULES:
            if buckets_decide and schedule == "merged":
                continue
            like = "" if buckets_decide or schedule == "layerwise" else f"{compressor}, layerwise, {wire}"
            yield Case(f"{compressor}, {schedule}, {wire}", of(compressor, schedule, wire), like=like)
    if not buckets_decide:
        yield Case(f"sparse_{compressor}", partial(str, f"sparse_{compressor}"))


def situations(compressor):
    start, whole = partial(Case, strategy=of(compressor)), f"{compressor}, layerwise, float32"
    name = f"sparse_{compressor}_find_unused_parameters_true"
    adam, again = partial(Model, ADAMW), f"{compressor}, AdamW"
    twice = {"accumulate_grad_batches": 2}
    yield start(f"{compressor}, 3 ranks", ranks=3)
    yield start(f"{compressor}, resumed", saved_at=10, like=whole)
    yield start(again, model=adam)
    yield start(f"{again}, resumed", model=adam, saved_at=15, like=again)  # updates are residuals by then
    yield start(f"{compressor}, accumulated", arguments=twice)
    yield Case(name, partial(str, name), model=partial(Model, SGD, leaves_out=True))
    if compressor not in CARRYING_MOMENTUM:
        yield start(f"{compressor}, MomentumCorrection", callbacks=correction)


def rounds():
    outer = LocalSteps(3, 0.7, 0.9, nesterov=True)
    ways = {
        "all": {"compressor": "dense", "local_steps": outer},
        "4 bits": {"compressor": "dense", "wire": "4bit", "local_steps": outer},
        "a part": {"density": 0.1, "wire": "bfloat16", "local_steps": LocalSteps(3, residual_decay=0.9)},
    }
    for way, arguments in ways.items():
        start = partial(Case, strategy=partial(SparseDDPStrategy, **arguments), model=partial(Model, ADAMW))
        yield start(f"rounds, {way}")
        yield start(f"rounds, {way}, 3 ranks", ranks=3)
        yield start(f"rounds, {way}, resumed", saved_at=10, like=f"rounds, {way}")


def partly_whole(schedule):
    return SparseDDPStrategy(LAGS(densities={"network.2.weight": 1.0}), density=0.1, schedule=schedule)


def correction():
    return [MomentumCorrection()]


class Saving(Callback):
    def __init__(self, step, path):
        self.step = step
        self.path = path

    def on_train_batch_end(self, trainer, *batch):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def fit(case, callbacks, path=None):
    model = case.model()
    arguments = {"max_steps": STEPS, "limit_train_batches": BATCHES, **case.arguments}
    trainer = Trainer(
        strategy=case.strategy(),
        accelerator="cpu",
        devices=case.ranks,
        max_epochs=-1,
        callbacks=[*case.callbacks(), *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )
    trainer.fit(model, ckpt_path=path)
    return trainer, model


def train(rank, case, folder):
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0")
    if case.saved_at is None:
        trainer, model = fit(case, [])
    else:
        path = str(folder / "middle" / "saved.ckpt")
        fit(case, [Saving(case.saved_at, path)])
        trainer, model = fit(case, [], path)
    end = folder / "end"
    trainer.save_checkpoint(end / "saved.ckpt")
    parameters = sha256()
    for parameter in model.parameters():
        parameters.update(content(parameter))
    digests = [""] * case.ranks
    dist.all_gather_object(digests, parameters.hexdigest())  # returns after every rank has written its part
    return {"parameters": digests, **kept(end)}


def kept(folder):
    whole = folder / "saved.ckpt"
    beside = [torch.load(path, weights_only=True) for path in folder.rglob("*") if path.is_file() and path != whole]
    optimizers = torch.load(whole, weights_only=True)["optimizer_states"]
    return {"optimizer": sorted(map(digest, tensors(optimizers))), "kept": sorted(map(digest, tensors(beside)))}


def tensors(state):
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, (dict, list, tuple)):
        for each in state.values() if isinstance(state, dict) else state:
            yield from tensors(each)


def digest(tensor):
    return f"{tensor.dtype} x {tensor.numel()}: {sha256(content(tensor)).hexdigest()[:16]}"


def content(tensor):
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def be_rank(rank, ranks, names, folder):
    """Train all cases in this process. Rank 0 writes the digests into the folder."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # other versions may warn differently
    for logger in ("pytorch_lightning", "lightning", "lightning_fabric", "lightning_sparse"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    dist.init_process_group("gloo", f"file://{folder}/store", timeout=PATIENCE, rank=rank, world_size=ranks)
    found = {}
    for case in cases():
        if case.name in names:
            try:
                found[case.name] = train(rank, case, Path(folder) / str(len(found)))
            except Exception as error:
                raise RuntimeError(f"this training failed: {case.name}") from error
    if rank == 0:
        Path(folder, "digests.json").write_text(json.dumps(found))


def recorded(chosen):
    found = {}
    for ranks in sorted({case.ranks for case in chosen}):
        names, start = [case.name for case in chosen if case.ranks == ranks], time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(be_rank, (ranks, names, folder), nprocs=ranks)
            found.update(json.loads(Path(folder, "digests.json").read_text()))
        print(f"{len(names)} trainings on {ranks} ranks took {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return found


def changes(old, new):
    return [f"other {part}" for part in ("parameters", "optimizer", "kept") if old[part] != new[part]]


def compare(old, new):
    found = [
        f"{key}: {value}, but {new['made_with'][key]}"
        for key, value in old["made_with"].items()
        if value != new["made_with"][key]
    ]
    before, after = old["digests"], new["digests"]
    found += [f"{name}: only in one of the two" for name in sorted(before.keys() ^ after.keys())]
    for name in sorted(before.keys() & after.keys()):
        found += [f"{name}: {change}" for change in changes(before[name], after[name])]
    return found


def broken_promises(chosen, found):
    pairs = [case for case in chosen if case.like in found]
    return [
        f"{case.name}, next to {case.like}: {line}"
        for case in pairs
        for line in changes(found[case.like], found[case.name])
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--output", type=Path, help="train, and write the digests into this file")
    action.add_argument("--compare", type=Path, nargs=2, metavar=("OLD", "NEW"), help="compare two such files")
    parser.add_argument("--only", default="", help="train only what has this in its name, such as topk or resumed")
    arguments = parser.parse_args()
    if arguments.compare:
        old, new = (json.loads(path.read_text()) for path in arguments.compare)
        found = compare(old, new)
        print("\n".join(found) or f"{len(old['digests'])} trainings ended with the same bits")
        return bool(found)
    chosen = [case for case in cases() if arguments.only in case.name]
    if not chosen:
        parser.error(f"--only {arguments.only!r} is in no training's name, such as 'topk, layerwise, float32'")
    print(f"lightning_sparse is that of {Path(lightning_sparse.__file__).parent}", file=sys.stderr)
    digests = recorded(chosen)
    made_with = {
        "torch": torch.__version__,
        "pytorch_lightning": pytorch_lightning.__version__,
        "machine": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    }
    arguments.output.write_text(json.dumps({"made_with": made_with, "digests": digests}, indent=1) + "\n")
    found = broken_promises(chosen, digests)
    print("\n".join(found) or f"{len(digests)} trainings are in {arguments.output}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
