"""Marks with the cases that every law is tried with."""

import pytest

from lightning_sparse.testing.subjects import SCHEDULE_NAMES, WIRES

each_schedule = pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
each_wire = pytest.mark.parametrize("wire", WIRES)
each_world = pytest.mark.parametrize("ranks", [2, 3])
