"""A job that shrinks and grows: three hosts under torchrun, of which one is killed and comes back."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
SAMPLES = 4000
EVERY = 10  # steps between two saves
only_long = pytest.mark.skipif(not os.environ.get("LIGHTNING_SPARSE_FAULTS"), reason="runs in `make faults`")


class Start(NamedTuple):
    """What ranks have seen from one start to its end."""

    ranks: int
    begins: int  # after this step
    seen: list[tuple[int, int, list[int]]]  # step, epoch, samples, of all ranks


def starts_in(folder):
    found: dict[str, list[tuple[int, int, list[int]]]] = {}
    for path in sorted(folder.glob("*-of-*-from-*.*")):
        lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        found.setdefault(path.name.rpartition(".")[0], []).extend(tuple(json.loads(line)) for line in lines)
    names = [(float(name.split("-")[0]), int(name.split("-")[2]), int(name.split("-")[4]), name) for name in found]
    return [Start(ranks, begins, found[name]) for _, ranks, begins, name in sorted(names)]


@contextlib.contextmanager
def host(number, port, folder):
    """Run what the page has for each host, on a part of this one."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2:3", "--nproc-per-node=1", "--max-restarts=3"]
    words += ["--rdzv-backend=c10d", "--rdzv-id=elastic", f"--rdzv-endpoint=localhost:{port}", "--monitor-interval=1"]
    words += [f"--rdzv-conf=is_host={number == 0}"]  # by its address each of them would be
    words += ["-m", "lightning_sparse", "fit", "--model=tests.strategy.counting.Counting"]
    words += [f"--model.samples={SAMPLES}", f"--model.folder={folder}", "--trainer.strategy=sparse_topk"]
    words += ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.max_epochs=1", "--trainer.logger=false"]
    words += ["--trainer.enable_progress_bar=false", f"--trainer.default_root_dir={folder}", "--ckpt_path=last"]
    words += ["--trainer.callbacks+=ModelCheckpoint", f"--trainer.callbacks.dirpath={folder}/checkpoints"]
    words += [f"--trainer.callbacks.every_n_train_steps={EVERY}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with (folder / f"host{number}.log").open("ab") as log:
        process = subprocess.Popen(words, env=environment, cwd=folder, stdout=log, stderr=log)
        try:
            yield process
        finally:
            kill(process)


def kill(process):
    """End a host as if its power went: an agent would end its processes first."""
    family, parents = {process.pid}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    while new := {child for child, parent in parents.items() if parent in family} - family:
        family |= new
    for number in family if process.poll() is None else ():
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    process.wait(timeout=30)


def wait_for_steps(folder, ranks, steps):
    """Wait until a start of so many ranks has come so far, and be told why where it does not."""
    for _ in range(4000):
        last = (starts_in(folder) or [Start(0, 0, [])])[-1]
        if last.ranks == ranks and max((step for step, *_ in last.seen), default=0) >= last.begins + steps:
            return
        time.sleep(0.25)
    raise TimeoutError("\n".join(path.read_text()[-3000:] for path in folder.glob("host*.log")))


@only_long
@pytest.mark.timeout(3000)
def test_a_host_that_dies_and_comes_back_costs_the_steps_since_the_last_save(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ExitStack() as hosts:
        first, _, third = [hosts.enter_context(host(number, port, tmp_path)) for number in range(3)]
        wait_for_steps(tmp_path, 3, 2 * EVERY + 3)
        kill(third)
        wait_for_steps(tmp_path, 2, EVERY + 3)
        hosts.enter_context(host(2, port, tmp_path))
        wait_for_steps(tmp_path, 3, 3)
        (tmp_path / "fast").touch()
        assert first.wait(timeout=1000) == 0, (tmp_path / "host0.log").read_text()[-3000:]
    starts = starts_in(tmp_path)
    print(
        "ranks, began after step, ended after step:", [(each.ranks, each.begins, each.seen[-1][0]) for each in starts]
    )
    assert [start.ranks for start in starts] == [3, 2, 3]
    counts, left = Counter[int](), SAMPLES
    for start, then in zip(starts, [*starts[1:], None]):
        last = ended = max(step for step, *_ in start.seen)
        if then is not None:
            last = then.begins
            assert ended - EVERY < last <= ended
        kept = [number for step, _, samples in start.seen if step <= last for number in samples]
        counts.update(kept)
        left -= len(kept) if then is not None else 0
    assert set(counts) == set(range(SAMPLES))
    assert sum(counts.values()) - SAMPLES == -left % 3  # which the sampler adds at the end, to be even
