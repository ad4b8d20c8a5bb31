"""A cluster's levels: which ranks share a node or a rack, how fast each link is, and which links a group crosses."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Final, NamedTuple, final

import numpy as np

from meshcomm.config import Link, TopologyConfig
from meshcomm.config.of_model import TOPOLOGY
from meshcomm.errors import ConfigError
from meshcomm.layout import Ranks

# Assumed, not measured: realistic speeds per GPU of a machine like NVIDIA's DGX H100, over NVLink
# and over its share of eight 400 Gbit/s ports. `[topology.links]` overrides them.
ASSUMED_NODE, ASSUMED_NETWORK = (Link(**TOPOLOGY["links"][name]) for name in ("node", "network"))
# The throughput of Llama 3 405B training on an H100 in bfloat16 (380 to 430 TFLOPS, Grattafiori et al. 2024), and the H100's
# memory. `[topology]` overrides them.
ASSUMED_TFLOPS, ASSUMED_MEMORY_GB = float(TOPOLOGY["tflops"]), float(TOPOLOGY["memory_gbytes"])
# The environment variables in which torchrun and MPI give the number of ranks on this node.
_LOCAL_SIZES: Final = (
    "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE",
)  # fmt: skip


class Level(NamedTuple):
    """One link class. ranks: ranks r with equal r // `ranks` are connected by this link or a faster one.

    The outermost level connects all ranks, and its `ranks` is 0. alpha_s, beta_s: seconds per message and per byte, as
    exact fractions of the configured decimals. assumed: whether the speed is assumed because it was not configured.
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
    """The levels of a cluster, innermost first. call_s: the fixed cost of each call, in addition to its messages.

    places: the place of each rank (see `places_of`), if nodes do not hold consecutive blocks of ranks. Levels then connect
    places instead of ranks.
    """

    levels: tuple[Level, ...]
    call_s: Fraction = Fraction(0)
    places: tuple[int, ...] = ()

    @property
    def ranks_per_node(self) -> int:
        """Ranks r with equal r // ranks_per_node share a node."""
        return self.levels[0].ranks


@final
class Placed(TopologyConfig):
    """A topology whose nodes do not hold equal blocks of ranks, as with `srun -m cyclic`. A live mesh can detect this
    placement.

    ranks_per_node: the number of ranks on the largest node.
    """

    nodes: tuple[int, ...]
    """The node of each rank."""


def places_of(topology: TopologyConfig, ranks: Ranks) -> Ranks:
    """Return each rank's place: place // ranks_per_node is its node, and place % ranks_per_node its index in the node.

    >>> places_of(Placed(ranks_per_node=2, nodes=(0, 1, 0, 1)), np.arange(4)).tolist()
    [0, 2, 1, 3]
    """
    if not isinstance(topology, Placed):
        return ranks
    assert topology.ranks_per_node is not None
    nodes = np.array(topology.nodes)
    order = nodes.argsort(kind="stable")
    ascending = nodes[order]
    places = np.empty_like(nodes)
    places[order] = ascending * topology.ranks_per_node + np.arange(len(nodes))
    places[order] -= np.searchsorted(ascending, ascending)
    of_ranks: Ranks = places[ranks]
    return of_ranks


def nodes_of(topology: TopologyConfig, ranks: Ranks) -> Ranks | None:
    """Return each rank's node, or None without ranks_per_node."""
    per_node = topology.ranks_per_node
    return None if per_node is None else places_of(topology, ranks) // per_node


def machine(topology: TopologyConfig) -> Machine | None:
    """Return the levels that `[topology]` describes, or None without ranks_per_node. Unknown speeds get default values."""
    per_node, links = topology.ranks_per_node, topology.links
    if per_node is None:
        return None
    levels = [_level("node", per_node, links.node, ASSUMED_NODE)]
    if topology.nodes_per_rack is not None:
        rack = per_node * topology.nodes_per_rack
        levels.append(_level("rack", rack, links.rack or links.network, ASSUMED_NETWORK))
    levels.append(_level("network", 0, links.network, ASSUMED_NETWORK))
    world = np.arange(len(topology.nodes)) if isinstance(topology, Placed) else np.arange(0)
    return Machine(
        tuple(levels), _exact(topology.call_us) / 10**6, tuple(places_of(topology, world).tolist())
    )


def known_machine(topology: TopologyConfig, source: str) -> Machine:
    """Like `machine`, but raises ConfigError if it is unknown which ranks share a node. source: the config's filename."""
    known = machine(topology)
    if known is None:
        raise ConfigError(
            "it is not known which ranks share a node",
            given=f"{source} without topology.ranks_per_node, and no launcher's LOCAL_WORLD_SIZE",
            expected="a number of ranks on each node",
            hint="--set topology.ranks_per_node=8",
        )
    return known


def discovered(
    topology: TopologyConfig, env: Mapping[str, str], per_host: int | None = None, nodes: Sequence[int] = ()
) -> TopologyConfig:
    """Return `topology` with ranks_per_node and devices_per_node filled in from `env`, if a launcher sets them.

    The configuration takes precedence. If nodes have unequal numbers of ranks, or with `srun -m cyclic`, Slurm's value is
    ignored, because rank r is then not on node r // ranks_per_node. per_host, nodes: what the ranks themselves detected, see
    `Agreed`; both override the launcher. per_host is None if the ranks did not check.
    """
    # The format is 8(x4) or 8(x3),4. Only the first means that all nodes have the same number of ranks.
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or ""
    blocks = (env.get("SLURM_DISTRIBUTION") or "block").startswith("block")
    even = re.fullmatch(r"(\d+)(?:\(x\d+\))?", tasks) if blocks else None
    visible = [name for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    values = {
        "ranks_per_node": [*(env.get(name) for name in _LOCAL_SIZES), even and even[1]],
        "devices_per_node": [env.get("SLURM_GPUS_ON_NODE"), str(len(visible))],
    }
    numbers_of: dict[str, int | None] = {}
    for name, texts in values.items():
        numbers = [int(text) for text in texts if text and text.isdecimal() and int(text) >= 1]
        if numbers and getattr(topology, name) is None:
            numbers_of[name] = numbers[0]
    if per_host is not None and numbers_of.get("ranks_per_node", per_host) != per_host:
        numbers_of["ranks_per_node"] = per_host or None
    if nodes and topology.ranks_per_node is None:
        numbers_of["ranks_per_node"] = max(Counter(nodes).values())
        return Placed(**{**dict(topology), **numbers_of, "nodes": tuple(nodes)})
    return topology.model_copy(update=numbers_of)


def _level(name: str, ranks: int, link: Link | None, assumed: Link) -> Level:
    settings = assumed if link is None else link
    alpha_s, bytes_per_s = _exact(settings.latency_us) / 10**6, _exact(settings.bandwidth_gbytes_s) * 10**9
    return Level(name, ranks, alpha_s, 1 / bytes_per_s, link is None)


def _exact(number: float) -> Fraction:
    """Return the number as the decimal fraction that was written, not as the nearest binary fraction."""
    return Fraction(str(number))


# -- groups -----------------------------------------------------------------------------------------


class Hop(NamedTuple):
    """One level of a group. ranks: how many units of the next lower level this level connects.

    alpha_s: exact seconds per message. beta_s: exact seconds per byte.
    """

    ranks: int
    alpha_s: Fraction
    beta_s: Fraction


class Route(NamedTuple):
    """The links that a group's data crosses, innermost first. These links and the size determine a call's time.

    hops: the levels with at least two units. even: whether all units hold the same number of ranks, which hierarchical
    algorithms require; otherwise there is one hop over all ranks on the slowest link. call_s: the fixed cost per call.
    """

    hops: tuple[Hop, ...]
    even: bool = True
    call_s: Fraction = Fraction(0)

    @property
    def ranks(self) -> int:
        """The number of ranks in the group."""
        return math.prod(hop.ranks for hop in self.hops)

    @property
    def slowest(self) -> Hop:
        """One hop that connects all ranks by the outermost link, for an algorithm without levels."""
        if not self.hops:
            return Hop(1, Fraction(0), Fraction(0))
        return self.hops[-1]._replace(ranks=self.ranks)


class Span(NamedTuple):
    """All groups of one family on a machine.

    size: the number of ranks per group. fewest, most: the smallest and largest number of nodes that a group spans.
    route: the route of the groups' data. crosses: level name -> the number of groups whose slowest link is of that class.
    """

    size: int
    fewest: int
    most: int
    crosses: dict[str, int]
    route: Route

    @property
    def slowest(self) -> str | None:
        """The slowest link class that any group crosses; None for groups of one."""
        return next((name for name, groups in reversed(self.crosses.items()) if groups), None)


def span(groups: Ranks, machine: Machine) -> Span:
    """Return which links the groups cross. groups: global ranks of shape (number of groups, size), as returned by
    `Layout.groups`.
    """
    size = groups.shape[1]
    levels = machine.levels
    if machine.places:
        groups = np.array(machine.places)[groups]
    # The unit of each level that each rank is in, sorted within each group.
    units = [np.sort(groups // level.ranks if level.ranks else 0 * groups, axis=1) for level in levels]
    distinct = np.array([1 + (np.diff(unit, axis=1) != 0).sum(axis=1) for unit in units])
    # For each group, the innermost level that connects all of its ranks.
    joins = (distinct == 1).argmax(axis=0)
    crosses = {level.name: int((joins == i).sum()) * (size > 1) for i, level in enumerate(levels)}
    factors = _factors(units, size)
    pairs = zip(factors, levels, strict=True) if factors is not None else [(size, levels[joins.max()])]
    hops = tuple(Hop(n, level.alpha_s, level.beta_s) for n, level in pairs if n > 1)
    route = Route(hops, factors is not None, machine.call_s)
    return Span(size, int(distinct[0].min()), int(distinct[0].max()), crosses, route)


def slowest_level(span: Span, machine: Machine) -> Level:
    """Return the level of the slowest link that a group crosses, or the innermost level for groups of one."""
    return next((level for level in machine.levels if level.name == span.slowest), machine.levels[0])


def strided(dims: Sequence[tuple[int, int]], world: int, machine: Machine) -> Ranks:
    """Return the groups along dims with the given (size, stride) pairs, in a world whose ranks are in row-major mesh order.

    A group's placement depends only on its first rank modulo the largest unit, so one group is returned per placement.
    """
    period = max(level.ranks for level in machine.levels)
    block = max(size * stride for size, stride in dims)
    first = np.arange(min(world, math.lcm(block, period)))
    group = np.zeros(1, dtype=np.int64)
    for size, stride in dims:
        first = first[first // stride % size == 0]
        group = np.add.outer(group, stride * np.arange(size)).reshape(-1)
    first = first[np.unique(first % period, return_index=True)[1]]
    return np.add.outer(first, group)


def _factors(units: list[Ranks], size: int) -> list[int] | None:
    """Return how the ranks of a group divide into units, as one factor per level. [4, 2, 3] means 4 ranks on each node, 2
    nodes in each rack and 3 racks. Return None if the units hold different numbers of a group's ranks.
    """
    factors: list[int] = []
    inner = 1
    for unit in units:
        number = int(1 + (np.diff(unit[0]) != 0).sum())
        length, rest = divmod(size, number)
        if rest:
            return None
        blocks = unit.reshape(len(unit), number, length)
        if (blocks != blocks[:, :, :1]).any() or (np.diff(blocks[:, :, 0], axis=1) == 0).any():
            return None
        factors.append(length // inner)
        inner = length
    return factors
