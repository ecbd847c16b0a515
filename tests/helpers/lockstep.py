"""The phases of a wire format of several ranks, in one process and in step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sparse.engine.wire.base import Arrival, Payload, Phases


def run_phases(phases: Sequence[Phases]) -> tuple[list[Arrival], list[list[Payload]]]:
    """Do what collectives do; return what arrived on each rank, and what all ranks handed in, by phase."""
    received: Sequence[Tensor | None] = [None] * len(phases)
    handed_in: list[list[Payload]] = []
    while True:
        payloads: list[Payload] = []
        arrivals: list[Arrival] = []
        for phase, tensor in zip(phases, received):
            try:
                payload = phase.send(tensor)  # type: ignore[arg-type]  # a generator starts with None
            except StopIteration as stop:
                arrivals.append(stop.value)
            else:
                payloads.append(payload._replace(tensor=payload.tensor.clone()))
        assert len(arrivals) in (0, len(phases)), "ranks disagree on the number of phases"
        if arrivals:
            return arrivals, handed_in
        assert len({(each.collective, each.tensor.shape, each.tensor.dtype) for each in payloads}) == 1
        handed_in.append(payloads)
        rows = torch.stack([each.tensor for each in payloads])
        gathers = payloads[0].collective == "all_gather"
        received = [rows.clone() if gathers else rows[:, rank].contiguous() for rank in range(len(phases))]
