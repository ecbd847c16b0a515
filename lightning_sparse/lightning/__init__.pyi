# Written by `python -m tests.helpers.stubs` from the source that this module is made of.
from lightning_sparse.lightning.strategy import SparseDDPStrategy as SparseDDPStrategy
from lightning_sparse.lightning.strategy import SparseFabricStrategy as SparseFabricStrategy
