"""The `[elastic]` section: what happens when ranks are lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from meshcomm.config.problems import Problem
from meshcomm.config.section import FrozenTable, NoEffect, Section, Table


def _one_dim(elastic: ElasticConfig) -> Iterator[Problem]:
    if len(elastic.min) > 1:
        ways = [f"elastic.min = {{{name} = {size}}}" for name, size in elastic.min.items()]
        yield Problem(
            "min",
            f"{len(elastic.min)} dims",
            "the one along which copies of the model continue",
            ways,
            elastic.written("min"),
        )


class ElasticConfig(Section):
    """`[elastic]`: how the launcher reacts to lost ranks. Default: the job ends."""

    place = "elastic"
    rules = (_one_dim,)
    no_effect = (
        NoEffect("patience_s", "min", why=": without it the others always wait for a new process"),
        NoEffect("delay_s", "replace", way="replace = 3"),
        NoEffect("copy_every", "replace", way="replace = 3"),
    )
    replace: int = Field(default=0, ge=0, examples=[3])
    """How many lost ranks are replaced by new processes while the other ranks stay alive. Default 0: none."""
    min: FrozenTable[Annotated[int, Field(ge=1)]] = Field(default_factory=Table, examples=[{"dp": 2}])
    """Dim -> smallest size at which the job continues when a rank cannot be replaced, with the same global
    batch. The mesh grows back when a new process arrives. Default: the job ends.
    """
    patience_s: float = Field(default=0.0, ge=0)
    """With min: seconds to wait for a new process before continuing with fewer ranks. Default 0."""
    delay_s: float = Field(default=0.0, ge=0)
    """With replace: seconds between a loss and the start of the new process, for example to let a device recover.
    Default 0.
    """
    copy_every: int = Field(default=0, ge=0, examples=[10])
    """With replace: interval in steps at which each rank copies its state, and the state of the rank before it, to
    host memory. If no other rank holds the parts of a lost rank, as with only shard, pipeline or tensor, all
    ranks return to the last copies. Default 0: they return to the last checkpoint.
    """
