"""A tensor that backward still needs, and that a call has written to, ends in torch's error, not in a wrong gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import meshcomm
from meshcomm import Mesh
from meshcomm.testing import Pool

# All that write to memory of the user's.
CALLS: dict[str, Callable[[Mesh, Tensor], object]] = {
    "all_reduce": lambda mesh, x: mesh.all_reduce("dp", x),
    "all_reduce, later": lambda mesh, x: mesh.all_reduce("dp", x, async_op=True).wait(),
    "all_reduce, max": lambda mesh, x: mesh.all_reduce("dp", x, op="max"),
    "all_reduce, ring": lambda mesh, x: mesh.all_reduce("dp", x, algorithm="ring"),
    "all_reduce, list": lambda mesh, x: mesh.all_reduce("dp", [x, torch.ones(3)]),
    "broadcast": lambda mesh, x: mesh.broadcast("dp", x, src=0),
    "broadcast, list": lambda mesh, x: mesh.broadcast("dp", [x, torch.ones(3)], src=0),
    "all_gather": lambda mesh, x: mesh.all_gather("dp", torch.ones(2), out=x),
    "reduce_scatter": lambda mesh, x: mesh.reduce_scatter("dp", torch.ones(8), out=x),
    "all_to_all": lambda mesh, x: mesh.all_to_all("dp", torch.ones(4), out=x),
    "gather": lambda mesh, x: mesh.gather(
        "dp", torch.ones(2), dst=0, out=x if mesh.coord("dp") == 0 else None
    ),
    "scatter": lambda mesh, x: mesh.scatter(
        "dp", torch.ones(8) if mesh.coord("dp") == 0 else None, src=0, out=x
    ),
    "recv": lambda mesh, x: _received(mesh, lambda peer: mesh.recv("dp", x, src=peer)),
    "irecv": lambda mesh, x: _received(mesh, lambda peer: mesh.irecv("dp", x, peer).wait()),
    "exchange": lambda mesh, x: mesh.exchange(
        "dp", [(torch.ones(4), 1 - mesh.coord("dp"))], [(x, 1 - mesh.coord("dp"))]
    ),
    "exchange, later": lambda mesh, x: mesh.exchange(
        "dp", [(torch.ones(4), 1 - mesh.coord("dp"))], [(x, 1 - mesh.coord("dp"))], async_op=True
    ).wait(),
}
# Of the calls above, those that give only one rank its result.
ONE_RANK = {"gather"}


def _received(mesh: Mesh, receive: Callable[[int], object]) -> None:
    peer = 1 - mesh.coord("dp")
    sent = mesh.isend("dp", torch.ones(4), peer)
    receive(peer)
    sent.wait()


def unnoticed(mesh: Mesh) -> list[str]:
    """The calls after which backward computed with what it had not saved; each as a first and as a prepared one."""
    found = []
    for name, call in CALLS.items():
        if name in ONE_RANK and mesh.coord("dp"):
            for _ in range(6):
                call(mesh, torch.ones(4))
            continue
        for round_ in range(6):
            weight = torch.ones(4, requires_grad=True)
            x = torch.full((4,), 2.0)
            loss = (weight * x).sum()
            call(mesh, x)
            try:
                loss.backward()  # type: ignore[no-untyped-call]
                found.append(f"{name}, round {round_}")
            except RuntimeError as error:
                if "modified by an inplace operation" not in str(error):
                    raise
    return found


def on_processes() -> list[str]:
    with meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=30, validate_calls=2) as mesh:
        return unnoticed(mesh)


@pytest.mark.parametrize("via", ["gloo", "simulator"])
def test_what_backward_needs_is_not_overwritten_unseen(pool: Pool, via: str) -> None:
    if via == "gloo":
        assert pool.run(on_processes, ranks=2) == [[], []]
    else:
        assert meshcomm.simulate(unnoticed, dims={"dp": 2}) == [[], []]
