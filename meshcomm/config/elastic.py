"""What happens when ranks are lost? The `[elastic]` section."""

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
            "the one along which copies of the model go on",
            ways,
            elastic.written("min"),
        )


class ElasticConfig(Section):
    """`[elastic]`: what a launcher does when ranks are lost. Default: the job ends."""

    place = "elastic"
    rules = (_one_dim,)
    no_effect = (
        NoEffect("patience_s", "min", why=": without it the others always wait for a new process"),
        NoEffect("delay_s", "replace", way="replace = 3"),
        NoEffect("copy_every", "replace", way="replace = 3"),
    )
    replace: int = Field(default=0, ge=0, examples=[3])
    """How many ranks that are lost get a new process, while the others run on. Default 0: none."""
    min: FrozenTable[Annotated[int, Field(ge=1)]] = Field(default_factory=Table, examples=[{"dp": 2}])
    """A dim -> the fewest along it that the job goes on with where there is no new process, with the same global batch. It
    grows back when one comes. Default: the job ends."""
    patience_s: float = Field(default=0.0, ge=0)
    """With min: seconds that the others wait for a new process before they go on with fewer. Default 0."""
    delay_s: float = Field(default=0.0, ge=0)
    """With replace: seconds after a loss until the new process is started, as for a device that has to recover. Default 0."""
    copy_every: int = Field(default=0, ge=0, examples=[10])
    """With replace: after every so many steps each rank keeps a copy of its state, and one of the rank before it, in host
    memory. Where nobody else has the parts of a lost rank, as along shard, pipeline or tensor alone, all go back to the last
    copies. Default 0: to the last checkpoint."""
