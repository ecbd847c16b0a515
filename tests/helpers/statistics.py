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
MEASURED = {"backward_seconds", "commit_seconds", "step_seconds", "residual_to_gradient"}
