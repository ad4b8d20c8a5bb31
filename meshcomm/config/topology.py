"""Which ranks share a node and a rack, and how fast are links and devices? The `[topology]` section."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from meshcomm.config.problems import Problem
from meshcomm.config.section import Section, no_effect, rule, setting


class Link(Section):
    """`[topology.links.NAME]`: how fast one rank reaches another over this link."""

    latency_us: float = Field(ge=0, description="Microseconds until the first byte arrives.", examples=[10.0])
    bandwidth_gbytes_s: float = Field(
        gt=0, description="Gigabytes (10^9 bytes) per second, one direction, one rank.", examples=[50.0]
    )


class Links(Section):
    """`[topology.links]`: the links inside a node, between nodes of a rack, and beyond."""

    node: Link | None = setting(None, "Between ranks of one node. None: not known.")
    rack: Link | None = setting(None, "Between nodes of one rack, with nodes_per_rack. None: as network.")
    network: Link | None = setting(None, "Between ranks of two nodes. None: not known.")


class TopologyConfig(Section):
    """`[topology]`: how the ranks lie on machines. Default: not known."""

    place = "topology"
    ranks_per_node: int | None = setting(
        None, "Ranks r with equal r // ranks_per_node share a node. None: not known.", ge=1
    )
    nodes_per_rack: int | None = setting(
        None, "Nodes n with equal n // nodes_per_rack share a rack. None: no racks are told apart.", ge=1
    )
    links: Links = Field(default=Links(), description="Speed of the links. Default: not known.")
    call_us: float = setting(0.0, "Microseconds that each call costs beside its messages.", ge=0)
    devices_per_node: int | None = setting(
        None, "Accelerators of a node; for `meshcomm lint`. None: not known.", ge=1
    )
    memory_gbytes: float | None = setting(
        None,
        "Gigabytes (10^9 bytes) of memory of one rank; for `meshcomm place` and `lint`. None: not known.",
        gt=0,
    )
    tflops: float | None = setting(
        None,
        "10^12 floating-point operations that one rank does in a second of training; for "
        "`meshcomm place`. None: not known.",
        gt=0,
    )


_NODE = "topology.ranks_per_node = 8"
no_effect(
    TopologyConfig,
    "links",
    "ranks_per_node",
    lambda topology: topology.ranks_per_node or not any(dict(topology.links).values()),
    "ranks_per_node beside it, which says who crosses which link",
    _NODE,
    why=" without ranks_per_node",
)
no_effect(
    TopologyConfig,
    "nodes_per_rack",
    "ranks_per_node",
    lambda topology: topology.ranks_per_node,
    "ranks_per_node beside it, which says what a node is",
    _NODE,
    why=" without ranks_per_node",
)


@rule(TopologyConfig, "links", "nodes_per_rack")
def _racks(topology: TopologyConfig) -> Iterator[Problem]:
    if topology.links.rack is not None and topology.nodes_per_rack is None:
        expected = "nodes_per_rack beside it, which says who shares a rack"
        ways = ["topology.nodes_per_rack = 4", "remove topology.links.rack"]
        yield Problem("no effect without nodes_per_rack", expected, ways, key="links.rack")
