"""SDAGC, a reconstruction: the threshold of every layer is a multiple of its standard deviation.

Chen, Yan, Ren and Wu, "SDAGC: Standard Deviation based Adaptive Gradient Compression", CCGRID 2020. Only the abstract
was available: each layer's standard deviation gives a threshold that adapts during training, with residual
accumulation, local clipping, learning-rate revision and momentum compensation. The abstract reports compression of 433x
to 2021x. The formulas below are reconstructed, and may differ from the authors' formulas.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Optional, Union

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.base import FROM_OPTIMIZER, Gather, ModelLayout
from lightning_sparse.compressors.dgc import DGC
from lightning_sparse.compressors.selection import FlatSelection, Selection, SelectionSize
from lightning_sparse.compressors.topk import largest_of_each
from lightning_sparse.functional.elements import copied_to

_GAIN = 0.05  # change of ln(alpha) per ln(sent elements / wanted elements)
_LARGEST_STEP = 0.1  # largest change of ln(alpha); without the limit, or with thrice the gain, the loop oscillates
_ALPHA_RANGE = (0.5, 50.0)
_MIN_DENSITY = 1e-6


class SDAGC(DGC):
    """Send elements above ``alpha`` standard deviations of the layer, with an adaptive ``alpha`` (reconstruction).

    For a parameter with gradient plus residual ``v``, elements with ``|v| >= alpha * std(v)`` are sent, largest first:
    at least 1, and at most ``capacity`` times the number wanted at the target density. All other elements stay in the
    residual. Messages have a fixed size and contain no count. After a step, each rank adapts ``alpha`` of each layer:
    ``ln alpha += clip(0.05 ln(sent / wanted), -0.1, 0.1)``. A fixed ``alpha`` does not work: the residual raises the
    standard deviation, so that fewer and fewer elements are sent (see ``tests/compressors/test_sdagc.py``). The warm-up
    is the same as in :class:`~lightning_sparse.compressors.DGC`.

    Args:
        alpha: initial value; ``None`` for the value that fits the density if elements have a Laplace distribution.
        capacity: size of a message, as a multiple of the wanted number of elements; unused space is sent as padding.
        momentum: as in :class:`~lightning_sparse.compressors.DGC`.
        nesterov: as in :class:`~lightning_sparse.compressors.DGC`.
        masks_momentum: as in :class:`~lightning_sparse.compressors.DGC`.
        clip_norm: as in :class:`~lightning_sparse.compressors.DGC`.
        revises_learning_rate: whether the residual is rescaled when the learning rate changes, so that older gradients
            act with the original rate. This is our reading of "learning rate revision".

    Raises:
        ValueError: for an ``alpha`` that is not positive, a ``capacity`` under 1, or an invalid argument of
            :class:`~lightning_sparse.compressors.DGC`.
    """

    has_density_by_parameter: ClassVar[bool] = False  # thresholds determine the number of sent elements
    fills_selection: ClassVar[bool] = False
    dense_wire_format: ClassVar[Optional[str]] = None  # select() adapts thresholds at density 1, too

    def __init__(
        self,
        alpha: Optional[float] = None,
        capacity: float = 1.5,
        momentum: Union[float, str, None] = FROM_OPTIMIZER,
        nesterov: bool = False,
        masks_momentum: bool = False,
        clip_norm: Optional[float] = None,
        revises_learning_rate: bool = True,
    ) -> None:
        if alpha is not None and alpha <= 0:
            raise ValueError(f"alpha={alpha} must be a positive number of standard deviations, such as 4")
        if capacity < 1:
            raise ValueError(f"capacity={capacity} must be at least 1, because a message must hold the wanted elements")
        self.alpha = alpha
        self.capacity = capacity
        super().__init__(momentum, nesterov, masks_momentum, clip_norm)
        self.feedback = self.feedback._replace(rescale_on_lr_change=revises_learning_rate)
        self._alphas: dict[str, Tensor] = {}  # by parameter name, also of frozen parameters; NaN before the first step
        self._proposals: list[tuple[Sequence[str], Tensor, Tensor]] = []  # per bucket: names, alphas, next alphas

    @override
    def begin(self, layout: ModelLayout) -> None:
        first = math.nan if self.alpha is None else self.alpha
        # An attribute, because the worker's stream may read this tensor after the first step has replaced all entries.
        self._first = torch.tensor(first, dtype=torch.float32).to(layout.device)
        self._alphas = dict.fromkeys(layout.names, self._first)
        self._proposals.clear()

    @override
    def select(self, names: Sequence[str], accumulated: Sequence[Tensor], counts: Sequence[int]) -> Sequence[Selection]:
        sizes = [self.selection_size(tensor.numel(), count) for tensor, count in zip(accumulated, counts)]
        selection = largest_of_each(accumulated, [size.selected for size in sizes])
        columns = (tuple(counts), selection.counts, selection.numels)
        wanted, rooms, numels = (copied_to(column, selection.values.device) for column in columns)
        before = torch.stack([self._alphas[name] for name in names])
        alphas = torch.where(before.isnan(), -(wanted.float() / numels).log() / math.sqrt(2), before)
        thresholds = alphas * _deviations(accumulated, numels)
        filled = _reaching(selection.values, rooms, thresholds.masked_fill(wanted == numels, 0.0))
        sent = _segments(filled.float(), "sum", rooms)
        self._proposals.append((names, before, _updated(alphas, sent, wanted, rooms, numels)))
        return FlatSelection(selection.values, selection.indices, selection.numels, selection.counts, filled)

    @override
    def selection_size(self, numel: int, count: int) -> SelectionSize:
        return SelectionSize(numel, min(numel, math.ceil(self.capacity * count)))

    @override
    def finish_step(self, names: Sequence[str], means: Sequence[Selection], finite: Tensor, all_gather: Gather) -> None:
        for bucket, before, after in self._proposals:
            self._alphas.update(zip(bucket, torch.where(finite, after, before).unbind()))
        self._proposals.clear()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"alpha": dict(self._alphas)}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        device = self._first.device
        self._alphas.update({name: alpha.to(device, copy=True) for name, alpha in state["alpha"].items()})


def _deviations(tensors: Sequence[Tensor], numels: Tensor) -> Tensor:
    means = torch.stack([tensor.mean(dtype=torch.float32) for tensor in tensors])
    squares = torch.stack(torch._foreach_norm(list(tensors))).float().square() / numels
    return (squares - means.square()).clamp(min=0.0).sqrt()


def _segments(values: Tensor, reduction: str, lengths: Tensor) -> Tensor:
    # unsafe=True skips the check of the lengths, which would synchronize with the GPU.
    return torch.segment_reduce(values, reduction, lengths=lengths, axis=0, unsafe=True)


def _reaching(values: Tensor, lengths: Tensor, thresholds: Tensor) -> Tensor:
    """Mark the elements of each tensor that reach the tensor's threshold, and the largest. Zeros are not marked."""
    magnitudes = values.abs().float()
    floors = torch.minimum(thresholds, _segments(magnitudes, "max", lengths))
    # A NaN is not below any threshold, so that NaNs are sent to all ranks.
    return (magnitudes < floors.repeat_interleave(lengths, output_size=len(values))).logical_not_() & (values != 0)


def _updated(alphas: Tensor, sent: Tensor, wanted: Tensor, rooms: Tensor, numels: Tensor) -> Tensor:
    ratios = (sent / wanted).clamp(min=_MIN_DENSITY)
    steps = (_GAIN * ratios.log()).clamp(-_LARGEST_STEP, _LARGEST_STEP)
    # If a message is full, the number of elements above the threshold is unknown, so alpha rises by the largest step.
    steps = steps.masked_fill((sent == rooms) & (rooms < numels), _LARGEST_STEP)
    return (alphas * steps.masked_fill(sent == 0, 0.0).exp()).clamp(*_ALPHA_RANGE)
