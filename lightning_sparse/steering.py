"""What callbacks may change of a strategy's engine, and what they may ask about it to do so."""

from collections.abc import Mapping
from typing import Optional

from lightning_sparse.density import RULES
from lightning_sparse.feedback import ErrorFeedback
from lightning_sparse.observable import Observable
from lightning_sparse.schedule import Auto, Merged
from lightning_sparse.settings import Settings


class Steerable(Observable):
    """How callbacks steer a strategy that drives an engine. Some things can only be said before ``fit`` starts."""

    _settings: Settings

    def correct_momentum(self, correction: Optional[ErrorFeedback]) -> None:
        """Accumulate momentum before compression, and clip, as ``correction`` says, in each ``fit`` that follows.

        Args:
            correction: its momentum, masking and clipping are taken over; ``None`` for what the compressor asks for.

        Raises:
            ValueError: if the compressor, or the schedule, cannot go together with it.
            RuntimeError: if training has started.
        """
        if correction is not None and self._engine is not None:
            raise RuntimeError("momentum can only be corrected from the start of fit: call it in a callback's setup")
        self._settings.correct_momentum(correction)

    @property
    def corrects_adam(self) -> bool:
        """Whether the updates of Adam or AdamW are made before selection."""
        return self._engine is not None and self._settings.feedback.adam is not None

    def watch_memory(self) -> None:
        """Ask for :meth:`memory_statistics` of the next step. No rank has to do as the others do."""
        if self._engine is not None:
            self._engine.memory.is_watched = True

    def memory_statistics(self) -> dict[str, float]:
        """Return what the memory did in the last step, which must have been asked for; on a GPU this waits for it.

        Returns:
            ``local_clip_factor``, by which this rank's gradient was multiplied, where it is clipped;
            ``momentum_norm``, of the momentum that is accumulated before compression, and ``masked_fraction``, of its
            elements that were set to zero, where it is; ``update_error``, the norm of the updates that wait over that
            of this rank's updates of the step, and ``second_moment_age``, in steps, where Adam is corrected.
        """
        if self._engine is None:
            return {}
        self._engine.memory.is_watched = False
        return {name: float(statistic) for name, statistic in self._engine.memory.statistics().items()}

    def begin_steering_density(self, hides_communication: bool = False) -> None:
        """Take note that rules are to raise densities, in each ``fit`` that follows.

        Args:
            hides_communication: whether the plan is to send more where that costs no time.

        Raises:
            ValueError: if the compressor has no density for each parameter, or the schedule no plan to adapt to.
        """
        compressor, schedule = self._settings.compressor, self._settings.schedule
        name = type(compressor).__name__
        if not compressor.has_density_by_parameter:
            raise ValueError(
                f"{name} does not send a density of each parameter that rules could raise: use compressor='topk',"
                " 'lags' or 'dgc', or OMGS(per_tensor=True)"
            )
        if isinstance(schedule, Auto):
            raise ValueError(
                "schedule='auto' decides itself how much is sent, and leaves steps to DDP: use schedule='merged', such"
                " as strategy='sparse_lags'"
            )
        if hides_communication and not isinstance(schedule, Merged):
            raise ValueError(
                f"schedule={type(schedule).__name__!r} follows no plan that could tell which exchange hides behind"
                " backward: use schedule='merged'"
            )
        self._settings.hides_communication = hides_communication

    def end_steering_density(self) -> None:
        """Take back :meth:`begin_steering_density`."""
        self._settings.hides_communication = False

    def asked_densities(self) -> dict[str, float]:
        """Return what the user asked for, by parameter name, when warm-up is over; empty where nothing is exchanged."""
        if self._engine is None:
            return {}
        compressor, names = self._settings.compressor, self._engine.parameter_names
        return {name: compressor.density_of(name, self._settings.density) for name in names}

    def densities(self) -> dict[str, float]:
        """Return the density of each parameter in the next step, by name; empty where nothing is exchanged."""
        if self._engine is None:
            return {}
        return {name: self._engine.densities.of(name) for name in self._engine.parameter_names}

    def wish_densities(self, densities: Mapping[str, float], ceiling: float = 1.0) -> None:
        """Send at least these fractions from the next step on; between two steps, and alike on all ranks.

        Args:
            densities: by parameter name, in place of those wished before; less than the user asked for changes nothing.
            ceiling: the most that any parameter gets because of this wish, or of a plan.
        """
        if self._engine is not None:
            self._engine.densities.ceiling = ceiling
            self._engine.densities.wish(RULES, densities)
