"""Start programs as a user does, or fork them from a process with slow imports already done."""

import contextlib
import io
import json
import logging
import os
import runpy
import secrets
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest

import lightning_sparse
from lightning_sparse.cli import main

_ROOT = Path(lightning_sparse.__file__).parents[1]
COMMAND = str(Path(lightning_sparse.__file__).with_name("__main__.py"))
MODEL = "--model=pytorch_lightning.demos.boring_classes.BoringModel"


def run_pytest(folder, *arguments):
    command = [sys.executable, "-m", "pytest", *arguments, "-q", "-p", "no:cacheprovider"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
    return ended.returncode, ended.stdout + ended.stderr


def refusal(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        main([*words])
    assert stop.value.code == 2
    return capsys.readouterr().err.splitlines()


# Imports of Lightning that are not part of Lightning: two thirds of a script's start-up time.
_IMPORTED = "torch._dynamo, torch.distributed.fsdp, torch.utils.tensorboard, torchmetrics, tqdm, yaml, jsonargparse"
_LIMIT = 240  # Seconds, less than a test's timeout: a rank that hangs prints its stacks.
_SERVER = f"""
import faulthandler, json, os, runpy, signal, sys
import {_IMPORTED}

def forked():
    for line in sys.stdin:
        asked = json.loads(line)
        children = []
        for rank in asked["ranks"]:
            children.append(os.fork())
            if not children[-1]:
                return asked, rank
        codes = {{}}
        while len(codes) < len(children):
            child, status = os.wait()
            codes[child] = os.waitstatus_to_exitcode(status)
            for other in set(children) - set(codes) if status else ():
                os.kill(other, signal.SIGKILL)
        print(json.dumps([codes[child] for child in children]), flush=True)
    os._exit(0)

asked, rank = forked()
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
for number, name in enumerate(("out", "err"), 1):
    os.dup2(os.open(rank[name], os.O_WRONLY), number)
faulthandler.dump_traceback_later({_LIMIT}, exit=True)
os.chdir(asked["folder"])
os.environ.clear()
os.environ.update(rank["environment"])
sys.argv = asked["words"]
sys.path[:1] = [os.path.dirname(asked["words"][0]), *os.environ["PYTHONPATH"].split(os.pathsep)]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


class Interpreter:
    """A process with Lightning's dependencies imported, but not Lightning.

    Each script runs in a fork of this process.
    """

    def __init__(self):
        words = [sys.executable, "-c", _SERVER]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._server = subprocess.Popen(words, **pipes, env=environment, start_new_session=True)

    def run(self, path, *arguments, environment=None, folder=None, ranks=1):
        """Run a script in its folder, as a single process or as the ranks of a torchrun job."""
        if environment is None:
            environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
        job = {
            "WORLD_SIZE": str(ranks),
            "NODE_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            # Outgoing connections of other tests take their ports from 32768 on.
            "MASTER_PORT": str(10_000 + secrets.randbelow(20_000)),
        }
        with tempfile.TemporaryDirectory() as said:
            asked = []
            for rank in range(ranks):
                of_rank = {**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
                files = {name: f"{said}/{rank}.{name}" for name in ("out", "err")}
                for file in files.values():
                    Path(file).touch()
                asked.append({"environment": {"PYTHONPATH": "", **environment, **of_rank}, **files})
            request = {"words": [str(path), *arguments], "folder": str(folder or path.parent), "ranks": asked}
            print(json.dumps(request), file=self._server.stdin, flush=True)
            codes = json.loads(self._server.stdout.readline())
            out, err = ("".join(Path(each[name]).read_text() for each in asked) for name in ("out", "err"))
            return Ended(max(codes, key=abs), out, err)

    def stop(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.communicate()


def train_as_on_page(interpreter, heading, folder):
    """Run the first script of a section on two ranks and assert that the loss at least halves."""
    text = (_ROOT / "docs" / "without-a-trainer.md").read_text().partition(f"\n{heading}\n")[2]
    (folder / "train.py").write_text(text.partition("```python\n")[2].partition("```")[0])
    ended = interpreter.run(folder / "train.py", ranks=2)
    assert ended.returncode == 0, ended.stderr
    losses = [float(line.split()[3]) for line in ended.stdout.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0] / 2
    return ended


def begin(rank, script, arguments, folder):
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
            stack.enter_context(context)
        stack.callback(os.chdir, os.getcwd())
        os.chdir(folder)
        warnings.simplefilter("default")
        for name in ("pytorch_lightning", "lightning_sparse"):
            handler = logging.StreamHandler(said)
            logging.getLogger(name).addHandler(handler)
            stack.callback(logging.getLogger(name).removeHandler, handler)
        runpy.run_path(script, run_name="__main__")
    return said.getvalue()
