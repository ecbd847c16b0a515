"""What the training examples share: their command line, the Trainer that it describes, and what is told at the end."""

import argparse
import json
import warnings
from pathlib import Path
from typing import Any, Union

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.strategies import Strategy, StrategyRegistry
from typing_extensions import override

from lightning_sparse import SparseDDPStrategy, SparseModelParallelStrategy
from lightning_sparse.callbacks import CompressionMonitor
from lightning_sparse.schedule.costs import dense_bytes

_SPARSE = (SparseDDPStrategy, SparseModelParallelStrategy)
_OVERRIDES = ("density", "wire", "schedule", "warmup_steps")


class Report(Callback):
    """Print the outcome at the end of training, and write it to a file as JSON if there is one to write.

    This happens inside training, since with ``start_method="spawn"`` the processes are gone after it.

    Args:
        options: from :func:`example_parser`.
        metric: name under which the module logs the score.
    """

    def __init__(self, options: argparse.Namespace, metric: str) -> None:
        self._options = options
        self._metric = metric

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        outcome = _outcome(trainer, pl_module, self._options.strategy, self._metric)
        print(
            f"\n{outcome['strategy']}: {self._metric} {outcome['score']:.4f}, {outcome['mean_bytes_per_step']:,.0f}"
            f" bytes sent per step, compression ratio {outcome['compression_ratio']:.1f}, log in"
            f" {outcome['log_dir'] or 'no directory'}"
        )
        if self._options.result is not None:
            self._options.result.write_text(json.dumps(outcome))


def example_parser(
    manual: str, epochs: int, batch_size: int, learning_rate: float, strategy: str = "sparse_topk"
) -> argparse.ArgumentParser:
    """Build the parser of the flags that every training example has.

    Args:
        manual: docstring of the example.
        epochs: default of ``--epochs``.
        batch_size: default of ``--batch-size``.
        learning_rate: default of ``--lr``.
        strategy: default of ``--strategy``.
    """
    parser = argparse.ArgumentParser(description=manual, formatter_class=argparse.RawDescriptionHelpFormatter)
    _add_strategy_flags(parser, strategy)
    parser.add_argument("--accelerator", default="auto", help="cpu, gpu or auto (default)")
    parser.add_argument("--devices", type=int, default=2, help="processes on each node (default 2)")
    parser.add_argument("--nodes", type=int, default=1, help="nodes (default 1)")
    parser.add_argument("--epochs", type=int, default=epochs, help=f"default {epochs}")
    parser.add_argument("--batch-size", type=int, default=batch_size, help=f"for each process (default {batch_size})")
    parser.add_argument("--lr", type=float, default=learning_rate, help=f"learning rate (default {learning_rate:g})")
    parser.add_argument("--seed", type=int, default=1, help="default 1")
    parser.add_argument("--log-dir", type=Path, default=Path("logs"), help="for TensorBoard (default logs)")
    parser.add_argument("--result", type=Path, metavar="FILE", help="write the outcome to this file, as JSON")
    parser.add_argument("--fast-dev-run", action="store_true", help="one batch of everything, no log")
    return parser


def build_trainer(
    parser: argparse.ArgumentParser, options: argparse.Namespace, name: str, metric: str, **arguments: Any
) -> Trainer:
    """Build the Trainer that the options describe.

    Args:
        parser: ends the program, with a message, if options contradict each other.
        options: what it has parsed.
        name: name of the example, a directory of its log.
        metric: name under which the module logs the score.
        **arguments: further arguments of the Trainer.
    """
    warnings.filterwarnings("ignore", message=".*does not have many workers")  # the data is in memory
    callbacks: list[Callback] = [Report(options, metric)]
    if _is_sparse(options.strategy):
        callbacks.append(CompressionMonitor(progress_bar=True))
    return Trainer(
        strategy=_chosen_strategy(parser, options),
        accelerator=options.accelerator,
        devices=options.devices,
        num_nodes=options.nodes,
        max_epochs=options.epochs,
        fast_dev_run=options.fast_dev_run,
        logger=TensorBoardLogger(options.log_dir, name=f"{name}/{options.strategy}"),
        callbacks=callbacks,
        log_every_n_steps=10,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        **arguments,
    )


def _add_strategy_flags(parser: argparse.ArgumentParser, strategy: str) -> None:
    parser.add_argument("--strategy", default=strategy, metavar="NAME", help=f"{strategy} (default), ddp, ...")
    parser.add_argument("--density", type=float, help="fraction of gradient elements sent, such as 0.01")
    parser.add_argument("--warmup-steps", type=int, help="optimizer steps over which the density falls to its target")
    parser.add_argument("--wire", help="type of the values sent: float32, bfloat16, float16")
    parser.add_argument("--schedule", help="when gradients travel: layerwise, merged, single")


def _is_sparse(name: str) -> bool:
    return name in StrategyRegistry and issubclass(StrategyRegistry[name]["strategy"], _SPARSE)


def _chosen_strategy(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Union[str, Strategy]:
    given = {flag: getattr(options, flag) for flag in _OVERRIDES if getattr(options, flag) is not None}
    if not _is_sparse(options.strategy):
        if given:
            flags = ", ".join(f"--{flag.replace('_', '-')}" for flag in given)
            parser.error(f"{flags} cannot be given with --strategy {options.strategy}, which sends whole gradients")
        return str(options.strategy)
    entry = StrategyRegistry[options.strategy]
    strategy: Strategy = entry["strategy"](**{**entry["init_params"], **given})
    return strategy


def _outcome(trainer: Trainer, module: LightningModule, strategy: str, metric: str) -> dict[str, Any]:
    elements = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    dense = dense_bytes(elements, trainer.world_size)
    steps = max(1, trainer.global_step)
    stats = {"wire_bytes": dense, "total_wire_bytes": dense * steps, "total_compression_ratio": 1.0}
    if isinstance(trainer.strategy, _SPARSE):
        stats.update(trainer.strategy.compression_stats())
    return {
        "strategy": strategy,
        "score": trainer.callback_metrics[metric].item(),
        "bytes_per_step": stats["wire_bytes"],  # that left rank 0 for the gradients of the last step
        "mean_bytes_per_step": stats["total_wire_bytes"] / steps,
        "dense_bytes": dense,  # of DDP, in a step
        "compression_ratio": stats["total_compression_ratio"],  # of the whole training; 1 where nothing travels
        "log_dir": trainer.logger.log_dir if isinstance(trainer.logger, TensorBoardLogger) else "",
    }
