"""QSGD: every element as a few bits, rounded at random so that it is right on average.

Alistarh, Grubic, Li, Tomioka and Vojnovic, "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
NeurIPS 2017 (arXiv 1610.02132).

Differs from the paper: codes have a fixed width, where the paper has a variable one (Elias coding), because ranks have
to know the size of a message beforehand and a GPU cannot write such a code in parallel; a bucket never spans two
parameters, so that it does not matter which of them travel together.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.base import Compressor, Gather
from lightning_sparse.compressors.feedback import ErrorFeedback
from lightning_sparse.compressors.layout import ModelLayout
from lightning_sparse.compressors.selection import Quantization, Selection, SelectionSize
from lightning_sparse.functional import NORMS, quantize, round_to


class QSGD(Compressor):
    """Send every element as one of ``2 * levels + 1`` multiples of its bucket's norm, at random and right on average.

    Nothing is kept: errors average out over steps and ranks instead. Quantization adds at most ``min(n / levels ** 2,
    sqrt(n) / levels)`` times the squared norm of a bucket of ``n`` elements to its variance. So more levels, or smaller
    buckets, need fewer steps, and send more.

    The random numbers are private: those of a parameter follow from the seed, the rank, the number of steps that have
    counted and the parameter's position in the model, whatever travels together and whoever draws from torch's own
    generators. The seed of the generator is the first 8 bytes, little end first, of the BLAKE2b hash of these four in
    decimal, with single spaces between them; see :func:`~lightning_sparse.functional.quantize` for what is drawn.

    Args:
        levels: levels for each sign, 1 to 127. An element takes ``ceil(log2(2 * levels + 1))`` bits: 2 for 1, 3 for 3,
            4 for 7, 8 for 127.
        bucket_size: elements that share a scale of 4 bytes, at least 1. A parameter with fewer has a bucket of its own.
        seed: any whole number.
        norm: ``"l2"``, the Euclidean norm, as in the paper's theorems; or ``"max"``, the largest magnitude, as in its
            experiments, which uses all levels and adds less variance, but makes fewer codes zero.

    Raises:
        ValueError: for an argument out of range.

    Example::

        >>> qsgd = QSGD(levels=5, bucket_size=2)
        >>> qsgd.begin(ModelLayout(("weight",), (3,), 0, 1, torch.device("cpu")))
        >>> (selection,) = qsgd.select(["weight"], [torch.tensor([3.0, -4.0, 9.0])], counts=[3])
        >>> selection.values, selection.quantization.scales
        (tensor([ 3, -4,  5], dtype=torch.int8), tensor([5., 9.]))
    """

    default_density: ClassVar[Optional[float]] = None
    wire_format: ClassVar[str] = "codes"
    feedback = ErrorFeedback(keeps_residual=False)

    def __init__(self, levels: int = 7, bucket_size: int = 512, seed: int = 0, norm: str = "l2") -> None:
        if not isinstance(levels, int) or not 1 <= levels <= 127:
            raise ValueError(
                f"levels={levels!r} must be a whole number from 1 to 127: the levels of one sign, zero not counted;"
                " 7 takes 4 bits an element, 127 takes 8"
            )
        if not isinstance(bucket_size, int) or bucket_size < 1:
            raise ValueError(
                f"bucket_size={bucket_size!r} must be a whole number of elements, at least 1; 512 adds 1/16 bit an"
                " element for its scale"
            )
        if not isinstance(seed, int):
            raise ValueError(f"seed={seed!r} must be a whole number; leave it out for 0")
        if norm not in NORMS:
            raise ValueError(f"norm={norm!r} must be one of {', '.join(map(repr, NORMS))}; 'l2' is the paper's")
        self._levels = levels
        self._bucket_size = bucket_size
        self._seed = seed
        self._norm = norm
        self._rank = 0
        self._positions: dict[str, int] = {}
        self._step = 0

    @override
    def begin(self, layout: ModelLayout) -> None:
        self._rank = layout.rank
        self._positions = layout.positions()
        self._step = 0

    @override
    def select(self, names: Sequence[str], accumulated: Sequence[Tensor], counts: Sequence[int]) -> list[Selection]:
        return [self._quantized(name, tensor) for name, tensor in zip(names, accumulated)]

    def _quantized(self, name: str, tensor: Tensor) -> Selection:
        generator = torch.Generator(tensor.device).manual_seed(self._generator_seed(name))
        values = round_to(tensor, torch.float32)
        codes, scales = quantize(values, self._levels, self._bucket_size, self._norm, generator)
        return Selection(
            codes, None, tensor.numel(), quantization=Quantization(scales, self._bucket_size, self._levels)
        )

    def _generator_seed(self, name: str) -> int:
        key = f"{self._seed} {self._rank} {self._step} {self._positions[name]}"
        return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")

    @override
    def selection_size(self, numel: int, count: int) -> SelectionSize:
        return SelectionSize(numel, numel, self._bucket_size, self._levels)

    @override
    def finish_step(
        self, names: Sequence[str], means: Sequence[Selection], finite: Tensor, all_gather: Gather
    ) -> Sequence[Selection]:
        # The device is waited for, once a step: generators are seeded on the host, so the host has to know whether the
        # step counts. The worker waits, not backward.
        self._step += int(finite)
        return means

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if list(state) != ["step"]:
            raise ValueError(
                f"QSGD keeps the number of steps as 'step', but was given {sorted(state)[:3]}; load the state into the"
                " compressor that it was saved with"
            )
        self._step = int(state["step"])
