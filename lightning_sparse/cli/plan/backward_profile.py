"""The profile of a model's step on one worker: sizes of its gradients, and when backward makes them ready."""

import json
import math
import reprlib
from pathlib import Path
from typing import NamedTuple, Optional, Union

_VERSION = 1
_LISTS = ("names", "sizes", "backward_seconds")


class BackwardProfile(NamedTuple):
    """A step without communication. Tensors stand in the order in which backward makes their gradients ready.

    Attributes:
        names: parameter names.
        sizes: elements of each.
        backward_seconds: seconds that backward takes for each.
        other_seconds: seconds of the step outside backward: forward, optimizer.
        element_bytes: of one gradient element, as DDP sends it.
        device: type of the device on which this was measured, such as ``"cpu"``.
        workers: number of processes of the job that it was measured for; ``None`` if it was not said.
        has_adam: whether an optimizer is one whose updates are made before selection, so that mean gradients travel now
            and then.
        spread_seconds: by how much steps differed from each other, one sigma; 0 if it was not measured.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    backward_seconds: tuple[float, ...]
    other_seconds: float = 0.0
    element_bytes: int = 4
    device: str = "cpu"
    workers: Optional[int] = None
    has_adam: bool = False
    spread_seconds: float = 0.0

    @property
    def elements(self) -> int:
        """Elements of the whole gradient."""
        return sum(self.sizes)

    def checked(self) -> "BackwardProfile":
        """Pass through if a step can be predicted from it.

        Raises:
            ValueError: for a model without gradients, lists of different lengths, a size that is not a whole number
                above 0, or a time that is negative or not finite.
        """
        if not self.sizes:
            raise ValueError(
                "sizes=() must not be empty: no parameter of the model requires a gradient, so there is nothing to"
                " exchange; unfreeze some (requires_grad_(True))"
            )
        lengths = {name: len(getattr(self, name)) for name in _LISTS}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"{' and '.join(f'{name} has {length} entries' for name, length in lengths.items())}: pass one each per"
                " tensor"
            )
        for position, size in enumerate(self.sizes):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"sizes[{position}]={size!r} must be a whole number of elements, at least 1")
        for position, seconds in enumerate(self.backward_seconds):
            _check_seconds(f"backward_seconds[{position}]", seconds)
        _check_seconds("other_seconds", self.other_seconds)
        _check_seconds("spread_seconds", self.spread_seconds)
        return self

    def for_workers(self, workers: Optional[int]) -> "BackwardProfile":
        """Return the profile for a job of so many processes.

        Args:
            workers: ``None`` for as many as it was measured for.

        Raises:
            ValueError: if it was measured for another number, or neither is known.
        """
        if workers is None and self.workers is None:
            raise ValueError("workers=None is not known from the profile either; give --workers, such as --workers 16")
        if None not in (workers, self.workers) and workers != self.workers:
            raise ValueError(
                f"workers={workers}, but the profile was measured for {self.workers}: with another number of processes"
                " each may have another batch. Profile the model again, or leave --workers out"
            )
        return self._replace(workers=self.workers if workers is None else workers)

    def save(self, path: Union[str, Path]) -> None:
        """Write the profile as JSON."""
        Path(path).write_text(json.dumps({"version": _VERSION, **self._asdict()}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Union[str, Path]) -> "BackwardProfile":
        """Read what :meth:`save` wrote.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if it holds something else.
        """
        text = Path(path).read_text()
        try:
            fields = json.loads(text)
            assert fields.pop("version") == _VERSION
            return cls(**{**fields, **{name: tuple(fields[name]) for name in _LISTS}}).checked()
        except (AssertionError, AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{path} holds no profile of version {_VERSION}, but {reprlib.repr(text)}; write one with"
                " lightning-sparse plan --save-profile"
            ) from error


def _check_seconds(noun: str, seconds: float) -> None:
    if not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
        raise ValueError(f"{noun}={seconds!r} must be finite seconds, at least 0; leave disturbed steps out")
