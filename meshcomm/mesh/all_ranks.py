"""Plain data of every rank of a mesh, and one outcome of an action of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from meshcomm.errors import CommunicationError, MeshcommError, TrainingError
from meshcomm.mesh.compare_ranks import records_of_all

if TYPE_CHECKING:
    from meshcomm.mesh.mesh import Mesh

T = TypeVar("T")


def ranks_of(mesh: Mesh) -> list[int]:
    """The ranks of the mesh, in the order of the layout's grid."""
    return [int(rank) for rank in mesh.layout.ranks.flat]


def is_first(mesh: Mesh) -> bool:
    """Whether this is the lowest rank of the mesh, which writes the files of a run."""
    return mesh.rank == min(ranks_of(mesh))


def of_every_rank(mesh: Mesh, mine: Any) -> list[Any]:
    """The plain data of each rank, in the order of `ranks_of`. Called by every rank: a gather of objects per dim."""
    return records_of_all(mesh.objects.all_gather, mesh.layout.dims, mine)


def on_all_ranks(mesh: Mesh, what: str, action: Callable[[], T]) -> T:
    """Do `action` on this rank and return its result once every rank of the mesh has succeeded.

    what:      "resume from runs/x", for the text "rank 3 could not ...".
    Called by: every rank of the mesh. The action communicates with nobody.
    Raises:    where it fails: its own MeshcommError, or TrainingError for what else it raised. On
               the ranks where it did not: TrainingError with the same words and the lowest rank's name.
    """
    failure: MeshcommError | None = None
    result: T | None = None
    could_not = f"{mesh.label} could not {what}"
    try:
        result = action()
    except MeshcommError as error:
        failure = error
    except Exception as error:
        failure = TrainingError(could_not, given=f"{type(error).__name__}: {error}")
        failure.__cause__ = error
    failures: list[Any] = []
    try:
        failures = of_every_rank(
            mesh, failure and [failure.what, failure.given, failure.expected, failure.hint]
        )
    except CommunicationError:
        if failure is None:
            raise
    if failure is not None:
        raise failure from failure.__cause__
    for rank, failed in sorted(zip(ranks_of(mesh), failures, strict=True)):
        if failed:
            words, given, expected, hint = failed
            could_not = f"{mesh.layout.label(rank)} could not {what}"
            words = words if words == could_not else f"{could_not}: {words}"
            raise TrainingError(words, given=given, expected=expected, hint=hint)
    return result  # type: ignore[return-value]
