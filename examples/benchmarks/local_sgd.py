"""Train the image example with local SGD: each rank alone, and the average of their parameters every so often.

What A2SGD is without the two numbers that it sends, to see what these do::

    python examples/benchmarks/local_sgd.py --param-sync-every 50
    python examples/benchmarks/local_sgd.py --param-sync-every 50 --means     # A2SGD with the same averaging

All other flags are train_image.py's.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pytorch_lightning.strategies import StrategyRegistry
from torch import Tensor
from typing_extensions import override

from lightning_sparse import Selection, SparseDDPStrategy
from lightning_sparse.compressors import A2SGD, Gather

sys.path.insert(0, str(Path(__file__).parent.parent))
import train_image  # the example lies beside this folder


class LocalSGD(A2SGD):
    """Send nothing between two averages."""

    @override
    def finish_step(
        self, names: Sequence[str], means: Sequence[Selection], finite: Tensor, all_gather: Gather
    ) -> Sequence[Selection]:
        return means


def main() -> None:
    """Register a strategy with the averaging asked for, and train with it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--param-sync-every", type=int, default=50, help="steps between two averages (default 50)")
    parser.add_argument("--means", action="store_true", help="send A2SGD's two means in every step")
    options, flags = parser.parse_known_args()
    compressor = (A2SGD if options.means else LocalSGD)(options.param_sync_every)
    StrategyRegistry.register("local_sgd", SparseDDPStrategy, compressor=compressor)
    train_image.main(["--strategy", "local_sgd", *flags])


if __name__ == "__main__":
    main()
