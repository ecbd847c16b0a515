"""More, where that costs no time."""

from typing import ClassVar

from typing_extensions import override

from lightning_sparse.compressors.density.rule import Moment, Rule


class HideCommunication(Rule):
    """Send more of a layer where its exchange hides behind backward anyway, all of it if all hides.

    The adaptive densities of LAGS-SGD (arXiv 1911.08727), for the groups of the plan of ``schedule="merged"``; see
    :func:`~lightning_sparse.schedule.hidden_density.hidden_densities`. What hides is measured in the first steps, so
    two runs no longer give the same bits.
    """

    hides_communication: ClassVar[bool] = True

    @override
    def wishes(self, moment: Moment) -> dict[str, float]:
        return {}  # the plan has its own

    @override
    def reason(self, name: str) -> str:
        return "its exchange hides behind backward"
