"""From whatever describes a mesh to its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from meshcomm.config.file import load
from meshcomm.config.mesh import MeshConfig
from meshcomm.config.root import Config
from meshcomm.layout import Plan


def plan(
    config: str | PathLike[str] | Mapping[str, Any] | Config | MeshConfig,
    world_size: int | None = None,
    overrides: Sequence[str] = (),
) -> Plan:
    """Every group of a mesh on `world_size` processes, in the order in which they are created.

    No process, no GPU and no torch is needed; `Plan.for_rank` answers for any rank.
    world_size: None where every size is given.
    Raises ConfigError where the config is wrong or does not fit the world.
    """
    if isinstance(config, MeshConfig):
        config = Config(mesh=config)
    return load(config, overrides).plan(world_size)
