import pytest
import torch
from lightning_fabric import Fabric
from pytorch_lightning import Trainer

import lightning_sparse
from lightning_sparse import (
    AdamCorrection,
    Compressor,
    LocalSteps,
    SparseDDPStrategy,
    SparseFabricStrategy,
    callbacks,
    compressors,
    sparsify_gradients,
)
from lightning_sparse.cli import main
from lightning_sparse.removed import REMOVED

MODEL = torch.nn.Linear(2, 2)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)
# One entry point of each kind, called with a placeholder for a removed name.
ENTRIES = {
    "argument of the strategy": lambda: SparseDDPStrategy(colour=1),
    "argument of Fabric's strategy": lambda: SparseFabricStrategy(colour=1),
    "argument of sparsify_gradients": lambda: sparsify_gradients(MODEL, OPTIMIZER, colour=1),
    "compressor": lambda: SparseDDPStrategy(compressor="colour"),
    "schedule": lambda: SparseDDPStrategy(schedule="colour"),
    "wire": lambda: SparseDDPStrategy(wire="colour"),
    "argument of a class": lambda: LocalSteps(colour=1),
    "attribute": lambda: lightning_sparse.colour,
    "callback": lambda: callbacks.colour,
    "command": lambda: main(["colour"]),
}
GONE = {
    "plan": (lambda: main(["plan", "--r=3"]), "estimate"),
    "AssumptionMonitor": (lambda: callbacks.AssumptionMonitor, "check_assumption"),
    "SparseFabricModelParallelStrategy": (lambda: lightning_sparse.SparseFabricModelParallelStrategy, "sparse_hsdp"),
    "sparse_hsdp": (lambda: Fabric(strategy="sparse_hsdp", accelerator="cpu"), "sparse_hsdp"),
    "Owners": (lambda: lightning_sparse.Owners, "exchange='owners'"),
    "Warmup": (lambda: callbacks.Warmup, "use warmup_steps"),
    "CriticalRegime": (lambda: callbacks.CriticalRegime, "ErrorBudget"),
    "synchronous_steps": (lambda: LocalSteps(4, synchronous_steps=1), "synchronous_steps=1.*strategy='ddp'"),
    "overlap_steps": (lambda: LocalSteps(4, overlap_steps=1), "overlap_steps=1.*leave it out"),
    "automatic rounds": (
        lambda: SparseDDPStrategy(local_steps="auto"),
        "local_steps='auto'.*lightning-sparse estimate",
    ),
    "MuLoCo's name": (lambda: Trainer(strategy="sparse_muloco"), "sparse_muloco.*outer_momentum=0.6"),
    "sparsify": (lambda: lightning_sparse.sparsify, "use sparsify_gradients instead"),
    "dense_steps": (lambda: AdamCorrection(dense_steps=3), "dense_steps=3.*use warmup_steps instead"),
    "adapts_density": (lambda: compressors.LAGS(adapts_density=True), "use adaptive_density instead"),
    "selects_across_group": (lambda: type("Own", (Compressor,), {"selects_across_group": True}), "across_bucket"),
    "pictures": (lambda: callbacks.OverlapTimeline(pictures=True), "pictures=True.*perfetto"),
    "Rule": (lambda: callbacks.Rule, "use DensityRule instead"),
    "islands": (lambda: SparseDDPStrategy(levels=2, local_steps=5), "levels=2 with local_steps.*sparse_hsdp"),
}


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_every_entry_point_refuses_what_is_gone_with_the_alternative(entry, monkeypatch):
    monkeypatch.setitem(REMOVED, "colour", "use density instead")
    monkeypatch.setitem(REMOVED, "LocalSteps.colour", "use density instead")
    with pytest.raises((ValueError, ImportError, SystemExit), match=r"colour.*no longer has: use density instead"):
        entry()


@pytest.mark.parametrize(("entry", "answer"), GONE.values(), ids=GONE)
def test_what_users_may_have_written_is_refused(entry, answer):
    with pytest.raises((ValueError, ImportError, SystemExit), match=answer):
        entry()
