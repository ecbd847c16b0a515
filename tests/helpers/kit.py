"""The conformance kit, run on a module of the user's in processes that start at once, and forget it."""

import sys
from unittest import mock

import pytest
from lightning_fabric.strategies import STRATEGY_REGISTRY
from pytorch_lightning.strategies import StrategyRegistry

from lightning_sparse.compressors import COMPRESSORS
from lightning_sparse.testing import plugin


def run_kit(forked, folder, subject, *arguments):
    """Hold the compressor of a module in a folder to the laws; return how pytest ended."""
    command = ["-p", "lightning_sparse.testing.plugin", "--compressor", subject, *arguments, "-p", "no:cacheprovider"]
    lender = mock.Mock(first=forked.__getitem__)
    stop(forked)  # so that those that start then find the module where this process does
    with (
        mock.patch.object(plugin, "Pool", return_value=lender),
        mock.patch.dict(StrategyRegistry),  # modules may register their compressors
        mock.patch.dict(STRATEGY_REGISTRY),
        mock.patch.dict(COMPRESSORS),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        try:
            return pytest.main(command)
        finally:
            stop(forked)
            sys.modules.pop(subject.partition(":")[0], None)


def stop(pools):
    for pool in pools.values():
        pool.stop()
