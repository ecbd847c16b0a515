"""The rows of the table: what people do with Lightning, and what shows that it was done."""

from typing import Any

import pytest
import torch
from pytorch_lightning import Trainer

from tests.compatibility.modules import Plain
from tests.compatibility.running import Feature, Outcome

CLIP = 0.01


def check_windows(first: Outcome, second: Outcome) -> None:
    """Ask for a step after four batches and after the other two, and for no exchange in between."""
    assert [batch.step for batch in first.batches] == [0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 4]
    for before, batch in zip(first.batches, first.batches[1:]):
        if batch.stats and not batch.is_plain and not before.is_plain:
            has_sent = batch.stats["total_wire_bytes"] > before.stats.get("total_wire_bytes", 0)
            assert has_sent == (batch.step > before.step)


def check_norms(first: Outcome, second: Outcome) -> None:
    """Ask for gradients that were longer before than after clipping."""
    assert max(update.norm for update in first.updates) > CLIP
    assert max(batch.norm for batch in first.batches) == pytest.approx(CLIP, rel=1e-3)


def fit_noting_types(trainer: Trainer, module: Plain) -> dict[str, Any]:
    """Fit, and note in which types the network computes."""
    types = set()
    module.network[0].register_forward_hook(lambda layer, given, output: types.add(output.dtype))
    trainer.fit(module)
    return {"types": types}


def check_types(first: Outcome, second: Outcome) -> None:
    """Ask for a network that computes in bfloat16, and parameters that do not."""
    assert first.notes["types"] == {torch.bfloat16}
    assert {parameter.dtype for parameter in first.after.values()} == {torch.float32}


ROWS = (
    Feature(
        "`accumulate_grad_batches=4`, the last window short",
        "a step and an exchange after 4 batches and after the last 2, none in between",
        check_windows,
        lambda folder: {"accumulate_grad_batches": 4, "limit_train_batches": 6, "limit_val_batches": 0, "max_epochs": 2},
    ),
    Feature(
        "`gradient_clip_val`",
        "gradients that were longer reach the optimizer with this norm",
        check_norms,
        lambda folder: {"gradient_clip_val": CLIP},
    ),
    Feature(
        '`precision="bf16-mixed"`',
        "the network computes in bfloat16, parameters stay float32",
        check_types,
        lambda folder: {"precision": "bf16-mixed"},
        use=fit_noting_types,
    ),
)
