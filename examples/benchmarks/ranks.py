"""Count what a rank receives, and holds, as the number of ranks grows: no network and no other rank is needed.

Bytes are those that the engine announces, which ``tests/engine/wire/test_transfers.py`` holds it to. Memory is that of
a process that makes steps with a pipeline whose collectives answer as so many ranks would::

    python ranks.py
    python ranks.py --picture ranks.png
    python ranks.py --memory

As root, on a shaped network of 4 and of 16 hosts, what arrives at a host's link while a model of 4 million parameters
makes steps::

    python ranks.py --links

and the same where a host is a node of several ranks, which exchange among themselves over its loopback::

    python ranks.py --nodes
"""

import argparse
import math
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist
from echo import echo_pipeline, transfers_of
from network import ShapedNetwork
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.compressors import element_count
from lightning_sparse.compressors.selection import SelectionSize
from lightning_sparse.engine import Engine
from lightning_sparse.engine.settings import Settings
from lightning_sparse.engine.step.topology import LocalGradient
from lightning_sparse.engine.wire import EXCHANGES, build_wires
from lightning_sparse.schedule.costs import sent_bytes

RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
DENSITY = 0.01
_NODE_RANKS = 8
_LEVELS = f"auto, from other nodes of {_NODE_RANKS} ranks"
_HOSTS = (4, 16)
_NODES = ((2, 2), (2, 4), (4, 2), (4, 4))  # and ranks on each
_WARM_UP, _STEPS = 3, 5
# GPT-2 with 124 million parameters: embeddings, and twelve blocks.
_BLOCK = (768, 768, 2304 * 768, 2304, 768 * 768, 768, 768, 768, 3072 * 768, 3072, 3072 * 768, 768)
SIZES = (50257 * 768, 1024 * 768, *_BLOCK * 12, 768, 768)


def received(exchange: str, ranks: int, sizes: Sequence[int] = SIZES) -> float:
    """Return the bytes that a rank receives in a step; ``exchange`` may also be ``ddp``, ``ddp, bf16``, or two levels.

    With two levels it is what comes from other nodes; NaN where there is one.
    """
    if exchange == _LEVELS:
        shares_of = [-(-size // _NODE_RANKS) for size in sizes]
        return received("auto", ranks // _NODE_RANKS, shares_of) if ranks > _NODE_RANKS else math.nan
    if exchange.startswith("ddp"):
        return sent_bytes("all_reduce", (2 if "bf16" in exchange else 4) * sum(sizes), ranks)
    wires = build_wires("gather", "reduce", torch.float32, 0, ranks, exchange)
    selected = [SelectionSize(size, element_count(size, DENSITY)) for size in sizes]
    transfers = transfers_of(wires, selected, flags=len(sizes))
    return sum(sent_bytes(*transfer, ranks) for transfer in transfers)  # as many arrive


def table() -> Iterator[str]:
    """Yield a Markdown table of megabytes."""
    rows = ("ddp", "ddp, bf16", *EXCHANGES, _LEVELS)
    yield f"| megabytes that a rank receives in a step | {' | '.join(map(str, RANKS))} |"
    yield "| --- |" + " ---: |" * len(RANKS)
    for row in rows:
        yield (
            f"| {row} | " + " | ".join(f"{received(row, ranks) / 1e6:.3g}" for ranks in RANKS).replace("nan", "") + " |"
        )


def draw(path: Path) -> None:
    """Draw the same."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    styles = {"ddp": ":", "ddp, bf16": "--", "gather": "-", "owners": "-", "auto": "-", _LEVELS: "-."}
    for row, style in styles.items():
        width = 4 if row == "auto" else 1.8
        axes.plot(RANKS, [received(row, ranks) / 1e6 for ranks in RANKS], style, label=row, linewidth=width, alpha=0.75)
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="megabytes that a rank receives in a step")
    axes.set_xticks(RANKS, map(str, RANKS))
    axes.set_title(f"124 million parameters, density {DENSITY:g}, fp32 values")
    axes.legend(loc="upper left")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def memory(exchange: str, ranks: int) -> str:
    """Make steps in this process; return bytes for each element, at the peak and between steps, beside gradients."""
    torch.set_num_threads(1)
    _steps([1 << 17], exchange, ranks)  # what the libraries allocate when they are first called is not the engine's
    sizes = [1 << 20] * 48
    peak, held = _steps(sizes, exchange, ranks)
    return f"{peak / sum(sizes):.2f}, {held / sum(sizes):.2f}"


def _steps(sizes: Sequence[int], exchange: str, ranks: int) -> tuple[int, int]:
    """Make steps; return the bytes that are resident at the peak and afterwards, more than before."""
    settings = Settings.of("topk", DENSITY, warmup_steps=0, exchange=exchange)
    pipeline = echo_pipeline(settings, sizes, ranks, torch.device("cpu"))
    gradients = [torch.randn(size) for size in sizes]
    before = _resident()
    for _ in range(3):
        for gradient in gradients:
            gradient.normal_()
        groups = [[LocalGradient(str(place), gradient, None)] for place, gradient in enumerate(gradients)]
        pipeline.commit([part for group in groups for part in pipeline.exchange(group)])
        pipeline.recorder.end_exchange()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return peak - before, _resident() - before


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def memory_table() -> Iterator[str]:
    """Yield a Markdown table of bytes for each element; each cell is measured in a process of its own."""
    yield "| bytes an element beside gradients: at the peak, between steps | 4 ranks | 64 | 1024 |"
    yield "| --- | ---: | ---: | ---: |"
    # What is freed goes back to the system at once, so that what is resident is what is held.
    given = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    for exchange in ("gather", "owners"):
        cells = []
        for ranks in (4, 64, 1024):
            command = [sys.executable, __file__, "--one", exchange, str(ranks)]
            if exchange == "gather" and ranks == 1024:
                cells.append("not tried")  # more than most machines have
            else:
                cells.append(
                    subprocess.run(command, check=True, capture_output=True, text=True, env=given).stdout.strip()
                )
        yield f"| {exchange} | {' | '.join(cells)} |"


def links() -> Iterator[str]:
    """Yield a Markdown table of megabytes that arrive at a link in a step."""
    rows = ("gather", "owners", "owners:1", "auto")
    yield f"| megabytes that arrive at a link in a step | {' | '.join(map(str, _HOSTS))} |"
    yield "| --- |" + " ---: |" * len(_HOSTS)
    for exchange in rows:
        cells = [f"{_arriving(exchange, hosts) / 1e6:.3f}" for hosts in _HOSTS]
        yield f"| {exchange} | {' | '.join(cells)} |"


def nodes() -> Iterator[str]:
    """Yield a Markdown table of megabytes that arrive at the link of a node of several ranks in a step."""
    yield "| nodes x ranks on each | one level | two levels | quotient, of 1 / ranks on a node |"
    yield "| --- | ---: | ---: | ---: |"
    for hosts, local_world_size in _NODES:
        one, two = (_arriving("gather", hosts, local_world_size, levels) for levels in (1, 2))
        quotient = two / one * local_world_size
        yield f"| {hosts} x {local_world_size} | {one / 1e6:.3f} | {two / 1e6:.3f} | {quotient:.2f} |"


def _arriving(exchange: str, hosts: int, local_world_size: int = 1, levels: int = 1) -> float:
    ranks = hosts * local_world_size
    with ShapedNetwork(hosts=hosts, rate="1gbit", delay="0", name="lsranks") as network:
        shared = {"MASTER_ADDR": network.address(0), "MASTER_PORT": "29500", "WORLD_SIZE": str(ranks)}
        processes = [
            network.start(
                rank // local_world_size,
                [sys.executable, __file__, "--worker", exchange, str(local_world_size if levels == 2 else 1)],
                {**os.environ, **shared, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "eth0"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        said = [process.communicate()[0] for process in processes]
    return fmean(map(float, said))


def _work(exchange: str, local_world_size: int) -> float:
    """Make steps as one rank, of so many that average first; return the bytes that arrive at this host in one."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))
    ddp = DistributedDataParallel(model)
    settings = Settings.of("topk", DENSITY, warmup_steps=0, optimizer_correction=None, exchange=exchange)
    engine = Engine(ddp, settings, local_world_size=local_world_size)
    counter, before = Path("/sys/class/net/eth0/statistics/rx_bytes"), 0
    for step in range(_WARM_UP + _STEPS):
        if step == _WARM_UP:
            dist.barrier()
            before = int(counter.read_text())
        ddp.zero_grad()
        ddp(torch.randn(8, 1024)).square().mean().backward()
        engine.worker.drain()
    dist.barrier()
    arrived = int(counter.read_text()) - before
    engine.close()
    dist.destroy_process_group()
    return arrived / _STEPS


def main() -> None:
    """Print a table, or draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the bytes")
    parser.add_argument("--memory", action="store_true", help="measure memory")
    parser.add_argument("--links", action="store_true", help="count at the links of a shaped network; root")
    parser.add_argument("--nodes", action="store_true", help="the same of nodes of several ranks; root")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(memory(options.one[0], int(options.one[1])))
    elif options.worker:
        print(_work(options.worker[0], int(options.worker[1])))
    elif options.picture is not None:
        draw(options.picture)
    else:
        tables = {nodes: options.nodes, links: options.links, memory_table: options.memory}
        chosen = next((rows for rows, is_wanted in tables.items() if is_wanted), table)
        for line in chosen():
            print(line, flush=True)


if __name__ == "__main__":
    main()
