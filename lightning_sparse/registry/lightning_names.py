"""Lightning's two names: which one a process uses, and what to say to whoever mixes them."""

import sys
from collections.abc import Mapping

# By the name under which a user knows Lightning, where our classes for it are.
DOORS = {"pytorch_lightning": "lightning_sparse", "lightning.pytorch": "lightning_sparse.lightning"}
# The same for Fabric.
FABRICS = {"lightning_fabric": "lightning_sparse", "lightning.fabric": "lightning_sparse.lightning"}


def present_door(doors: Mapping[str, str] = DOORS) -> str:
    """Return where our classes are for the Lightning that this process has imported first, or would be expected to."""
    return next((doors[name] for name in sys.modules if name in doors), "lightning_sparse")


def door_of(module: str) -> str:
    """Return the name of Lightning that a module of it belongs to; the module itself if it is no Lightning.

    Example::

        >>> door_of("lightning.pytorch.trainer.trainer")
        'lightning.pytorch'
    """
    return next((door for door in (*DOORS, *FABRICS) if f"{module}.".startswith(f"{door}.")), module)


def where_to_import(module: str, part: str = "") -> str:
    """Say for which Lightning a class of ours is that builds on a class in ``module``, and where those for others are.

    Example::

        >>> where_to_import("pytorch_lightning.callbacks.callback", ".callbacks")
        'for pytorch_lightning; for lightning.pytorch, import it from lightning_sparse.lightning.callbacks'
    """
    ours = door_of(module)
    doors = FABRICS if ours in FABRICS else DOORS
    others = [f"for {door}, import it from {package}{part}" for door, package in doors.items() if door != ours]
    return "; ".join([f"for {ours}", *others])
