"""The contract of a schedule, which decides WHEN and WITH WHOM a gradient travels."""

from abc import ABC, abstractmethod

from typing_extensions import override

UNPLANNED_ELEMENTS = 1 << 23  # of a group, where nothing has been measured


class Schedule(ABC):
    """Cut the stream of gradients, in the order in which backward makes them ready, into groups.

    The answer must follow from the arguments alone, because every rank has to cut the stream in the same places.
    """

    @abstractmethod
    def closes_group(self, newest: str, numel: int) -> bool:
        """Decide whether to exchange the open group now; what is open at the end of backward is exchanged then.

        Args:
            newest: name of the parameter that has just joined the group.
            numel: number of elements in the group, the newest parameter's included.
        """


class Layerwise(Schedule):
    """Exchange every parameter as soon as its gradient is ready: the most overlap, and the most messages."""

    @override
    def closes_group(self, newest: str, numel: int) -> bool:
        return True


class Single(Schedule):
    """Exchange everything in one message after backward: no overlap, and the fewest messages."""

    @override
    def closes_group(self, newest: str, numel: int) -> bool:
        return False


class FixedSize(Schedule):
    """Exchange as soon as a group has gathered a number of elements, whatever they cost.

    Args:
        min_elements: of a complete group. Smaller overlaps more of the exchange with backward, larger pays the latency
            of fewer messages.

    Raises:
        ValueError: if ``min_elements`` is not positive.
    """

    def __init__(self, min_elements: int = UNPLANNED_ELEMENTS) -> None:
        if min_elements < 1:
            raise ValueError(f"min_elements={min_elements} must be at least 1; 1 exchanges layer by layer")
        self.min_elements = min_elements

    @override
    def closes_group(self, newest: str, numel: int) -> bool:
        return numel >= self.min_elements
