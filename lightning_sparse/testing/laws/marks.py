"""Marks with the cases that laws are tried with: each value of everything, and pairs, but not every combination."""

import pytest

from lightning_sparse.testing.subjects import SCHEDULE_NAMES, WIRES

each_schedule = pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
each_wire = pytest.mark.parametrize("wire", WIRES)
# Every schedule, and every wire.
each_way = pytest.mark.parametrize(
    ("schedule", "wire"),
    [
        ("layerwise", "bfloat16"),
        ("merged", "float32"),
        ("single", "float16"),
        ("layerwise", "2bit"),
        ("single", "4bit"),
    ],
)
# Every pair of a schedule, a wire, and a number of ranks.
each_way_and_world = pytest.mark.parametrize(
    ("schedule", "wire", "ranks"),
    [
        (schedule, wire, 3 - (row + column) % 2)
        for row, schedule in enumerate(SCHEDULE_NAMES)
        for column, wire in enumerate(WIRES)
    ],
)
