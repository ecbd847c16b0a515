"""The numbers that a user is told, by name."""

# What a strategy's ``compression_stats`` returns, whatever it sends.
STATS = {
    "density",
    "wire_bytes",
    "dense_bytes",
    "compression_ratio",
    "total_wire_bytes",
    "total_dense_bytes",
    "total_compression_ratio",
    "total_steps",
    "exposed_share",
    "select_seconds",
    "exchange_seconds",
    "exposed_seconds",
}
# What the monitor logs beside them.
MEASURED = {"backward_seconds", "commit_seconds", "step_seconds", "samples_per_second", "residual_to_gradient"}
