"""A DDP strategy whose model can change wrappers between two steps: for the engine, plain DDP, other parameters."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Optional

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sparse.collectives import gather_apart
from lightning_sparse.doors import where_to_import
from lightning_sparse.engine import Engine
from lightning_sparse.hook import bucket_cap_mb
from lightning_sparse.schedule import Auto, Schedule
from lightning_sparse.switching import Switch
from lightning_sparse.trained import TrainedParameters, listed

# The buckets along which torch.compile cuts its graph; DDP's own default.
_COMPILE_BUCKET_BYTES = 25 * 1024 * 1024
_ALIKE = (
    "What is trained has to change on all ranks before the same training_step: do not let it depend on the rank, on its"
    " own data or on its clock"
)


class SwitchableDDPStrategy(DDPStrategy):
    """Wrap the model for an :class:`~lightning_sparse.engine.Engine`, and follow a switch to plain DDP and back.

    When parameters are frozen, unfrozen, or added to model and optimizer, the model is wrapped anew before the next
    ``training_step``, on all ranks; DDP would wait for ever, or let replicas drift apart.

    Args:
        **ddp_kwargs: arguments of ``DDPStrategy`` and ``DistributedDataParallel``, without ``bucket_cap_mb``.
    """

    def __init__(self, **ddp_kwargs: Any) -> None:
        self._engine: Optional[Engine] = None
        self._switch: Optional[Switch] = None
        self._is_plain = False
        self._is_at_border = False
        self._is_accumulating = False
        self._stream: Optional[torch.cuda.Stream] = None
        super().__init__(**ddp_kwargs)

    def __repr__(self) -> str:
        # A Trainer of Lightning's other name refuses this object, and shows it in its error.
        return f"<{type(self).__name__} {where_to_import(DDPStrategy.__module__)}>"

    @property
    def is_plain(self) -> bool:
        """Whether the last step was left to plain DDP."""
        return self._is_plain

    @override
    def _setup_model(self, model: Module) -> DistributedDataParallel:
        with self._wrapping_arguments(bucket_cap_mb=None if self._is_plain else bucket_cap_mb(model)):
            ddp = self._wrapped(model)
        if getattr(ddp, "_use_python_reducer", False):
            raise RuntimeError(
                "torch._dynamo.config.optimize_ddp is 'python_reducer', which calls hooks with tuples instead of"
                " buckets; set it to True (the default) or False"
            )
        ddp.bucket_bytes_cap = _COMPILE_BUCKET_BYTES
        self._trained = TrainedParameters(model)
        return ddp

    def _wrapped(self, model: Module) -> DistributedDataParallel:
        """Wrap as Lightning does, on a stream beside that of the caller; but always on the same one, and in order."""
        device_ids = self.determine_ddp_device_ids()
        if device_ids is None:
            return super()._setup_model(model)
        # Gradients are written on the stream on which their parameter was first wrapped, for as long as anybody keeps
        # the graph of a step, such as a loss that is not detached. Those of one group must not come from several.
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.root_device)
        caller = torch.cuda.current_stream(self.root_device)
        # DDP broadcasts all parameters where some are new, and replaces gradients that it finds by copies in buckets of
        # its own: after what the last step writes, and before the next reads these, or writes into the memory of those.
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            ddp = DistributedDataParallel(module=model, device_ids=device_ids, **self._ddp_kwargs)
        caller.wait_stream(self._stream)
        return ddp

    def _begin_switching(self, schedule: Schedule) -> None:
        """Follow a switch, if the schedule wants one."""
        assert self._engine is not None
        self._is_at_border = False
        if isinstance(schedule, Auto):
            self._switch = Switch(self._engine, self.root_device, schedule.recheck_steps, self._say)

    def _end_switching(self) -> None:
        self._switch = None
        self._is_plain = False

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        # Only here: where users step their optimizers themselves, a step ends inside the wrapper's own forward.
        is_plain = self._switch.wants_plain if self._switch is not None and self._is_at_border else self._is_plain
        if self._trained.have_changed(self.optimizers):
            self._agree_on_trained()
            self._rewrap(is_plain)
            self._say(f"wrapped anew, {len(self._trained)} parameters are trained from now on.")
        elif is_plain != self._is_plain:
            self._rewrap(is_plain)
        self._is_at_border = False
        return super().training_step(*args, **kwargs)

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with super().block_backward_sync():
            yield
        if isinstance(self.model, DistributedDataParallel):
            # Of a wrapper that came meanwhile nobody else would take the block.
            self.model.require_backward_grad_sync = True

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        self._check_trained()
        super().pre_backward(closure_loss)
        self._is_accumulating = True

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, *args, **kwargs)
        self._is_accumulating = False
        if self._switch is not None:
            self._is_at_border = True
            self._switch.end_step()
        return output

    @override
    def teardown(self) -> None:
        super().teardown()
        self._stream = None  # which cannot be pickled

    def _agree_on_trained(self) -> None:
        """Raise, on every rank, unless all are about to train the same parameters."""
        if self._is_accumulating and (names := self._trained.holds_gradients()):
            raise RuntimeError(
                f"frozen: {listed(names)}, between two batches of one optimizer step, with gradients that no other rank"
                " has heard of. Freeze after optimizer steps, such as at the start of an epoch"
            )
        changes = self._trained.changes()
        try:
            everywhere = gather_apart(changes, self._timeout) if self.world_size > 1 else [changes]
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.global_rank}: {changes}; but not every other rank came to say so within the timeout."
                f" {_ALIKE}. The backend said: {error}"
            ) from error
        if len(set(everywhere)) > 1:
            said = ". ".join(f"Rank {rank}: {theirs or 'nothing'}" for rank, theirs in enumerate(everywhere))
            raise RuntimeError(f"ranks are about to train different parameters. {said}. {_ALIKE}")

    def _check_trained(self) -> None:
        """Raise if other parameters require a gradient than when the forward of this step began."""
        tolerates_unused = any(self._ddp_kwargs.get(name) for name in ("find_unused_parameters", "static_graph"))
        if not self._trained.have_changed(self.optimizers):
            return
        if self._trained.unfrozen() or not tolerates_unused:
            raise RuntimeError(
                f"{self._trained.changes()}, inside training_step, when gradients are already waited for. Do it before,"
                " such as in on_train_batch_start or on_train_epoch_start; for optimizers that take turns"
                " (toggle_optimizer) use find_unused_parameters=True"
            )

    def _rewrap(self, is_plain: bool) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        module, synchronizes = self.model.module, self.model.require_backward_grad_sync
        if self._engine is not None and not self._is_plain:
            if is_plain:
                self._engine.leave_optimizers()
            self._engine.detach()
        self.model = None  # two reducers would both take every gradient
        self._is_plain = is_plain
        # Replicas are the same already, unless they have new parameters.
        with self._wrapping_arguments(init_sync=self._trained.has_new()):
            self.model = self._setup_model(module)
        self.model.require_backward_grad_sync = synchronizes
        if self._engine is not None and not is_plain:
            self._engine.attach(self.model)
        self._note_use()

    def _note_use(self) -> None:
        """Tell a new wrapper what the step in progress has used so far: DDP drops the mean of what seems unused."""
        if not (self._is_accumulating and self._ddp_kwargs.get("find_unused_parameters")):
            return
        assert isinstance(self.model, DistributedDataParallel)
        used = {each: each.grad for each in self.model.parameters() if each.requires_grad and each.grad is not None}
        if used:
            with self.model.no_sync():
                torch.autograd.backward(list(used), [torch.zeros_like(gradient) for gradient in used.values()])

    @contextmanager
    def _wrapping_arguments(self, **changes: Any) -> Iterator[None]:
        arguments = self._ddp_kwargs
        self._ddp_kwargs = {**arguments, **changes}
        try:
            yield
        finally:
            self._ddp_kwargs = arguments

    def _say(self, line: str) -> None:
        rank_zero_info(f"{type(self).__name__}: {line}")
