"""The job that this process belongs to, if it does, and the network between its processes."""

import os
from typing import Optional

import torch
import torch.distributed as dist

from lightning_sparse._lightning import ClusterEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning_sparse.cli.plan.measured import measure_network
from lightning_sparse.engine.collectives import Collectives
from lightning_sparse.schedule.cost.network import Network


def present_job() -> Optional[ClusterEnvironment]:
    """Return the job of torchrun's or SLURM's that this process belongs to; ``None`` outside of any."""
    if TorchElasticEnvironment.detect():
        return TorchElasticEnvironment()
    if "SLURM_NTASKS" in os.environ and SLURMEnvironment.detect():
        return SLURMEnvironment()
    return None


def network_of(job: ClusterEnvironment) -> Network:
    """Measure the network between all processes of a job; all of them must call.

    Raises:
        ValueError: if it has one process only.
        RuntimeError: if the network is too busy to be measured.
    """
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", job.local_rank()) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if has_gpu else "gloo",
        init_method=f"tcp://{job.main_address}:{job.main_port}",
        rank=job.global_rank(),
        world_size=job.world_size(),
    )
    try:
        collectives = Collectives(list(range(job.world_size())), device)
        network = measure_network(collectives)
        collectives.close()
    finally:
        dist.destroy_process_group()
    return network
