"""How many ranks and devices has a node, as a launcher's environment says it?"""

from __future__ import annotations

import re
from collections.abc import Mapping

from meshcomm.config import TopologyConfig


def discovered(topology: TopologyConfig, env: Mapping[str, str]) -> TopologyConfig:
    """`topology` with ranks_per_node and devices_per_node filled in from `env` where it says them.

    What the configuration says wins. A launcher whose nodes have unequal numbers of ranks says nothing:
    ranks then do not share nodes by r // ranks_per_node.
    """
    found: dict[str, int] = {}
    if topology.ranks_per_node is None and (ranks := ranks_per_node(env)) is not None:
        found["ranks_per_node"] = ranks
    if topology.devices_per_node is None and (devices := devices_per_node(env)) is not None:
        found["devices_per_node"] = devices
    return topology.model_copy(update=found)


def ranks_per_node(env: Mapping[str, str]) -> int | None:
    """From torchrun's LOCAL_WORLD_SIZE, Slurm's tasks per node, or MPI's local size; None: not said."""
    for name in (
        "LOCAL_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "MPI_LOCALNRANKS",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ):
        if (number := _number(env.get(name))) is not None:
            return number
    # As in 8(x4), or 8(x3),4: only the first says the same of all nodes.
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or ""
    match = re.fullmatch(r"(\d+)(?:\(x\d+\))?", tasks)
    return None if match is None else _number(match[1])


def devices_per_node(env: Mapping[str, str]) -> int | None:
    """From Slurm's GPUs on the node, or the devices that CUDA may see; None: not said."""
    number = _number(env.get("SLURM_GPUS_ON_NODE"))
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if number is None and visible:
        number = len([name for name in visible.split(",") if name.strip()])
    return number


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and int(text) >= 1 else None
