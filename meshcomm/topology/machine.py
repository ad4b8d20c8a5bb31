"""The levels of a cluster: what shares a node, what shares a rack, and how fast each link is."""

from __future__ import annotations

from fractions import Fraction
from typing import Final, NamedTuple

from meshcomm.config import Link, TopologyConfig
from meshcomm.errors import ConfigError

# Stated, not measured: what one GPU of a machine like NVIDIA's DGX H100 reaches in practice over NVLink
# and over its share of eight 400 Gbit/s ports. `[topology.links]` replaces them.
ASSUMED_NODE: Final = Link(latency_us=2.0, bandwidth_gbytes_s=300.0)
ASSUMED_NETWORK: Final = Link(latency_us=10.0, bandwidth_gbytes_s=50.0)


class Level(NamedTuple):
    """One link class. ranks: ranks r with equal r // ranks are joined by this link or a faster one.

    The outermost level joins all ranks; its `ranks` is 0. alpha_s, beta_s: seconds of a message and of
    a byte, exactly as written. assumed: nobody has said how fast it is.
    """

    name: str
    ranks: int
    alpha_s: Fraction
    beta_s: Fraction
    assumed: bool

    def __str__(self) -> str:
        speed = f"{self.name} {float(self.alpha_s * 10**6):g} us {float(1 / self.beta_s / 10**9):g} GB/s"
        return f"{speed} (assumed)" if self.assumed else speed


class Machine(NamedTuple):
    """The levels of a cluster, innermost first; call_s: what each call costs beside its messages."""

    levels: tuple[Level, ...]
    call_s: Fraction = Fraction(0)

    @property
    def ranks_per_node(self) -> int:
        """Ranks r with equal r // ranks_per_node share a node."""
        return self.levels[0].ranks


def machine(topology: TopologyConfig) -> Machine | None:
    """The levels that `[topology]` describes, unknown speeds assumed; None without ranks_per_node."""
    per_node = topology.ranks_per_node
    if per_node is None:
        return None
    links = topology.links
    levels = [_level("node", per_node, links.node, ASSUMED_NODE)]
    if topology.nodes_per_rack is not None:
        level = _level(
            "rack", per_node * topology.nodes_per_rack, links.rack or links.network, ASSUMED_NETWORK
        )
        levels.append(level)
    levels.append(_level("network", 0, links.network, ASSUMED_NETWORK))
    return Machine(tuple(levels), _exact(topology.call_us) / 10**6)


def known_machine(topology: TopologyConfig, source: str) -> Machine:
    """As `machine`. Raises ConfigError where nobody says which ranks share a node. source: a file's name."""
    found = machine(topology)
    if found is None:
        raise ConfigError(
            "it is not known which ranks share a node",
            given=f"{source} without topology.ranks_per_node, and no launcher's LOCAL_WORLD_SIZE",
            expected="a number of ranks on each node",
            hint="--set topology.ranks_per_node=8",
        )
    return found


def _level(name: str, ranks: int, link: Link | None, assumed: Link) -> Level:
    here = assumed if link is None else link
    alpha_s, bytes_per_s = _exact(here.latency_us) / 10**6, _exact(here.bandwidth_gbytes_s) * 10**9
    return Level(name, ranks, alpha_s, 1 / bytes_per_s, link is None)


def _exact(number: float) -> Fraction:
    """The decimal number that was written, not the binary one nearest to it."""
    return Fraction(str(number))
