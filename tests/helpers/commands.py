"""Programs that tests start as a user does."""

import subprocess
import sys
from pathlib import Path

MODEL = "--model=pytorch_lightning.demos.boring_classes.BoringModel"


def run(*arguments: str, command: tuple[str, ...] = ("-m", "lightning_sparse")) -> subprocess.CompletedProcess[str]:
    """Run the command line."""
    return subprocess.run(
        [sys.executable, *command, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def run_pytest(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run pytest in a folder of the user's; return how it ended, and all it said."""
    command = [sys.executable, "-m", "pytest", *arguments, "-q", "-p", "no:cacheprovider"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
    return ended.returncode, ended.stdout + ended.stderr
