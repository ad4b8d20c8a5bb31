"""A group on Gloo waits for its members while it is created: a program that hangs there is a deadlock in the simulator."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import meshcomm
from meshcomm.errors import DeadlockError
from meshcomm.mesh import Mesh
from meshcomm.testing import Pool

_SHORT = timedelta(seconds=2)


def crossed() -> None:
    orders = [[0, 1], [0, 1, 2]]
    for ranks in orders if dist.get_rank() == 0 else orders[::-1]:
        dist.new_group(ranks, timeout=_SHORT)


def message_first() -> None:
    if dist.get_rank() == 0:
        dist.new_group([0, 1], timeout=_SHORT)
        dist.send(torch.ones(1), 1)
    if dist.get_rank() == 1:
        dist.recv(torch.ones(1), 0)
        dist.new_group([0, 1], timeout=_SHORT)


def collective_first() -> None:
    if dist.get_rank() == 2:
        dist.barrier()
    dist.new_group([2, 3], use_local_synchronization=True, timeout=_SHORT)
    if dist.get_rank() != 2:
        dist.barrier()


def on_gloo(name: str) -> str:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    try:
        globals()[name]()
    except RuntimeError:
        return "hangs"
    finally:
        dist.destroy_process_group()
    return "ends"


@pytest.mark.parametrize(
    ("name", "circle", "what"),
    [
        ("crossed", {0, 1}, ["creation of group of ranks 0 1 at", "creation of group of ranks 0 1 2 at"]),
        ("message_first", {0, 1}, ["creation of group of ranks 0 1 at", "receive from rank 0"]),
        (
            "collective_first",
            {2, 3},
            ["creation of group of ranks 2 3 at", "barrier, call 1 on default group"],
        ),
    ],
)
@pytest.mark.deep_cases("crossed")
def test_a_program_that_hangs_while_it_creates_groups_is_a_circle(
    name: str, circle: set[int], what: list[str], pool: Pool
) -> None:
    assert "hangs" in pool.run(on_gloo, name, ranks=4)
    with pytest.raises(DeadlockError, match="create all groups in the same order") as caught:
        meshcomm.simulate(lambda mesh: globals()[name](), dims={"dp": 4})
    assert set(caught.value.circle) == circle
    assert all(part in str(caught.value) for part in what)


def test_a_rank_that_creates_no_group_is_named() -> None:
    def program(mesh: Mesh) -> None:
        if mesh.rank != 2:
            dist.new_group([1, 2])

    with pytest.raises(DeadlockError, match="rank 2 returned while rank 1 waits"):
        meshcomm.simulate(program, dims={"dp": 4})


def test_nccl_creates_groups_without_waiting() -> None:
    def program(mesh: Mesh) -> None:
        orders: Any = [[0, 1], [0, 1, 2]]
        for ranks in orders if mesh.rank == 0 else orders[::-1]:
            dist.new_group(ranks, backend="nccl")

    meshcomm.simulate(program, dims={"dp": 4})


def test_device_meshes_in_different_orders_are_a_circle() -> None:
    def program(mesh: Mesh) -> None:
        shapes = [(2, 2), (4, 1)]
        for shape in shapes if mesh.rank == 0 else shapes[::-1]:
            init_device_mesh("cpu", shape)

    with pytest.raises(DeadlockError, match="waits in init_device_mesh, creation of"):
        meshcomm.simulate(program, dims={"dp": 4})
