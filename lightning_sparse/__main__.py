"""``python -m lightning_sparse`` is the command ``lightning-sparse``."""

from lightning_sparse.cli import main

if __name__ == "__main__":
    main()
