"""A DDP strategy whose model can change wrappers between two steps: this package's engine, or plain DDP."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Optional

from lightning_utilities.core.rank_zero import rank_zero_info
from pytorch_lightning.strategies import DDPStrategy
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sparse.doors import where_to_import
from lightning_sparse.engine import Engine
from lightning_sparse.hook import BUCKET_CAP_MB
from lightning_sparse.schedule import Auto, Schedule
from lightning_sparse.switching import Switch

# The buckets along which torch.compile cuts its graph; DDP's own default.
_COMPILE_BUCKET_BYTES = 25 * 1024 * 1024


class SwitchableDDPStrategy(DDPStrategy):
    """Wrap the model for an :class:`~lightning_sparse.engine.Engine`, and follow a switch to plain DDP and back.

    Args:
        **ddp_kwargs: arguments of ``DDPStrategy`` and ``DistributedDataParallel``, without ``bucket_cap_mb``.
    """

    def __init__(self, **ddp_kwargs: Any) -> None:
        self._engine: Optional[Engine] = None
        self._switch: Optional[Switch] = None
        self._is_plain = False
        self._is_at_border = False
        super().__init__(**ddp_kwargs, bucket_cap_mb=BUCKET_CAP_MB)

    def __repr__(self) -> str:
        # A Trainer of Lightning's other name refuses this object, and shows it in its error.
        return f"<{type(self).__name__} {where_to_import(DDPStrategy.__module__)}>"

    @property
    def is_plain(self) -> bool:
        """Whether the last step was left to plain DDP."""
        return self._is_plain

    @override
    def _setup_model(self, model: Module) -> DistributedDataParallel:
        ddp = super()._setup_model(model)
        if getattr(ddp, "_use_python_reducer", False):
            raise RuntimeError(
                "torch._dynamo.config.optimize_ddp is 'python_reducer', which calls hooks with tuples instead of"
                " buckets; set it to True (the default) or False"
            )
        ddp.bucket_bytes_cap = _COMPILE_BUCKET_BYTES
        return ddp

    def _begin_switching(self, schedule: Schedule) -> None:
        """Follow a switch, if the schedule wants one."""
        assert self._engine is not None
        self._is_plain = self._is_at_border = False
        if isinstance(schedule, Auto):
            self._switch = Switch(self._engine, self.root_device, schedule.recheck_steps, self._say)

    def _end_switching(self) -> None:
        self._switch = None

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        # Only here: where users step their optimizers themselves, a step ends inside the wrapper's own forward.
        if self._switch is not None and self._is_at_border and self._switch.wants_plain != self._is_plain:
            self._rewrap(self._switch.wants_plain)
        self._is_at_border = False
        return super().training_step(*args, **kwargs)

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, *args, **kwargs)
        if self._switch is not None:
            self._is_at_border = True
            self._switch.end_step()
        return output

    def _rewrap(self, is_plain: bool) -> None:
        assert self._engine is not None
        assert isinstance(self.model, DistributedDataParallel)
        module = self.model.module
        if is_plain:
            self._engine.detach()
        self.model = None  # two reducers would both take every gradient
        with self._bucket_arguments(None if is_plain else BUCKET_CAP_MB):
            self.model = self._setup_model(module)
        if not is_plain:
            self._engine.attach(self.model)
        self._is_plain = is_plain

    @contextmanager
    def _bucket_arguments(self, bucket_cap_mb: Optional[float]) -> Iterator[None]:
        """Wrap with buckets of another size; the replicas are the same already."""
        arguments = self._ddp_kwargs
        self._ddp_kwargs = {**arguments, "bucket_cap_mb": bucket_cap_mb, "init_sync": False}
        try:
            yield
        finally:
            self._ddp_kwargs = arguments

    def _say(self, line: str) -> None:
        rank_zero_info(f"{type(self).__name__}: {line}")
