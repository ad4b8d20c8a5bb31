"""Which ranks share a node and a rack, and how fast are links and devices? The `[topology]` section."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from meshcomm.config.problems import Problem
from meshcomm.config.section import NoEffect, Section


class Link(Section):
    """`[topology.links.NAME]`: how fast one rank reaches another over this link."""

    latency_us: float = Field(ge=0, examples=[10.0])
    """Microseconds until the first byte arrives."""
    bandwidth_gbytes_s: float = Field(gt=0, examples=[50.0])
    """Gigabytes (10^9 bytes) per second, one direction, one rank."""


class Links(Section):
    """`[topology.links]`: the links inside a node, between nodes of a rack, and beyond."""

    node: Link | None = None
    """Between ranks of one node. None: not known."""
    rack: Link | None = None
    """Between nodes of one rack, with nodes_per_rack. None: as network."""
    network: Link | None = None
    """Between ranks of two nodes. None: not known."""


def _links(topology: TopologyConfig) -> Iterator[Problem]:
    links = topology.links
    if not topology.ranks_per_node and any(dict(links).values()):
        ways, given = (
            ["topology.ranks_per_node = 8", "remove topology.links"],
            topology.written("links ranks_per_node"),
        )
        yield Problem(
            "links", "no effect without topology.ranks_per_node", "topology.ranks_per_node", ways, given
        )
    if links.rack is not None and topology.nodes_per_rack is None:
        ways = ["topology.nodes_per_rack = 4", "remove topology.links.rack"]
        what, given = "no effect without topology.nodes_per_rack", topology.written("links nodes_per_rack")
        yield Problem("links.rack", what, "topology.nodes_per_rack", ways, given)


class TopologyConfig(Section):
    """`[topology]`: how the ranks lie on machines. Default: not known."""

    place = "topology"
    rules = (_links,)
    no_effect = (NoEffect("nodes_per_rack", "ranks_per_node", way="ranks_per_node = 8"),)
    ranks_per_node: int | None = Field(default=None, ge=1)
    """Ranks r with equal r // ranks_per_node share a node. None: not known."""
    nodes_per_rack: int | None = Field(default=None, ge=1)
    """Nodes n with equal n // nodes_per_rack share a rack. None: racks do not matter."""
    links: Links = Links()
    """Speed of the links. Default: not known."""
    call_us: float = Field(default=0.0, ge=0)
    """Microseconds that each call costs beside its messages."""
    devices_per_node: int | None = Field(default=None, ge=1)
    """Accelerators of a node; for `meshcomm lint`. None: not known."""
    memory_gbytes: float | None = Field(default=None, gt=0)
    """Gigabytes (10^9 bytes) of memory of one rank; for `meshcomm place` and `lint`. None: not known."""
    tflops: float | None = Field(default=None, gt=0)
    """10^12 floating-point operations that one rank does in a second of training; for `meshcomm place`. None: not
    known."""
