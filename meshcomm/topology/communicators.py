"""What do a rank's groups cost it: memory on the device for NCCL, file descriptors for Gloo?"""

from __future__ import annotations

from typing import Final, NamedTuple

from meshcomm.config import Config
from meshcomm.config.backends import chosen
from meshcomm.layout import Plan

# Megabytes of one NCCL communicator after its first all_reduce, as a user measured them on four A100
# with NVLink under PyTorch in 2023: 544 for two ranks, 688 for more (github.com/NVIDIA/nccl, issue 964).
# It grows with the number of channels (issue 986), so other machines differ.
NCCL_MB_OF_TWO: Final = 544
NCCL_MB: Final = 688
# Descriptors of one idle Gloo group; measured with torch 2.13 on Linux, as `meshcomm doctor` does anew.
GLOO_DESCRIPTORS: Final = 4


class Footprint(NamedTuple):
    """Of one rank, at most: all of its groups in use.

    nccl, gloo: communicators, the default group of torch.distributed among them.
    nccl_mb: estimated megabytes of device memory. descriptors: file descriptors that Gloo opens.
    undecided: groups whose backend is decided by the device at the start; counted as nccl.
    """

    nccl: int
    gloo: int
    nccl_mb: int
    descriptors: int
    undecided: int


def footprint(settings: Config, plan: Plan, world: int) -> Footprint:
    """What one rank's groups cost. Communicators that `ncclCommSplit` makes count like others.

    The default group is idle unless a group of the plan is the whole world: Gloo then opens no
    connection for it, and NCCL, which connects at the first call, takes no memory.
    """
    sizes: dict[str, list[int]] = {"nccl": [], "gloo": []}
    undecided = 0
    for family in plan.families:
        if family.creates:
            backend = chosen(settings.mesh, family.options.backend)
            undecided += backend is None
            sizes.setdefault(backend or "nccl", []).append(family.size)
    default = chosen(settings.mesh, settings.mesh.backend) or "nccl"
    nccl, gloo = sizes["nccl"], sizes["gloo"]
    idle_gloo = default == "gloo" and world > 1
    return Footprint(
        nccl=len(nccl) + (default == "nccl" and world > 1),
        gloo=len(gloo) + idle_gloo,
        nccl_mb=sum(NCCL_MB_OF_TWO if size == 2 else NCCL_MB for size in nccl),
        descriptors=1 + GLOO_DESCRIPTORS * (len(gloo) + idle_gloo) + sum(size - 1 for size in gloo),
        undecided=undecided,
    )
