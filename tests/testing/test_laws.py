"""Our own compressors keep the laws of the conformance kit, which gets them by their being registered."""

import torch

from lightning_sparse.testing.laws.edges import (
    test_a_model_that_is_one_edge,
    test_edges,
    test_two_of_three_ranks_are_fewer_than_the_elements,
)
from lightning_sparse.testing.laws.finiteness import test_a_gradient_that_is_not_finite_moves_nothing_that_is_kept
from lightning_sparse.testing.laws.marks import each_schedule, each_world
from lightning_sparse.testing.laws.mass import (
    balance,
    test_a_parameter_is_written_where_any_rank_used_it,
    test_mass_is_conserved,
    test_the_residual_of_an_unused_parameter_is_neither_spent_nor_lost,
)
from lightning_sparse.testing.laws.replicas import (
    test_density_one_equals_ddp,
    test_replicas_are_identical_and_no_schedule_changes_a_bit,
    test_the_observer_changes_nothing,
)
from lightning_sparse.testing.pool import Pool
from tests.helpers.devices import DEVICE, moved

__all__ = [
    "test_a_gradient_that_is_not_finite_moves_nothing_that_is_kept",
    "test_a_model_that_is_one_edge",
    "test_a_parameter_is_written_where_any_rank_used_it",
    "test_density_one_equals_ddp",
    "test_edges",
    "test_mass_is_conserved",
    "test_replicas_are_identical_and_no_schedule_changes_a_bit",
    "test_the_observer_changes_nothing",
    "test_the_residual_of_an_unused_parameter_is_neither_spent_nor_lost",
    "test_two_of_three_ranks_are_fewer_than_the_elements",
]


@each_world
@each_schedule
def test_top_k_on_a_lossless_wire_loses_not_one_bit(pools: dict[int, Pool], ranks: int, schedule: str) -> None:
    books = pools[ranks].run(balance, {"compressor": "topk", "density": 0.05, "schedule": schedule}, 4)
    # Divided where the exchange divides: a GPU multiplies by the inverse, which may differ in the last bit.
    for entries in zip(*moved(books, DEVICE)):
        for name in entries[0]["gradient"]:
            total = torch.zeros_like(entries[0]["gradient"][name])
            for entry in entries:
                accumulated = entry["before"][name] + entry["gradient"][name]
                was_sent = entry["after"][name] != accumulated
                assert not entry["after"][name][was_sent].any()
                total += torch.where(was_sent, accumulated, 0.0) / ranks
            assert torch.equal(total, entries[0]["applied"][name])
