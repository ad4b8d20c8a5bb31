"""Which ranks share a node and a rack, and how fast are links and devices? The `[topology]` section."""

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
    """`[topology.links]`: the links inside a node, between nodes of a rack, and beyond."""

    node: Link | None = Field(default=None, description="Between ranks of one node. None: not known.")
    rack: Link | None = Field(
        default=None, description="Between nodes of one rack, with nodes_per_rack. None: as network."
    )
    network: Link | None = Field(default=None, description="Between ranks of two nodes. None: not known.")


class TopologyConfig(Model):
    """`[topology]`: how the ranks lie on machines. Default: not known."""

    ranks_per_node: int | None = Field(
        default=None,
        ge=1,
        description="Ranks r with equal r // ranks_per_node share a node. None: not known.",
    )
    nodes_per_rack: int | None = Field(
        default=None,
        ge=1,
        description="Nodes n with equal n // nodes_per_rack share a rack. None: no racks are told apart.",
    )
    links: Links = Field(default=Links(), description="Speed of the links. Default: not known.")
    call_us: float = Field(
        default=0.0,
        ge=0,
        description="Microseconds that each call costs beside its messages. Default 0.",
    )
    devices_per_node: int | None = Field(
        default=None, ge=1, description="Accelerators of a node; for `meshcomm lint`. None: not known."
    )
    memory_gbytes: float | None = Field(
        default=None,
        gt=0,
        description="Gigabytes (10^9 bytes) of memory of one rank; for `meshcomm place` and `lint`. None: not known.",
    )
    tflops: float | None = Field(
        default=None,
        gt=0,
        description="10^12 floating-point operations that one rank does in a second of training; for "
        "`meshcomm place`. None: not known.",
    )

    def problems(self, broken: Broken) -> Iterator[Problem]:
        """See Model.problems."""
        named = [name for name in ("node", "rack", "network") if getattr(self.links, name) is not None]
        if self.ranks_per_node is None and not broken.touches("ranks_per_node"):
            if named:
                yield Problem(
                    "links",
                    "no effect without ranks_per_node",
                    given=f"links = {toml(self.links)}",
                    expected="ranks_per_node beside it, which says who crosses which link",
                    hint=either(["topology.ranks_per_node = 8", "remove topology.links"]),
                )
            if self.nodes_per_rack is not None:
                yield Problem(
                    "nodes_per_rack",
                    "no effect without ranks_per_node",
                    given=f"nodes_per_rack = {self.nodes_per_rack}",
                    expected="ranks_per_node beside it, which says what a node is",
                    hint=either(["topology.ranks_per_node = 8", "remove topology.nodes_per_rack"]),
                )
        if (
            self.links.rack is not None
            and self.nodes_per_rack is None
            and not broken.touches("nodes_per_rack")
        ):
            yield Problem(
                "links.rack",
                "no effect without nodes_per_rack",
                given=f"links.rack = {toml(self.links.rack)}",
                expected="nodes_per_rack beside it, which says who shares a rack",
                hint=either(["topology.nodes_per_rack = 4", "remove topology.links.rack"]),
            )
