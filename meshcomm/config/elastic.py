"""The `[elastic]` section: what happens when ranks are lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from meshcomm.config.problems import Problem
from meshcomm.config.section import FrozenTable, NoEffect, Seconds, Section, Table


def _one_dim(elastic: ElasticConfig) -> Iterator[Problem]:
    if len(elastic.min) > 1:
        ways = [f"elastic.min = {{{name} = {size}}}" for name, size in elastic.min.items()]
        yield Problem(
            "min",
            f"{len(elastic.min)} dims",
            "one dim, along which copies of the model continue",
            ways,
            elastic.written("min"),
        )


class ElasticConfig(Section):
    """`[elastic]`: how the launcher reacts to lost ranks. Default: the job ends."""

    place = "elastic"
    rules = (
        NoEffect("patience_s", "min", why=": without it, the other ranks always wait for a new process"),
        NoEffect("delay_s", "replace", way="replace = 3"),
        NoEffect("copy_every", "replace min", way="replace = 3"),
        _one_dim,
    )
    replace: int = Field(default=0, ge=0, examples=[3])
    """Maximum number of lost ranks to replace with new processes while the other ranks stay alive. Default 0: none."""
    min: FrozenTable[Annotated[int, Field(ge=1)]] = Field(default_factory=Table, examples=[{"dp": 2}])
    """Smallest size of a dim, by dim name, at which the job continues if a rank cannot be replaced. The global batch
    size does not change. The mesh grows back when a new process joins. Default: the job ends.
    """
    patience_s: Seconds = Field(default=0.0, ge=0)
    """With min: seconds to wait for a new process before continuing with fewer ranks. Default 0."""
    delay_s: Seconds = Field(default=0.0, ge=0)
    """With replace: seconds between the loss of a rank and the start of its new process, for example to let a device
    recover. Default 0.
    """
    copy_every: int = Field(default=0, ge=0, examples=[10])
    """With replace or min: number of steps between copies to host memory. Each rank copies its own state and the preceding
    rank's state. If no other rank holds the lost rank's shards, as when only shard, pipeline or tensor is used, all ranks
    return to the last copies. Default 0: all ranks return to the last checkpoint.
    """
