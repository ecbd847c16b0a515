"""Two hosts as network namespaces (root): the page on two machines."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples" / "benchmarks"))
from network import ShapedNetwork, refusal  # noqa: E402

REFUSAL = refusal()
pytestmark = [pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL)), pytest.mark.timeout(600)]


@pytest.mark.exhaustive
def test_the_page_on_two_machines_does_what_it_says(tmp_path):
    page = (ROOT / "docs" / "two-machines.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    commands = [code for language, code in blocks if language == "bash"]
    (script,), (seen,) = ([code for language, code in blocks if language == wanted] for wanted in ("python", ""))
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": paths, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    with ShapedNetwork(hosts=2, rate="1gbit", delay="0", name="lspage") as network:
        processes = []
        for host, command in enumerate(commands):
            (tmp_path / str(host)).mkdir()
            (tmp_path / str(host) / "train.py").write_text(script)
            piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            words = ["bash", "-ec", command]
            processes.append(network.start(host, words, environment, cwd=tmp_path / str(host), **piped))
        first, second = (process.communicate(timeout=300)[0] for process in processes)
    assert [process.returncode for process in processes] == [0, 0], first + second
    positions = [first.find(line) for line in seen.splitlines()]
    assert -1 not in positions, first
    assert positions == sorted(positions)
    assert "GLOBAL_RANK: 1, MEMBER: 2/2" in second
