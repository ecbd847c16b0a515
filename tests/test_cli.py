"""The command line."""

import subprocess
import sys

MODEL = "--model=pytorch_lightning.demos.boring_classes.BoringModel"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lightning_sparse", *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_fits_with_a_strategy_name(tmp_path) -> None:
    done = run(
        "fit",
        MODEL,
        "--trainer.strategy=sparse_topk",
        "--trainer.accelerator=cpu",
        "--trainer.devices=2",
        "--trainer.fast_dev_run=true",
        f"--trainer.default_root_dir={tmp_path}",
    )
    assert done.returncode == 0, done.stderr
    assert "All distributed processes registered. Starting with 2 processes" in done.stderr


def test_a_strategy_is_built_from_plain_arguments() -> None:
    done = run(
        "fit",
        MODEL,
        "--trainer.strategy=lightning_sparse.SparseDDPStrategy",
        "--trainer.strategy.density=0.02",
        "--trainer.strategy.schedule=lightning_sparse.schedule.FixedSize",
        "--trainer.strategy.schedule.min_elements=1000",
        "--trainer.strategy.wire=bfloat16",
        "--print_config",
    )
    assert done.returncode == 0, done.stderr
    for line in ("density: 0.02", "min_elements: 1000", "wire: bfloat16", "resume_compression: true"):
        assert line in done.stdout
    assert "gradient_as_bucket_view" not in done.stdout  # DDP's default in place of ours


def test_the_help_lists_lightnings_commands() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("fit", "validate", "test", "predict"))
