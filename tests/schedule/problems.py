import csv
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

Cost = Callable[[int], float]


class Problem(NamedTuple):
    """Arguments of ``plan_buckets``, in order."""

    sizes: list[int]
    backward_seconds: list[float]
    select_cost: Cost
    exchange_cost: Cost


# Seconds, and seconds per gathered byte, of an all-gather over 1 Gbit/s Ethernet, by number of workers: the table
# GbE_multi_p_ab in utils.py of github.com/HKBU-HPML/OMGS-SGD, commit ac10b98, the code of OMGS-SGD (INFOCOM 2020).
ALL_GATHER = {4: (2.7e-3, 1.3e-8), 8: (4.0e-3, 1.5e-8), 16: (1.1e-2, 1.7e-8)}
TOP_K = 2.18896957e-10  # seconds per n log2 n on an Nvidia P102-100; same file, topk_perf_model
DENSITY = 0.001


def published(workers):
    """ResNet-50 as in the OMGS-SGD paper: an all-gather of values and another of indices per bucket.

    ``resnet50_backprop.csv`` has the tensors of ResNet-50 in the order of backpropagation. The 0.12 seconds of backward
    on that card (scripts/infocom20/plot_loss2.py in github.com/trl730109/DreamDDP) are divided by operations.
    """
    table = (Path(__file__).parent / "resnet50_backprop.csv").read_text()
    rows = list(csv.DictReader(table.splitlines()))
    startup, per_byte = ALL_GATHER[workers]
    return Problem(
        [int(row["elements"]) for row in rows],
        [float(row["backward_seconds"]) for row in rows],
        lambda elements: TOP_K * elements * math.log2(elements) if elements > 1 else 0.0,
        lambda elements: 2 * (startup + per_byte * 4 * workers * DENSITY * elements),
    )


def slow_total(buckets, problem, selection="worker"):
    """Return the arrival of the last message, event by event. With ``"backward"`` by the paper's recurrences."""
    backward = channel = 0.0
    for bucket in buckets:
        elements = sum(problem.sizes[position] for position in bucket)
        select_seconds, exchange_seconds = problem.select_cost(elements), problem.exchange_cost(elements)
        for position in bucket:
            backward += problem.backward_seconds[position]
        if selection == "backward":
            backward += select_seconds
            channel = max(channel, backward) + exchange_seconds
        else:
            channel = max(channel, backward) + select_seconds + exchange_seconds
    return channel


def random_problem(seed, tensors):
    """Draw a problem with backward, selection and exchange times within a factor of tens, and costs of every shape."""
    rng = random.Random(seed)
    sizes = [rng.choice((0, 1, int(10 ** rng.uniform(2, 6.7)))) for _ in range(tensors)]
    if rng.random() < 0.5:
        sizes = [int(10 ** rng.uniform(2, 6.7)) for _ in range(tensors)]
    seconds = [rng.choice((0.0, 1.0, 1.0)) * rng.expovariate(1 / rng.choice((0.1, 1.0))) for _ in range(tensors)]
    backward, elements = sum(seconds) or 1.0, sum(sizes) or 1
    parts = rng.choice((2, 5, 20, 80))
    select_cost = _cost(rng, elements, backward * 10 ** rng.uniform(-1.5, 0.7), parts)
    exchange_cost = _cost(rng, elements, backward * 10 ** rng.uniform(-1, 1), parts)
    return Problem(sizes, seconds, select_cost, exchange_cost)


def _cost(rng, elements, seconds, parts):
    """Return a cost of about ``seconds`` for ``elements``, with a share for start-up."""
    startup = rng.choice((0.0, 0.3, 1.0)) * seconds / parts
    edge = rng.uniform(0.01, 1) * elements
    shapes = [
        lambda size: startup + seconds * size / elements,
        lambda size: startup + seconds * size * math.log2(size + 1) / elements / math.log2(elements + 1),
        lambda size: startup + seconds * (size / elements) ** 2,
        lambda size: startup + seconds * math.sqrt(size / elements),
        lambda size: startup + seconds * size / elements + (seconds / parts if size > edge else 0.0),
        lambda size: startup + seconds * size / elements * (2.0 if size < edge else 0.5),
        lambda size: startup if size < edge else startup + seconds * math.sin(size) ** 2 / parts,
    ]
    return rng.choice(shapes)
