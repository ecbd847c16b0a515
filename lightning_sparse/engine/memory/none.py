"""Nothing is kept."""

from collections.abc import Mapping, Sequence

from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.feedback import Hyperparameters
from lightning_sparse.compressors.group_selection import GroupSelection
from lightning_sparse.engine.memory.base import Memory, MemoryState, in_widened


class NoMemory(Memory):
    """For an exchange that sends everything exactly: nothing ever waits, nothing is allocated."""

    @override
    def compensate(
        self, names: Sequence[str], gradients: Sequence[Tensor], hyperparameters: Mapping[str, Hyperparameters]
    ) -> list[Tensor]:
        return in_widened(gradients)

    @override
    def update(
        self, names: Sequence[str], accumulated: Sequence[Tensor], kept: GroupSelection, accepted: Tensor
    ) -> None:
        pass

    @override
    def state_dict(self) -> MemoryState:
        return {}

    @override
    def load_state_dict(self, state: MemoryState) -> None:
        if state:
            raise ValueError(
                f"a state that holds {' and '.join(state)} was given to an exchange that keeps nothing; load it into"
                " the compressor and wire that it was saved with"
            )
