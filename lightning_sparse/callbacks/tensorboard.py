"""Charts in TensorBoard's tab "Custom Scalars"."""

from collections.abc import Container

from lightning_sparse.strategy.lightning import TensorBoardLogger, Trainer

# Each chart has a single statistic, because all lines of a run have one colour and no legend.
_CHARTS = {
    "sparse: how much is sent": {
        "log10_density": "Density, log10 of the fraction of elements",
        "wire_bytes": "Sent by a rank in a step, bytes",
        "inter_node_bytes": "Sent by a rank to other nodes in a step, bytes",
        "compression_ratio": "Compression ratio, times",
        "total_wire_bytes": "Sent by a rank since the start, bytes",
        "total_compression_ratio": "Compression ratio since the start, times",
    },
    "sparse: where the time of a step goes": {
        "step_seconds": "Step, seconds",
        "exposed_seconds": "Exposed exchange, seconds",
        "exposed_share": "Exposed exchange, fraction of the time",
        "backward_seconds": "Backward, seconds",
        "select_seconds": "Selection, seconds",
        "exchange_seconds": "Exchange, seconds",
        "commit_seconds": "Commit, seconds",
    },
    "sparse: residual": {
        "residual_to_gradient": "Residual over the gradient, ratio of norms",
        "update_error": "Residual of updates over the update, ratio of norms",
        "replica_divergence": "Drift of replicas over parameters, ratio of norms",
    },
}


def log_layout(trainer: Trainer, shown: Container[str]) -> None:
    """Define charts for statistics in ``shown``. TensorBoard reads tags as regular expressions, hence the ``$``."""
    some = {category: {name: charts[name] for name in charts if name in shown} for category, charts in _CHARTS.items()}
    layout = {key: {title: ["Multiline", [f"sparse/{name}$"]] for name, title in some[key].items()} for key in some}
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_custom_scalars({key: charts for key, charts in layout.items() if charts})
