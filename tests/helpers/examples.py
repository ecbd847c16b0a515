"""Import the example scripts with their folder on the path, as Python does."""

import importlib
import sys
from pathlib import Path
from unittest import mock

EXAMPLES = Path(__file__).parents[2] / "examples"
BENCHMARKS = EXAMPLES / "benchmarks"


def load(name):
    with mock.patch.object(sys, "path", [str(BENCHMARKS), str(EXAMPLES), *sys.path]):
        return importlib.import_module(name)
