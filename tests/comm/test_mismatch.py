"""The first calls on a group are compared: a difference is an error on every rank, before data moves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshcomm
from meshcomm import collectives
from meshcomm.errors import CallMismatchError, CommunicationError, MeshMismatchError
from meshcomm.mesh import Mesh
from meshcomm.testing import Pool

Call = Callable[[Mesh, bool], object]

# name -> (what is called, with `odd` true on rank 3 only; how the odd call differs, in words)
CASES: dict[str, tuple[Call, str, str]] = {
    "shape": (
        lambda m, odd: m.all_reduce("dp", torch.ones(6 if odd else 4)),
        "all_reduce(shape (6), dtype float32, op sum)",
        "all_reduce(shape (4), dtype float32, op sum)",
    ),
    "dtype": (
        lambda m, odd: m.all_reduce("dp", torch.ones(4, dtype=torch.float64 if odd else torch.float32)),
        "all_reduce(shape (4), dtype float64, op sum)",
        "all_reduce(shape (4), dtype float32, op sum)",
    ),
    "reduce op": (
        lambda m, odd: m.all_reduce("dp", torch.ones(4), "max" if odd else "sum"),
        "all_reduce(shape (4), dtype float32, op max)",
        "all_reduce(shape (4), dtype float32, op sum)",
    ),
    "operation": (
        lambda m, odd: m.broadcast("dp", torch.ones(4), src=0) if odd else m.all_reduce("dp", torch.ones(4)),
        "broadcast(shape (4), dtype float32, src 0)",
        "all_reduce(shape (4), dtype float32, op sum)",
    ),
    "root": (
        lambda m, odd: m.broadcast("dp", torch.ones(4), src=1 if odd else 0),
        "broadcast(shape (4), dtype float32, src 1)",
        "broadcast(shape (4), dtype float32, src 0)",
    ),
    "axis": (
        lambda m, odd: m.all_gather("dp", torch.ones(4, 4), axis=1 if odd else 0),
        "all_gather(shape (4, 4), dtype float32, axis 1, uneven False)",
        "all_gather(shape (4, 4), dtype float32, axis 0, uneven False)",
    ),
    "other axes of uneven": (
        lambda m, odd: m.all_gather("dp", torch.ones(m.rank, 3 if odd else 2), uneven=True),
        "all_gather(shape (0, 3), dtype float32, axis 0, uneven True)",
        "all_gather(shape (0, 2), dtype float32, axis 0, uneven True)",
    ),
    "barrier": (
        lambda m, odd: m.barrier("dp") if odd else m.reduce_scatter("dp", torch.ones(6)),
        "barrier()",
        "reduce_scatter(shape (6), dtype float32, axis 0, op sum)",
    ),
    "scatter's buffer": (
        lambda m, odd: m.scatter("dp", torch.ones(6), 0, out=torch.ones(2) if odd else None),
        "scatter(src 0, out True)",
        "scatter(src 0, out False)",
    ),
    "list": (
        lambda m, odd: m.all_reduce("dp", [torch.ones(2), torch.ones(3 if odd else 2)]),
        "all_reduce(shape (5), dtype float32, op sum)",
        "all_reduce(shape (4), dtype float32, op sum)",
    ),
}


def differ() -> dict[str, tuple[str, tuple[int, ...], float, float]]:
    found = {}
    with meshcomm.init(dims={"dp": 3, "tp": 2}, device="cpu", timeout_s=30) as mesh:
        odd = mesh.rank == 3
        mesh.all_reduce("dp", torch.ones(1))
        for name, (call, _, _) in CASES.items():
            if odd and name == "shape":
                time.sleep(0.5)
            began = time.monotonic()
            text, ranks = "nothing", ()
            try:
                call(mesh, odd)
            except CallMismatchError as error:
                text, ranks = str(error), error.mismatched_ranks
            took = time.monotonic() - began
            # Nothing was sent and everyone left together: the group is as good as before.
            again = mesh.all_reduce("dp", torch.ones(1)).item()
            found[name] = text, ranks, took, again
    return found


def test_a_difference_is_named_on_every_rank_of_the_group(pool: Pool) -> None:
    results = pool.run(differ, ranks=6)
    for number, (name, (_, odd, usual)) in enumerate(CASES.items()):
        for rank, found in enumerate(results):
            text, ranks, took, again = found[name]
            assert again == 3.0, name
            if rank % 2 == 0:
                assert text == "nothing", name
                continue
            first, given, expected, _ = text.splitlines()
            call = f'call {2 + 2 * number} along "dp"'
            assert first == f"ranks differ in {call}: rank 3 is mismatched; nothing was sent"
            assert given.startswith(f"  given:    rank 3: {odd} at ") and f"{__file__}:" in given
            assert (
                expected.startswith(f"  expected: as ranks 1 5: {usual} at ") and f"{__file__}:" in expected
            )
            assert ranks == (3,)
            assert took < 25  # long before the timeout


def many_axes() -> list[str]:
    """Shapes too long to tell whole are told by a digest: equal ones pass, others do not."""
    texts = []
    with meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=20) as mesh:
        shape = [1] * 64
        mesh.all_reduce("dp", torch.ones(shape))
        shape[-1] += mesh.rank
        try:
            mesh.all_reduce("dp", torch.ones(shape))
        except CallMismatchError as error:
            texts.append(error.what)
    return texts


def test_shapes_of_very_many_axes(pool: Pool) -> None:
    expected = ['ranks differ in call 2 along "dp": rank 1 is mismatched; nothing was sent']
    assert pool.run(many_axes, ranks=2) == [expected] * 2


def how_often(setting: Any) -> list[int]:
    with meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=30, validate_calls=setting) as mesh:
        seen = []
        original = mesh._transports["dp"].start

        def counted(call: collectives.Call) -> Any:
            if call.row is collectives.ALL_GATHER:
                seen.append(1)
            return original(call)

        mesh._transports["dp"].start = counted  # type: ignore[method-assign]
        counts = []
        for _ in range(70):
            mesh.all_reduce("dp", torch.ones(3))
            counts.append(len(seen))
        return counts


@pytest.mark.parametrize(("setting", "compared"), [(0, 0), (3, 3), (64, 64), ("always", 70)])
def test_how_many_calls_are_compared(pool: Pool, setting: Any, compared: int) -> None:
    for counts in pool.run(how_often, setting, ranks=2):
        assert counts == [min(number + 1, compared) for number in range(70)]


def shared() -> float:
    """Two names of one group: what is compared is counted for the group."""
    with meshcomm.init(
        dims={"dp": 2, "cp": 1}, merge={"grad": ("dp", "cp")}, device="cpu", timeout_s=30, validate_calls=2
    ) as mesh:
        name = "dp" if mesh.rank == 0 else "grad"
        x = torch.ones(1)
        for _ in range(4):
            x = mesh.all_reduce(name, x)
        return x.item()


def test_names_of_one_group_share_the_count(pool: Pool) -> None:
    assert pool.run(shared, ranks=2) == [16.0, 16.0]


def settings_differ() -> str:
    try:
        meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=30, validate_calls=int(os.environ["RANK"]))
    except MeshMismatchError as error:
        return str(error)
    return "nothing"


def test_the_setting_itself_has_to_agree(pool: Pool) -> None:
    for text in pool.run(settings_differ, ranks=2):
        assert "rank 1: validate_calls = 1; the others: 0" in text


def a_peer_that_leaves() -> str:
    with meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=2) as mesh:
        mesh.all_reduce("dp", torch.ones(1))
        if mesh.rank == 0:
            try:
                mesh.all_reduce("dp", torch.ones(1))
            except CommunicationError as error:
                return error.what
        return ""


def test_a_peer_that_does_not_come_ends_in_the_groups_timeout(pool: Pool) -> None:
    assert pool.run(a_peer_that_leaves, ranks=2) == ['all_reduce along "dp" on rank 0 (dp=0) lost a peer', ""]
