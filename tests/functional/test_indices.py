"""Index codecs: exact, and as narrow as they say."""

import pytest
import torch

from lightning_sparse.functional.elements import _CODECS, index_codec
from tests.helpers.devices import devices


@devices
@pytest.mark.parametrize("codec", _CODECS, ids=lambda codec: f"blocks of {1 << codec.block_bits}")
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 65_535, 65_536, 65_537, 1_000_003])
@pytest.mark.parametrize("density", [1e-9, 0.001, 0.1, 1.0])
def test_positions_survive(codec, numel: int, density: float, device: str) -> None:
    count = max(1, round(density * numel))
    ranks = [
        torch.randperm(numel, generator=torch.Generator().manual_seed(seed))[:count].sort().values.to(device)
        for seed in (1, 2)
    ]
    wires = torch.stack([codec.encode(indices, numel) for indices in ranks])
    assert wires.dtype == torch.uint8
    assert wires.shape == (2, codec.nbytes(numel, count))
    assert torch.equal(codec.decode(wires, numel, count), torch.stack(ranks))


@devices
def test_the_borders_of_blocks_survive(device: str) -> None:
    borders = [0, 255, 256, 32_767, 32_768, 65_535, 65_536, 131_071, 131_072, 199_999]
    indices = torch.tensor(borders, device=device)
    for codec in _CODECS:
        assert torch.equal(codec.decode(codec.encode(indices, 200_000)[None], 200_000, 10)[0], indices)


@pytest.mark.parametrize(
    ("density", "bytes_each"), [(0.0001, 2.7), (0.001, 2.07), (0.01, 1.8), (0.1, 1.1), (1.0, 1.01)]
)
def test_the_chosen_codec_is_narrow(density: float, bytes_each: float) -> None:
    numel = 10_000_000
    count = round(density * numel)
    assert index_codec(numel, count).nbytes(numel, count) / count <= bytes_each
