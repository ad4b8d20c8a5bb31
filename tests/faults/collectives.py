"""Every collective with numbers that tell whether it worked, and a way to end a rank in the middle of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from meshcomm.collectives import Call
from meshcomm.mesh import Mesh
from tests.faults.row import End, Rank, check

# Large enough to be on its way for a while: 512 KiB for each part.
_N: Final = 1 << 17


def _parts(*values: float) -> torch.Tensor:
    return torch.tensor(values).repeat_interleave(_N)


def _all_reduce(mesh: Mesh, dim: str) -> None:
    n, c = mesh.size(dim), mesh.coord(dim)
    check(mesh.all_reduce(dim, torch.full((_N,), c + 1.0)), n * (n + 1) / 2)


def _reduce(mesh: Mesh, dim: str) -> None:
    n, c = mesh.size(dim), mesh.coord(dim)
    found = mesh.reduce(dim, torch.full((_N,), c + 1.0), 0)
    if c == 0:
        check(found, n * (n + 1) / 2)


def _reduce_scatter(mesh: Mesh, dim: str) -> None:
    n, c = mesh.size(dim), mesh.coord(dim)
    found = mesh.reduce_scatter(dim, _parts(*((c + 1.0) * (to + 1) for to in range(n))))
    check(found, (c + 1) * n * (n + 1) / 2)


def _broadcast(mesh: Mesh, dim: str) -> None:
    check(mesh.broadcast(dim, torch.full((_N,), mesh.coord(dim) + 7.0), 0), 7.0)


def _all_gather(mesh: Mesh, dim: str) -> None:
    found = mesh.all_gather(dim, torch.full((_N,), float(mesh.coord(dim))))
    check(found, _parts(*range(mesh.size(dim))))


def _gather(mesh: Mesh, dim: str) -> None:
    found = mesh.gather(dim, torch.full((_N,), float(mesh.coord(dim))), 0)
    if mesh.coord(dim) == 0:
        check(found, _parts(*range(mesh.size(dim))))


def _scatter(mesh: Mesh, dim: str) -> None:
    x = _parts(*range(mesh.size(dim))) if mesh.coord(dim) == 0 else None
    check(mesh.scatter(dim, x, 0), float(mesh.coord(dim)))


def _all_to_all(mesh: Mesh, dim: str) -> None:
    n, c = mesh.size(dim), mesh.coord(dim)
    found = mesh.all_to_all(dim, _parts(*(c * n + to for to in range(n))))
    check(found, _parts(*(source * n + c for source in range(n))))


def _barrier(mesh: Mesh, dim: str) -> None:
    mesh.barrier(dim)


CALLS: Final[dict[str, Callable[[Mesh, str], None]]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
}


def end_inside(me: Rank, mesh: Mesh, dim: str, call: str, how: End) -> None:
    """From now on, this rank ends when it has started its part of the backend's `call` along `dim`."""
    transport: Any = mesh._transports[dim]
    original = transport.start

    def instead(given: Call) -> Any:
        if given.row.name != call:
            return original(given)
        work = original(given._replace(blocking=False))
        me.end(how)
        del work
        return None

    transport.start = instead
    # Calls that were made before have the backend's own functions in hand.
    for prepared in mesh._at[dim].recorder.quick:
        prepared.clear()
