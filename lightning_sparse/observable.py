"""What may be asked about the steps of a strategy, and must be asked before them where it costs anything."""

from typing import Optional

from lightning_sparse.compressors import Compressor
from lightning_sparse.engine import Engine
from lightning_sparse.observe import Mark, ParameterSamples


class Observable:
    """The questions of callbacks to a strategy that drives an engine. Before ``fit`` and on one rank there is none."""

    _engine: Optional[Engine]

    @property
    def compressor(self) -> Optional[Compressor]:
        """What chooses what is sent; ``None`` where nothing is exchanged."""
        return None if self._engine is None else self._engine.pipeline.compressor

    def watch_gradients(self, is_watched: bool) -> None:
        """Have :meth:`last_step` say of every gradient when it was ready, from now on, until told otherwise.

        On CPU it always does; on a device each gradient costs an event. No rank has to do as the others do.
        """
        if self._engine is not None:
            self._engine.pipeline.recorder.is_watched = is_watched

    def sample_parameters(self, counts: bool = True, histograms: bool = False) -> None:
        """Ask for :meth:`parameter_samples` of the next step. No rank has to do as the others do.

        For their norms, that step reads every gradient and every residual once more.

        Args:
            counts: take note of how many elements of each parameter are sent.
            histograms: count the magnitudes of what is sent and kept; that reads them some more times.
        """
        if self._engine is not None:
            recorder = self._engine.pipeline.recorder
            if recorder.samples is not None:  # somebody else has asked for the same step
                counts, histograms = (
                    counts or recorder.samples.has_counts,
                    histograms or recorder.samples.has_histograms,
                )
            recorder.samples = ParameterSamples(counts, histograms)

    def parameter_samples(self) -> Optional[ParameterSamples]:
        """Return what the last step that was asked for did to each parameter; ``None`` before the first."""
        return None if self._engine is None else self._engine.pipeline.recorder.last_samples

    def clock_reference(self) -> Optional[tuple[Mark, float]]:
        """Return a mark, and when it passed on the host; see :meth:`~lightning_sparse.observe.Clock.reference`."""
        return None if self._engine is None else self._engine.pipeline.recorder.clock.reference()
