import copy
import logging
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from pytorch_lightning import Callback
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.functional.elements import local_tensor
from lightning_sparse.strategy.trainer import SparseStrategy
from lightning_sparse.testing.tensors import assert_same
from tests.helpers.resuming import Numbered, fit_numbered
from tests.helpers.trainers import forget_groups, weights

Tensors = dict[str, Tensor]
REFUSED = (ValueError, TypeError, RuntimeError)


class Fitted(NamedTuple):
    batches: list[Tensors]  # weights after each batch
    start: Tensors
    end: Tensors  # end state, including buffers
    stats: list[dict[str, float]]  # statistics after each batch
    total: dict[str, float]  # statistics at the end
    kept: dict[str, Any]  # state that the strategy stores
    optimizers: list[list[Any]]  # state per parameter, of each optimizer
    said: list[str]  # log lines of the strategy
    notes: Any  # notes of the model


class Watch(Callback):
    def __init__(self):
        self.batches = []
        self.stats = []

    def on_train_batch_end(self, trainer, pl_module, *batch):
        self.batches.append(weights(pl_module))
        if isinstance(trainer.strategy, SparseStrategy):
            self.stats.append(trainer.strategy.compression_stats())


@contextmanager
def listening():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    loggers = [logging.getLogger(name) for name in ("pytorch_lightning", "lightning_sparse")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield lines
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def strategy_of(settings):
    if settings is None or isinstance(settings, str):
        return DDPStrategy() if settings is None else settings
    arguments = copy.deepcopy(dict(settings))
    kind = arguments.pop("strategy", SparseDDPStrategy)
    return DDPStrategy(**arguments.pop("ddp")) if "ddp" in arguments else kind(**arguments)


def fit(rank, module, settings, source, arguments):
    strategy, model, watch = strategy_of(settings), module(), Watch()
    start = weights(model)
    if isinstance(strategy, ModelParallelStrategy):
        forget_groups()
    more = {"limit_val_batches": 0, **arguments, "callbacks": [*arguments.get("callbacks", ()), watch]}
    with listening() as lines:
        trainer = fit_numbered(rank, strategy, model, source, **more)
    strategy = trainer.strategy
    is_ours = isinstance(strategy, SparseStrategy)
    optimizers = [list(each.state.values()) for each in trainer.optimizers]
    return Fitted(
        watch.batches,
        start,
        {name: local_tensor(each).clone() for name, each in model.state_dict().items()},
        watch.stats,
        strategy.compression_stats() if is_ours else {},
        (strategy.final_state or {}) if is_ours else {},
        tree_map_only(Tensor, lambda each: local_tensor(each).clone(), optimizers),
        [line for line in lines if line.startswith("Sparse")],
        getattr(model, "notes", None),
    )


def fits(pool, module, settings=None, source=None, **arguments):
    return pool.run(fit, module, settings, source, arguments)


def one_model(answers):
    """Assert that all ranks have the same model after every batch, and return the results of rank 0."""
    first, *others = answers
    for other in others:
        assert_same(other.batches, first.batches)
    assert all(tensor.isfinite().all() for tensor in first.end.values())
    return first


def refuse(rank, act, *arguments):
    try:
        act(rank, *arguments)
    except REFUSED as error:
        return f"{type(error).__name__}: {error}"
    return "was not refused"


def refusals(pool, module, settings, source=None, **arguments):
    return pool.run(refuse, fit, module, settings, source, arguments)


def assert_goes_on(pool, folder, settings, module=Numbered, save_after=8, **arguments):
    """Assert that a fit resumed from a save is bitwise identical to a fit without a stop."""
    path = str(folder / "mid.ckpt")
    whole = fits(pool, partial(module, save_after, path), settings, **arguments)
    for one, other in zip(whole, fits(pool, module, settings, path, **arguments)):
        assert_same(other.batches, one.batches[save_after:])
        assert_same(other.kept, one.kept)
