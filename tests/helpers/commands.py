"""Programs that tests start as a user does, or begin in processes that have imported already what takes seconds."""

import contextlib
import io
import logging
import os
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

import lightning_sparse

COMMAND = str(Path(lightning_sparse.__file__).with_name("__main__.py"))
MODEL = "--model=pytorch_lightning.demos.boring_classes.BoringModel"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line."""
    command = [sys.executable, "-m", "lightning_sparse", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def run_pytest(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run pytest in a folder of the user's; return how it ended, and all it said."""
    command = [sys.executable, "-m", "pytest", *arguments, "-q", "-p", "no:cacheprovider"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
    return ended.returncode, ended.stdout + ended.stderr


def begin(rank: int, script: str, arguments: tuple[str, ...], folder: str) -> str:
    """Run a script as one of the processes that a launcher has started; return all it said."""
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", JSONARGPARSE_DEPRECATION_WARNINGS="off")
    said = io.StringIO()
    with contextlib.ExitStack() as stack:
        for context in (
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
            mock.patch.object(sys, "argv", [script, *arguments]),
            mock.patch.object(sys, "path", [str(Path(script).parent), *sys.path]),
            warnings.catch_warnings(),
        ):
            stack.enter_context(context)  # type: ignore[arg-type]
        stack.callback(os.chdir, os.getcwd())
        os.chdir(folder)
        warnings.simplefilter("default")
        for name in ("pytorch_lightning", "lightning_sparse"):
            handler = logging.StreamHandler(said)
            logging.getLogger(name).addHandler(handler)
            stack.callback(logging.getLogger(name).removeHandler, handler)
        runpy.run_path(script, run_name="__main__")
    return said.getvalue()
