"""What one rank asks the job's store for, from `meshcomm.init` to the first call along every dim.

Written down call by call, as tests/bench/test_scale_counts.py sees them on real Gloo processes. Bytes are
those of keys and values, both ways, without what TCP and torch's protocol add.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from meshcomm.bench.scale.connections import ring_peers
from meshcomm.layout import Plan

Backend = Literal["gloo", "nccl"]

# Bytes. Gloo's addresses of a rank: on torch 2.13 over IPv4, where pairs connect when they first talk;
# where all connect at once, eight more for each rank of the group, which all ranks of it read.
GLOO_ADDRESS: Final = 154
GLOO_EACH: Final = 8
NCCL_ID: Final = 128
# A host name of twelve characters, seven digits for a process, ten for when it started.
_HOST: Final = "node00000000"
_PROCESS: Final = f"process 1234567 of {_HOST}, started at 1234567890"
_FINGERPRINT: Final = 16


class Operation(NamedTuple):
    """One call of a store: its name in torch, its key, and the bytes of values sent and received."""

    call: str
    key: str
    sent: int = 0
    received: int = 0

    @property
    def moved(self) -> int:
        """Bytes of key and values."""
        return len(self.key) + self.sent + self.received


def opening(
    plan: Plan, rank: int, *, backend: Backend = "gloo", last: bool = False, number: int = 1
) -> list[Operation]:
    """What `meshcomm.init` asks on a store that can append, in order, until the mesh is there.

    last: whether this rank completes the agreement; exactly one does, and reads who has come.
    number: how many meshes this process has opened before, and this one. NCCL: groups connect when
    they are first used, so that creating them asks for nothing.
    """
    world = plan.layout.world_size
    mesh = f"meshcomm{number}"
    operations = [
        # This process is the only one of its rank; how many meshes it has opened.
        Operation("compare_set", f"meshcomm/owner/{rank}", len(_PROCESS), len(_PROCESS)),
        Operation("add", f"meshcomm/opened/{rank}", 1, 1),
        # Agreement.
        Operation("add", f"{mesh}/agree/come", len(str(1 + (world << 31))), len(str(world * world << 31))),
        Operation("append", f"{mesh}/agree/here", _line(rank, world)),
    ]
    if last:
        everyone = sum(_line(other, world) for other in range(world))
        operations += [
            Operation("get", f"{mesh}/agree/here", received=everyone),
            Operation("compare_set", f"{mesh}/agree/verdict", len("agree"), len("agree")),
        ]
    operations.append(Operation("get", f"{mesh}/agree/verdict", received=len("agree")))
    # torch's default group, and whose it is.
    if backend == "gloo":
        operations.append(Operation("set", f"{mesh}/world/0//cpu//0/{rank}", GLOO_ADDRESS))
    operations.append(Operation("set", f"{mesh}/world/0//meshcomm/prefix", len(mesh)))
    for group in plan.for_rank(rank).groups if backend == "gloo" else ():
        if group.shares is None:
            key = f"{mesh}/groups/{mesh}/{group.name}/{group.index}//cpu//0/{group.ranks.index(rank)}"
            operations.append(Operation("set", key, GLOO_ADDRESS))
    return operations


def first_calls(plan: Plan, rank: int, *, backend: Backend = "gloo", number: int = 1) -> list[Operation]:
    """What an all_reduce along every name asks, once; comparing the first calls asks for no more.

    Gloo: an address for each neighbour in the group's ring, waited for and read. NCCL, as read in
    torch's ProcessGroupNCCL and not counted here: the first rank of a group publishes an id, the
    others read it (of a group over more than 128 ranks, several ranks publish one each).
    """
    mesh = f"meshcomm{number}"
    operations = []
    for group in plan.for_rank(rank).groups:
        if group.shares is not None:
            continue
        within = f"{mesh}/groups/{mesh}/{group.name}/{group.index}"
        coord, size = group.ranks.index(rank), len(group.ranks)
        if backend == "nccl":
            key = f"{within}//cuda//0"
            operations.append(
                Operation("set", key, NCCL_ID) if coord == 0 else Operation("get", key, received=NCCL_ID)
            )
            continue
        neighbours = dict.fromkeys(((coord + 1) % size, (coord - 1) % size))
        assert len(neighbours) == ring_peers(size)
        for other in neighbours:
            key = f"{within}//cpu//0/{other}"
            operations += [Operation("wait", key), Operation("get", key, received=GLOO_ADDRESS)]
    return operations


class Asked(NamedTuple):
    """Calls of the store and the bytes of their keys and values."""

    calls: int
    moved: int


def asked(operations: list[Operation]) -> Asked:
    """Add up."""
    return Asked(len(operations), sum(each.moved for each in operations))


def gloo_at_once(size: int) -> Asked:
    """What a rank asks when it creates a Gloo group that connects all its ranks at once, torch's default.

    It says its addresses, then waits for and reads those of all `size` ranks, itself included. Keys of
    some 20 bytes.
    """
    address = GLOO_ADDRESS + GLOO_EACH * size
    return Asked(1 + 2 * size, 20 * (1 + 2 * size) + address * (1 + size))


def _line(rank: int, world: int) -> int:
    """Bytes of `rank fingerprint world host` in the list of those who have come."""
    return len(f"{rank} {world} {_HOST}\n") + 1 + _FINGERPRINT
