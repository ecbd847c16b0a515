"""Run Python in a new environment with the oldest or newest packages that setup.cfg allows."""

import configparser
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]


def requirements(which):
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    asked = settings["options"]["install_requires"] + settings["options.extras_require"]["test"]
    lines = asked.split("\n")
    if which == "oldest":
        lines = [re.sub(r">=([\w.]+).*", r"==\1", line) for line in lines]
    return [line for line in lines if line]


def main(which, *words):
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        install = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir"]
        subprocess.run([*install, *requirements(which)], check=True)
        subprocess.run([*install, "--no-deps", "--editable", str(ROOT)], check=True)
        subprocess.run([python, "-m", "pip", "freeze"], check=True)
        return subprocess.run([python, *words], cwd=ROOT).returncode


if __name__ == "__main__":
    if sys.argv[1:2] not in (["oldest"], ["newest"]) or len(sys.argv) == 2:
        sys.exit("usage: versions.py oldest|newest ARGUMENTS-OF-PYTHON")
    sys.exit(main(*sys.argv[1:]))
