"""The position in the data, counted in samples: an epoch goes on where ranks of another number have left it."""

import math
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple, Optional

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from typing_extensions import override

from lightning_sparse.engine.collectives import gather_together
from lightning_sparse.strategy.lightning import Trainer

POSITION = "lightning_sparse_position"  # in a checkpoint


class ElasticSampler(DistributedSampler[Any]):
    """A ``DistributedSampler`` of the same length that deals out what is left of an epoch, whoever had its start."""

    samples = 0  # of the epoch, that all ranks together had when this training went on
    batches = 0  # that stand for them on each rank

    @override
    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.samples = self.batches = 0
        super().set_epoch(epoch)

    @override
    def __iter__(self) -> Iterator[int]:
        if not self.samples:
            return super().__iter__()
        whole: DistributedSampler[Any] = DistributedSampler(self.dataset, 1, 0, self.shuffle, self.seed)
        whole.set_epoch(self.epoch)
        left: Any = list(whole)[self.samples :]
        dealt: DistributedSampler[Any] = DistributedSampler(
            left, self.num_replicas, self.rank, shuffle=False, drop_last=self.drop_last
        )
        return iter([left[index] for index in dealt])


class Position(NamedTuple):
    """How far an epoch has gone, and in which order it goes."""

    epoch: int
    samples: int  # that all ranks have had
    samples_in_epoch: int
    dataset: int  # its length
    seed: int
    shuffle: bool


class Reader:
    """Knows the position in the data of a training, whose batches are dealt out by a ``DistributedSampler``."""

    def __init__(self, trainer: Trainer, loader: DataLoader[Any]) -> None:
        sampler: Any = loader.sampler
        sampler.__class__ = ElasticSampler  # in place: a loader of a user's own class cannot be made anew
        self._trainer, self._loader = trainer, loader
        self._sampler: ElasticSampler = sampler
        self._batch_size: int = loader.batch_size or 1

    @classmethod
    def of(cls, trainer: Trainer) -> Optional["Reader"]:
        """Return that of a training whose data are set up; ``None`` where no order is known, or ranks differ."""
        loader, *others = tree_leaves(trainer.train_dataloader)
        form: Any = None
        if not others and _is_dealt(loader):
            sampler, batches = loader.sampler, trainer.num_training_batches
            form = (
                loader.batch_size,
                batches,
                sampler.num_replicas,
                len(sampler.dataset),
                sampler.seed,
                sampler.shuffle,
            )
        forms = gather_together(form) if trainer.world_size > 1 else [form]
        return None if form is None or any(other != form for other in forms) else cls(trainer, loader)

    def current(self) -> Optional["Reader"]:
        """Return that of the loader of now, where users have it made anew after epochs; all ranks must call."""
        is_current = tree_leaves(self._trainer.train_dataloader) == [self._loader]
        return self if is_current else Reader.of(self._trainer)

    def close(self) -> None:
        """Have the sampler, which may be the user's, begin its epoch anew in a training that follows."""
        self._sampler.samples = self._sampler.batches = 0

    def position(self) -> Position:
        """Return the position after the last batch that has ended."""
        sampler, length = self._sampler, len(self._loader.dataset)  # type: ignore[arg-type]
        at_once = self._batch_size * sampler.num_replicas
        current: Any = self._trainer.fit_loop.epoch_loop.batch_progress.current
        begun = current.processed - sampler.batches
        in_epoch = sampler.samples + (int(self._trainer.num_training_batches) - sampler.batches) * at_once
        samples = min(length, sampler.samples + begun * at_once)
        return Position(sampler.epoch, samples, min(length, in_epoch), length, sampler.seed, sampler.shuffle)

    def go_on(self, position: Position) -> None:
        """Go on from a position, and count batches as if ranks had always been as many as now."""
        own = self.position()
        progress: Any = self._trainer.fit_loop.epoch_loop.batch_progress
        # Where batches are of as many samples as before, an epoch in its midst is as long as this Trainer has it.
        is_as_before = own.samples == position.samples and not progress.is_last_batch
        in_epoch = own.samples_in_epoch if is_as_before else position.samples_in_epoch
        left = self._batches(max(0, in_epoch - position.samples))
        is_same_order = (own.dataset, own.seed, own.shuffle) == (position.dataset, position.seed, position.shuffle)
        if left and not is_same_order:
            rank_zero_warn(
                f"the checkpoint was saved after {position.samples} of {position.dataset} samples of an epoch (seed"
                f" {position.seed}, shuffle={position.shuffle}), and the data set has {own.dataset} now (seed"
                f" {own.seed}, shuffle={own.shuffle}): samples of this epoch are seen twice, or left out"
            )
            return
        batches = int(self._trainer.num_training_batches)
        begun = max(0, batches - left)
        advance(self._trainer, begun - progress.current.processed)
        progress.is_last_batch = progress.is_last_batch or not left
        self._sampler.set_epoch(position.epoch if left else position.epoch + 1)
        if left:
            self._sampler.samples, self._sampler.batches = position.samples, begun
        # Lightning says of data that begin anew in a resume, once in a process, what is not true of these.
        warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the")
        fetcher: Any = self._trainer.fit_loop._data_fetcher
        iter(fetcher)  # anew, since its workers may have read ahead

    def _batches(self, samples: int) -> int:
        """Return how many batches each rank has of so many samples."""
        ranks, size = self._sampler.num_replicas, self._batch_size
        each = samples // ranks if self._sampler.drop_last else math.ceil(samples / ranks)
        return each // size if self._loader.drop_last else math.ceil(each / size)


def advance(trainer: Trainer, batches: int) -> None:
    """Count some more batches of an epoch as had by this rank."""
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    for name in ("ready", "started", "processed", "completed"):
        setattr(current, name, getattr(current, name) + batches)


def _is_dealt(loader: Any) -> bool:
    """Tell whether the batches of a loader follow from its ``DistributedSampler``, and it keeps no position itself."""
    return (
        isinstance(loader, DataLoader)
        and type(loader.batch_sampler) is BatchSampler
        and type(loader.sampler) in (DistributedSampler, ElasticSampler)
        and not hasattr(loader, "state_dict")
    )
