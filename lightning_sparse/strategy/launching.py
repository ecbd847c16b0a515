"""Launchers, through which all goes that a Trainer does: errors on their way out, and what processes bring back."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional

from typing_extensions import override

from lightning_sparse._lightning import Trainer, _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning_sparse.schedule import Plan
from lightning_sparse.strategy.whereabouts import told

if TYPE_CHECKING:
    from lightning_sparse.strategy.trainer import SparseDDPStrategy

_KEY = "lightning_sparse"


class ScriptLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher of scripts, which also has each rank say why it waited in vain for another one."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Optional[Trainer] = None, **kwargs: Any) -> Any:
        return super().launch(told, trainer, function, *args, trainer=trainer, **kwargs)


class ReportingLauncher(_MultiProcessingLauncher):
    """Bring statistics and plan back from forked and spawned processes, beside the metrics that Lightning brings.

    Args:
        strategy: of the Trainer; rank 0's tells, and that of the calling process hears.
        start_method: how processes begin.
    """

    _strategy: "SparseDDPStrategy"

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Optional[Trainer] = None, **kwargs: Any) -> Any:
        return super().launch(told, trainer, function, *args, trainer=trainer, **kwargs)

    @override
    def get_extra_results(self, trainer: Trainer) -> dict[str, Any]:
        plan = self._strategy.exchange_plan()
        told = {"stats": self._strategy.compression_stats(), "plan": None if plan is None else plan.state_dict()}
        return {**super().get_extra_results(trainer), _KEY: told}

    @override
    def update_main_process_results(self, trainer: Trainer, extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        told = extra[_KEY]
        self._strategy.remember(told["stats"], None if told["plan"] is None else Plan.of(told["plan"]))
