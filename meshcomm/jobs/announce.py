"""A word on the terminal before torch is loaded, which takes seconds."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Final

# What a launcher tells a rank; its ranks say nothing of their start.
_RANKS: Final = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")


def announce(mesh: Mapping[str, int] | None, world: int | None) -> None:
    """Say on stderr, where that is a terminal, that ranks are being started; nothing in a launcher's rank."""
    if sys.stderr.isatty() and not any(name in os.environ for name in _RANKS):
        sizes = "" if mesh is None else " " + " ".join(f"{name}={size}" for name, size in mesh.items())
        ranks = "" if world is None else f" of {world:,} ranks"
        print(f"starting the mesh{sizes}{ranks}: loading torch ...", file=sys.stderr, flush=True)
