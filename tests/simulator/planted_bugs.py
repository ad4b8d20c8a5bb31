"""Programs with one mistake each, and without it: `program(mesh, bug)`. Verdicts name lines by their marks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import meshcomm
from meshcomm.mesh import Mesh

DIMS = {"dp": 2, "tp": 2}
MERGE = {"all": ("dp", "tp")}


def one(rank: int = 0) -> torch.Tensor:
    return torch.full((4,), float(rank))


def branch_around_a_collective(mesh: Mesh, bug: bool) -> Any:
    loss = one(mesh.rank)
    if mesh.rank != 0 or not bug:
        mesh.all_reduce("dp", loss)  # branch
    return loss


def crossed_order_on_two_dims(mesh: Mesh, bug: bool) -> Any:
    loss = one(mesh.rank)
    dims = ("dp", "tp") if mesh.rank in (0, 3) or not bug else ("tp", "dp")
    for dim in dims:
        mesh.all_reduce(dim, loss)  # crossed
    return loss


def sends_before_receives(mesh: Mesh, bug: bool) -> Any:
    out, peer = one(), 1 - mesh.coord("tp")
    if bug or mesh.coord("tp") == 0:
        mesh.send("tp", one(mesh.rank), dst=peer)  # both-send
        return mesh.recv("tp", out, src=peer)
    mesh.recv("tp", out, src=peer)
    mesh.send("tp", one(mesh.rank), dst=peer)
    return out


def missing_receive(mesh: Mesh, bug: bool) -> Any:
    out = one()
    if mesh.coord("tp") == 0:
        for _ in range(2):
            mesh.send("tp", one(mesh.rank), dst=1)  # unreceived
    else:
        for _ in range(1 if bug else 2):
            mesh.recv("tp", out, src=0)
    return out


def missing_send(mesh: Mesh, bug: bool) -> Any:
    out = one()
    if mesh.coord("dp") == 0:
        if not bug:
            mesh.send("dp", one(mesh.rank), dst=1, tag=4)
    else:
        mesh.recv("dp", out, src=0, tag=4)  # unsent
    return out


def wrong_root(mesh: Mesh, bug: bool) -> Any:
    return mesh.broadcast("tp", one(mesh.rank), src=mesh.coord("tp") if bug else 0)  # root


def off_by_one_shift(mesh: Mesh, bug: bool) -> Any:
    out, coord, n = one(), mesh.coord("all"), mesh.size("all")
    source = coord + 1 if bug else coord - 1
    mesh.exchange("all", [(one(mesh.rank), (coord + 1) % n)], [(out, source % n)])  # shifted
    return out


def unequal_loop_counts(mesh: Mesh, bug: bool) -> Any:
    loss = one(mesh.rank)
    for _ in range(3 + (mesh.coord("dp") if bug else 0)):
        mesh.all_reduce("dp", loss, "max")  # loop
    return loss


def splits_that_disagree(mesh: Mesh, bug: bool) -> Any:
    splits = None if bug and mesh.coord("tp") == 1 else [3, 1]
    return mesh.all_to_all("tp", one(mesh.rank), input_split_sizes=splits)  # splits


def no_such_coord(mesh: Mesh, bug: bool) -> Any:
    return mesh.gather("tp", one(mesh.rank), dst=2 if bug else 1)  # coord


def dropped_handle(mesh: Mesh, bug: bool) -> Any:
    loss = one(mesh.rank)
    handle = mesh.all_reduce("dp", loss, async_op=True)  # dropped
    if not bug:
        handle.wait()
    return loss


def other_dtype(mesh: Mesh, bug: bool) -> Any:
    dtype = torch.float64 if bug and mesh.rank == 2 else torch.float32
    return mesh.all_reduce("dp", one(mesh.rank).to(dtype))  # dtype


def other_shape(mesh: Mesh, bug: bool) -> Any:
    x = torch.ones(2, 3) if bug and mesh.rank == 3 else torch.ones(3, 2)
    return mesh.all_gather("all", x)  # shape


def early_return(mesh: Mesh, bug: bool) -> Any:
    loss = one(mesh.rank)
    for step in range(3):
        if bug and step == 1 and mesh.rank == 1:
            return None
        mesh.all_reduce("all", loss)  # left-alone
    return loss


def exception_on_one_rank(mesh: Mesh, bug: bool) -> Any:
    if bug and mesh.rank == 2:
        raise ValueError("the data of this rank is empty")  # raised
    return mesh.all_reduce("all", one(mesh.rank))


def wrong_tag(mesh: Mesh, bug: bool) -> Any:
    out = one()
    if mesh.coord("tp") == 0:
        mesh.send("tp", one(mesh.rank), dst=1, tag=1)  # tag-one
    else:
        mesh.recv("tp", out, src=0, tag=2 if bug else 1)  # tag-two
    return out


def key_never_set(mesh: Mesh, bug: bool) -> Any:
    if mesh.rank == 0:
        mesh.store.set("adress" if bug else "address", "here")
    return mesh.store.get("address")  # key


def barrier_skipped(mesh: Mesh, bug: bool) -> Any:
    if mesh.rank != 1 or not bug:
        mesh.barrier("tp")  # barrier
    return mesh.all_reduce("all", one(mesh.rank))  # after-barrier


def create_on_some_ranks(mesh: Mesh, bug: bool) -> Any:
    if not bug or mesh.coord("dp") == 0:
        mesh.create_group("again", ("tp", "dp"))  # created
    return mesh.all_reduce("dp", one(mesh.rank))  # not-created


def second_mesh_on_some_ranks(mesh: Mesh, bug: bool) -> Any:
    if bug and mesh.rank > 1:
        return None
    with meshcomm.init(dims={"half": 2}, ranks=[0, 1]) as half:  # second
        return half.all_reduce("half", one(mesh.rank)) if half.is_member else None


def other_operation(mesh: Mesh, bug: bool) -> Any:
    if bug and mesh.coord("tp") == 1:
        return mesh.reduce_scatter("tp", one(mesh.rank))  # scattered
    return mesh.all_reduce("tp", one(mesh.rank))  # reduced


def buffer_of_another_shape(mesh: Mesh, bug: bool) -> Any:
    out = torch.zeros(2, 2) if bug else one()
    if mesh.coord("dp") == 0:
        mesh.send("dp", one(mesh.rank), dst=1)  # four
    else:
        mesh.recv("dp", out, src=0)  # two-by-two
    return out


def backward_on_one_rank(mesh: Mesh, bug: bool) -> Any:
    x = one(mesh.rank).requires_grad_()
    y = mesh.functional.all_reduce("tp", x, grad="sum")
    if mesh.coord("tp") == 0 or not bug:
        y.sum().backward()  # backward
    return x.grad


def receive_never_waited_for(mesh: Mesh, bug: bool) -> Any:
    out = one()
    if mesh.coord("tp") == 1:
        handle = mesh.irecv("tp", out, src=0)  # posted
        if not bug:
            handle.wait()
    elif not bug:
        mesh.send("tp", one(mesh.rank), dst=1)
    return out


def asks_for_ever(mesh: Mesh, bug: bool) -> Any:
    out = one()
    if mesh.coord("tp") == 1:
        handle = mesh.irecv("tp", out, src=0)  # asked
        while not handle.is_completed():  # asking
            time.sleep(0)
        handle.wait()
    elif not bug:
        mesh.send("tp", one(mesh.rank), dst=1)
    return out


def asynchronous_in_another_order(mesh: Mesh, bug: bool) -> Any:
    first, second = one(mesh.rank), torch.ones(2)
    pair = (second, first) if bug and mesh.coord("dp") == 1 else (first, second)
    handles = [mesh.all_reduce("dp", x, async_op=True) for x in pair]  # asynchronous
    return [handle.wait() for handle in handles]


def barrier_with_a_stranger(mesh: Mesh, bug: bool) -> Any:
    if bug and mesh.rank == 3:
        return mesh.all_reduce("dp", one(mesh.rank))  # stranger
    mesh.debug.monitored_barrier(timeout_s=1000)  # met
    return mesh.all_reduce("dp", one(mesh.rank)) if not bug else None


PROGRAMS: list[Callable[[Mesh, bool], Any]] = [
    found
    for name, found in list(globals().items())
    if callable(found) and getattr(found, "__module__", "") == __name__ and name != "one"
]
