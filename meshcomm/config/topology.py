"""Which ranks share a node, and how fast are the links? The `[topology]` section."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from meshcomm.config.model import Model
from meshcomm.config.problems import Broken, Problem, either
from meshcomm.config.wording import toml


class Link(Model):
    """`[topology.links.NAME]`: how fast one rank reaches another over this link."""

    latency_us: float = Field(ge=0, description="Microseconds until the first byte arrives.", examples=[10.0])
    bandwidth_gbytes_s: float = Field(
        gt=0, description="Gigabytes (10^9 bytes) per second, one direction, one rank.", examples=[50.0]
    )


class Links(Model):
    """`[topology.links]`: the link inside a node and the one between nodes."""

    node: Link | None = Field(default=None, description="Between ranks of one node. None: not known.")
    network: Link | None = Field(default=None, description="Between ranks of two nodes. None: not known.")


class TopologyConfig(Model):
    """`[topology]`: how the ranks lie on machines. Default: not known."""

    ranks_per_node: int | None = Field(
        default=None,
        ge=1,
        description="Ranks r with equal r // ranks_per_node share a node. None: not known.",
    )
    links: Links = Field(default=Links(), description="Speed of the links. Default: not known.")

    def problems(self, broken: Broken) -> Iterator[Problem]:
        """See Model.problems."""
        named = [name for name in ("node", "network") if getattr(self.links, name) is not None]
        if named and self.ranks_per_node is None and not broken.touches("ranks_per_node"):
            yield Problem(
                "links",
                "no effect without ranks_per_node",
                given=f"links = {toml(self.links)}",
                expected="ranks_per_node beside it, which says who crosses which link",
                hint=either(["topology.ranks_per_node = 8", "remove topology.links"]),
            )
