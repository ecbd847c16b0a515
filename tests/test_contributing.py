"""The compressor that CONTRIBUTING shows works as it stands there."""

import re
from pathlib import Path

import torch

from lightning_sparse.testing.pool import Pool
from tests.helpers.trainers import run_fit

TEXT = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text()


def fit_as_shown(rank: int, code: str) -> tuple[float, float]:
    """Run the code, and fit with its strategy; return the density and a sum over the weights."""
    shown: dict[str, object] = {}
    exec(code, shown)
    trainer = run_fit(rank, shown["strategy"])
    parameters = trainer.lightning_module.parameters()
    return trainer.strategy.compression_stats()["density"], float(sum(tensor.detach().sum() for tensor in parameters))


def test_the_compressor_in_contributing_trains(pair: Pool) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (density, first), (_, second) = pair.run(fit_as_shown, code)
    torch.testing.assert_close(density, 0.05, rtol=0.01, atol=0)
    assert first == second
