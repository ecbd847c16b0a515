"""How much the exchange's thread has launched, and the device has not done, when it waits: counted without a GPU."""

from unittest import mock

import pytest
import torch

from lightning_sparse.engine.step.worker import LaunchQueue
from tests.helpers.examples import load

launches = load("launches")
DEPTH = 900  # kernels; with some 1000 CUDA has every thread that launches wait
GROUPS = 16
IN_EACH_STEP = [name for name, each in launches.SYSTEMS.items() if each.rounds is None and each.groups == 1]


def deepest(system):
    """Return the most kernels between two ends of waits, in steps of BERT-large that are all like the last.

    A part of the work begins when the one before the last has been done.
    """
    torch.manual_seed(0)
    counters, begun = [], []

    class Counted(launches.Launches):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            counters.append(self)

        def clear(self):
            super().clear()
            begun.clear()

    def begin_part(queue):
        begun.append(counters[-1].weighed.total())

    with (
        mock.patch.object(launches, "Launches", Counted),
        mock.patch.object(LaunchQueue, "begin_part", begin_part),
    ):
        total = launches.launches_of_a_step(system).weighed.total()
    in_a_row = [at + step * total for step in range(3) for at in begun]
    return max(later - former for former, later in zip(in_a_row, in_a_row[2:]))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("groups", [1, GROUPS])
@pytest.mark.parametrize("name", IN_EACH_STEP)
def test_the_queue_is_never_so_deep_that_launching_waits(name, groups):
    assert deepest(launches.SYSTEMS[name]._replace(groups=groups)) <= DEPTH
