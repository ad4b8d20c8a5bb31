"""Parts of different sizes, on each kind of backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshcomm
from meshcomm.comm.handle import Handle
from meshcomm.errors import CallMismatchError
from meshcomm.mesh import Mesh
from meshcomm.testing import Pool
from meshcomm.testing.emulated_nccl import NAME, emulated_nccl, host_syncs
from meshcomm.transport.torch_private import DispatchMode, leaves_of
from tests.comm.test_along import on_processes, uneven

pytestmark = pytest.mark.long


class Allocations(DispatchMode):  # type: ignore[misc]
    """Adds up the bytes of newly allocated tensors that operators return within the block."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in leaves_of((args, kwargs)) if torch.is_tensor(x)}
        for x in leaves_of(found):
            if torch.is_tensor(x) and x.untyped_storage().data_ptr() not in given:
                self.nbytes += x.nbytes
        return found


def copied(call: Callable[[], torch.Tensor]) -> tuple[int, torch.Tensor]:
    """The bytes of new memory that a call's operators allocate, and its result."""
    with Allocations() as made:
        found = call()
    return made.nbytes, found


def gathered_once(mesh: Mesh, padded: bool) -> None:
    """An uneven all_gather allocates its result, and where it pads also a padded part and a buffer; nothing more."""
    size, coord = mesh.size("dp"), mesh.coord("dp")
    sizes = [1000 * (c + 1) for c in range(size)]
    x = torch.full((sizes[coord],), float(coord))
    want = torch.cat([torch.full((n,), float(c)) for c, n in enumerate(sizes)])
    handles = [mesh.all_gather("dp", x, uneven=True, async_op=True) for _ in range(2)]
    assert all(torch.equal(handle.wait(), want) for handle in handles)
    nbytes, found = copied(lambda: mesh.all_gather("dp", x, uneven=True))
    assert torch.equal(found, want)
    # Without the sizes, which are exchanged first.
    least = 4 * sum(sizes)
    if padded:
        # Shorter parts are padded with zeros to the longest one, gathered, and cut.
        least += 4 * size * sizes[-1] + (4 * (2 * sizes[-1] - sizes[coord]) if coord < size - 1 else 0)
    assert least <= nbytes <= least + 16 * size, (nbytes, least)


def on_gloo() -> None:
    with meshcomm.init(dims={"dp": 4}, device="cpu", timeout_s=30, validate_calls=2) as mesh:
        gathered_once(mesh, False)


def on_queues() -> None:
    settings: dict[str, Any] = {"backend": NAME, "device": "cpu", "timeout_s": 30, "validate_calls": 2}
    with emulated_nccl(), meshcomm.init(dims={"dp": 4}, **settings) as mesh:
        uneven(mesh)
        gathered_once(mesh, True)
        x = torch.ones(4, 1)
        syncs = host_syncs()
        splits = [1] * 4
        found = mesh.all_to_all("dp", x, input_split_sizes=splits, output_split_sizes=splits)
        assert host_syncs() == syncs and torch.equal(found, x)


def test_sizes_that_differ_on_each_kind_of_backend(pool: Pool) -> None:
    for check in (on_gloo, on_queues):
        pool.run(check, ranks=4)


def wrongly_known(mesh: Mesh) -> None:
    """While calls are compared, every rank raises if one rank expects another size."""
    coord = mesh.coord("dp")
    x, splits = torch.arange(4.0), [1, 3] if coord else [3, 1]
    received = [3, 1] if coord == 0 else [1, 3]
    assert (
        mesh.all_to_all("dp", x, input_split_sizes=splits, output_split_sizes=received).tolist()
        == [[0.0, 1.0, 2.0, 0.0], [3.0, 1.0, 2.0, 3.0]][coord]
    )
    with pytest.raises(CallMismatchError, match="ranks 0 1 do not agree") as refused:
        mesh.all_to_all("dp", x, input_split_sizes=splits, output_split_sizes=[2, 2] if coord else received)
    assert "sends (1, 3), expects (2, 2)" in refused.value.given, refused.value.given


def rightly_known(mesh: Mesh) -> None:
    """Sizes with many digits, whose text is shortened."""
    sizes = [10_000 + other for other in range(8)]
    for later in (False, True):
        came = mesh.all_to_all(
            "dp",
            torch.full((sum(sizes),), mesh.rank, dtype=torch.int8),
            input_split_sizes=sizes,
            output_split_sizes=[sizes[mesh.rank]] * 8,
            async_op=later,
        )
        came = came.wait() if isinstance(came, Handle) else came
        assert came.view(8, -1)[:, 0].tolist() == list(range(8))


# How many rows each rank sends to each other rank: rank 0 sends none, and rank 2 receives none.
ROWS = [[0, 0, 0], [2, 1, 0], [0, 3, 0]]


def nothing_to_send(mesh: Mesh) -> None:
    """A rank without rows to send may receive some, and vice versa, as with experts that got no tokens."""
    sends, expects = ROWS[mesh.rank], [row[mesh.rank] for row in ROWS]
    held = torch.full((sum(sends), 4), float(mesh.rank))
    want = torch.tensor([float(rank) for rank, rows in enumerate(expects) for _ in range(rows)])
    for axis in (0, 1):
        x = held.movedim(0, axis)
        for later in (False, True):
            came = mesh.all_to_all(
                "dp", x, axis, axis, input_split_sizes=sends, output_split_sizes=expects, async_op=later
            )
            came = came.wait() if isinstance(came, Handle) else came
            assert torch.equal(came.movedim(axis, 0), want[:, None].expand(-1, 4)), (axis, later)
    out = torch.empty(len(want), 4)
    dist.all_to_all_single(out, held, expects, sends, group=mesh.group("dp"))
    assert torch.equal(out, want[:, None].expand(-1, 4))


def wrongly_known_later(mesh: Mesh) -> None:
    """An asynchronous call waits for no exchange; every rank still raises before data of wrong sizes is sent."""
    sends = [2, 1, 1] if mesh.rank == 2 else [1, 1, 1]
    x = torch.ones(2, sum(sends))
    with pytest.raises(CallMismatchError, match="rank 2 is mismatched"):
        mesh.all_to_all(
            "dp", x, 1, 1, input_split_sizes=sends, output_split_sizes=[1, 1, 1], async_op=True
        ).wait()


def test_a_wrong_known_size(pool: Pool) -> None:
    pool.run(on_processes, wrongly_known, {"dims": {"dp": 2}}, ranks=2)
    pool.run(on_processes, wrongly_known_later, {"dims": {"dp": 3}}, ranks=3)
    pool.run(on_processes, rightly_known, {"dims": {"dp": 8}}, ranks=8)
    pool.run(on_processes, nothing_to_send, {"dims": {"dp": 3}}, ranks=3)
    with pytest.raises(CallMismatchError, match="ranks differ in call 1"):
        meshcomm.simulate(
            lambda mesh: mesh.all_to_all(
                "dp", torch.ones(4), input_split_sizes=[2, 2], output_split_sizes=[3, 1]
            ),
            dims={"dp": 2},
        )
