"""How a mesh test's body is run on every rank: one interface, and a way for each `via`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import pytest

from meshcomm.testing.marker import MeshRequest
from meshcomm.testing.outcome import Ends
from meshcomm.testing.pool import Pool

Way: TypeAlias = Callable[[pytest.Function, MeshRequest], Ends]
"""Runs a test's body on every rank. Raises MeshTestError or ConfigError where it cannot be begun."""

POOL: pytest.StashKey[Pool] = pytest.StashKey()


def way(via: str, config: pytest.Config) -> Way:
    """The way that a marker or `--mesh-via` calls `via`."""
    if via == "simulator":
        from meshcomm.testing import simulated

        return simulated.run
    from meshcomm.testing import processes

    return partial(processes.run, pool=pool_of(config))


def pool_of(config: pytest.Config) -> Pool:
    """The run's warm ranks, forked when they are first asked for."""
    if POOL not in config.stash:
        always = ("torch", "torch.distributed", "meshcomm.mesh", "meshcomm.testing.body")
        config.stash[POOL] = Pool((*always, *config.getini("mesh_preload")))
    return config.stash[POOL]
