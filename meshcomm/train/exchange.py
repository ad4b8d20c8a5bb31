"""What do the other ranks have to say? Bytes of every rank, and one outcome of what all ranks do."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from meshcomm.errors import CommunicationError, MeshcommError, TrainingError
from meshcomm.mesh import Mesh

T = TypeVar("T")


def is_first(mesh: Mesh) -> bool:
    """Whether this rank, the lowest of the mesh, writes what a run leaves behind."""
    return mesh.rank == int(mesh.layout.ranks.min())


def rows_of_every_rank(mesh: Mesh, row: Tensor) -> Tensor:
    """(n) of each rank -> (ranks, n), in the order of the layout's grid: one gather per dim."""
    table = row.unsqueeze(0)
    for dim in reversed(list(mesh.layout.dims)):
        table = mesh.all_gather(dim, table, axis=0)
    return table


def bytes_of_every_rank(mesh: Mesh, mine: bytes) -> list[bytes]:
    """What each rank gave, of any length, in the order of the layout's grid.

    Called by: every rank of the mesh. Two gathers per dim; padded to the longest.
    """
    length = torch.tensor([len(mine)], dtype=torch.int64, device=mesh.device)
    lengths: list[int] = rows_of_every_rank(mesh, length).flatten().tolist()
    longest = max(lengths)
    if not longest:
        return [b""] * len(lengths)
    padded = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8)
    table = rows_of_every_rank(mesh, padded.to(mesh.device)).cpu().numpy()
    return [row[:size].tobytes() for row, size in zip(table, lengths, strict=True)]


def together(
    mesh: Mesh, what: str, action: Callable[[], T], *, expected: str | None = None, hint: str | None = None
) -> T:
    """Do `action` on this rank and return its result once every rank of the mesh has succeeded.

    what:      "resume from runs/x", for the text "rank 3 could not ...", with `expected` and `hint`.
    Called by: every rank of the mesh. The action communicates with nobody.
    Raises:    where it fails: its own MeshcommError, or TrainingError for what else it raised. On
               the ranks where it did not: TrainingError with the same words and the lowest rank's name.
    """
    failure: MeshcommError | None = None
    result: T | None = None
    try:
        result = action()
    except Exception as error:
        failure = failure_of(mesh, what, error, expected=expected, hint=hint)
    said = b"" if failure is None else json.dumps(parts(mesh, what, failure)).encode()
    try:
        texts = bytes_of_every_rank(mesh, said)
    except CommunicationError:
        if failure is not None:
            raise failure from failure.__cause__
        raise
    if failure is not None:
        raise failure from failure.__cause__
    failed = {int(rank): text for rank, text in zip(mesh.layout.ranks.flat, texts, strict=True) if text}
    if failed:
        raise TrainingError(**json.loads(failed[min(failed)]))
    return result  # type: ignore[return-value]


def failure_of(
    mesh: Mesh, what: str, error: Exception, *, expected: str | None = None, hint: str | None = None
) -> MeshcommError:
    """`error` itself where it is a MeshcommError, else a TrainingError that says which rank could not `what`."""
    if isinstance(error, MeshcommError):
        return error
    failure = TrainingError(
        f"{mesh.label} could not {what}",
        given=f"{type(error).__name__}: {error}",
        expected=expected,
        hint=hint,
    )
    failure.__cause__ = error
    return failure


def parts(mesh: Mesh, what: str, failure: MeshcommError) -> dict[str, str | None]:
    """An error as the other ranks are told it: which rank could not do what, and its own words."""
    could_not = f"{mesh.label} could not {what}"
    return {
        "what": failure.what if failure.what == could_not else f"{could_not}: {failure.what}",
        "given": failure.given,
        "expected": failure.expected,
        "hint": failure.hint,
    }
