"""The levels of a cluster: what shares a node, what shares a rack, and how fast each link is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Final, NamedTuple

from meshcomm.config import Link, TopologyConfig
from meshcomm.errors import ConfigError

# Stated, not measured: what one GPU of a machine like NVIDIA's DGX H100 reaches in practice over NVLink
# and over its share of eight 400 Gbit/s ports. `[topology.links]` replaces them.
ASSUMED_NODE: Final = Link(latency_us=2.0, bandwidth_gbytes_s=300.0)
ASSUMED_NETWORK: Final = Link(latency_us=10.0, bandwidth_gbytes_s=50.0)
# What torchrun and MPI call the number of ranks on this node.
_LOCAL_SIZES: Final = (
    "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE",
)  # fmt: skip


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
    per_node, links = topology.ranks_per_node, topology.links
    if per_node is None:
        return None
    levels = [_level("node", per_node, links.node, ASSUMED_NODE)]
    if topology.nodes_per_rack is not None:
        rack = per_node * topology.nodes_per_rack
        levels.append(_level("rack", rack, links.rack or links.network, ASSUMED_NETWORK))
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


def discovered(
    topology: TopologyConfig, env: Mapping[str, str], per_host: int | None = None
) -> TopologyConfig:
    """`topology` with ranks_per_node and devices_per_node filled in from `env`, where a launcher says them there.

    What the configuration says wins. A launcher whose nodes have unequal numbers of ranks says nothing:
    ranks then do not share nodes by r // ranks_per_node. per_host: as the ranks themselves have found it, see
    `Agreed`; it counts where the launcher says something else, as with `srun -m cyclic`. None: they were not asked.
    """
    # As in 8(x4), or 8(x3),4: only the first says the same of all nodes.
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or ""
    even = re.fullmatch(r"(\d+)(?:\(x\d+\))?", tasks)
    visible = [name for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    said = {
        "ranks_per_node": [*(env.get(name) for name in _LOCAL_SIZES), even and even[1]],
        "devices_per_node": [env.get("SLURM_GPUS_ON_NODE"), str(len(visible))],
    }
    found: dict[str, int | None] = {}
    for name, texts in said.items():
        numbers = [int(text) for text in texts if text and text.isdecimal() and int(text) >= 1]
        if numbers and getattr(topology, name) is None:
            found[name] = numbers[0]
    if per_host is not None and found.get("ranks_per_node", per_host) != per_host:
        found["ranks_per_node"] = per_host or None
    return topology.model_copy(update=found)


def _level(name: str, ranks: int, link: Link | None, assumed: Link) -> Level:
    here = assumed if link is None else link
    alpha_s, bytes_per_s = _exact(here.latency_us) / 10**6, _exact(here.bandwidth_gbytes_s) * 10**9
    return Level(name, ranks, alpha_s, 1 / bytes_per_s, link is None)


def _exact(number: float) -> Fraction:
    """The decimal number that was written, not the binary one nearest to it."""
    return Fraction(str(number))
