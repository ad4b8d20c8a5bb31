"""Every exception of meshcomm: what happened, what was given, what was expected, what to try."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class MeshcommError(Exception):
    """Base of every error a user can cause or meet.

    The text has one line that says what happened, then up to three indented lines:
    what was given, what was expected, what to try. facts: attributes that the error's own class describes.
    """

    def __init__(
        self,
        what: str,
        *,
        given: str | None = None,
        expected: str | None = None,
        hint: str | None = None,
        **facts: Any,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.given = given
        self.expected = expected
        self.hint = hint
        self.__dict__.update(facts)

    def __str__(self) -> str:
        lines = [self.what]
        for label, text in (
            ("given:", self.given),
            ("expected:", self.expected),
            ("try:", self.hint),
        ):
            if text is not None:
                body = text.replace("\n", "\n" + " " * 12)
                lines.append(f"  {label:<9} {body}")
        return "\n".join(lines)


class ConfigError(MeshcommError):
    """A configuration file or override is wrong; carries every problem found, not the first."""


class LayoutError(MeshcommError):
    """Names, sizes or ranks do not form a mesh."""


class UnknownDim(LayoutError):
    """A dim name that this mesh does not have, or dims that no declared group covers."""


class LaunchError(MeshcommError):
    """The process was not started in a way that a mesh can be made from."""


class MeshMismatchError(MeshcommError):
    """Ranks disagree on what the mesh is, or a rank never came.

    `mismatched_ranks` are the ranks that differ from the majority; `missing` those that did not come.
    """

    mismatched_ranks: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()


class NotMember(MeshcommError):
    """A rank outside the mesh asked the mesh to communicate."""


class MeshClosed(MeshcommError):
    """The mesh was closed and can no longer communicate."""


class ShapeError(MeshcommError):
    """A tensor's shape, dtype, device or layout does not fit the call."""


class PatternError(MeshcommError):
    """A rearrange pattern that does not read, does not fit the tensor, or does not fit the mesh."""


class UnsupportedOp(MeshcommError):
    """The backend cannot do this, known before a byte moves."""


class AutogradError(MeshcommError):
    """An in-place collective met a tensor that needs gradients."""


class CommunicationError(MeshcommError):
    """The backend failed while communicating; the backend's own error is the cause.

    `call` is the collective that failed, where it was one: the "label" of its group, its sequence
    "number" there, "call" (the operation), "dim" and "callsite" (the user's line).
    """

    call: Mapping[str, Any] | None = None


class ObjectError(MeshcommError):
    """A Python object cannot cross between ranks, or what arrived is not one; names where inside it."""


class StoreError(MeshcommError):
    """The job's store refused an operation or cannot be reached."""


class StoreTimeout(StoreError):
    """A key was not set within the timeout."""


class CallMismatchError(MeshcommError):
    """Ranks of a group were about to make different calls, and nothing was sent; or they did in a step.

    `mismatched_ranks` are the global ranks that differ from the majority. `step`: where `mesh.step` found it, the
    first step whose results are not to be trusted, as the program counts; else None.
    """

    mismatched_ranks: tuple[int, ...] = ()
    step: int | None = None


class CollectiveTimeout(CommunicationError):
    """A call did not end in its group's time; `missing` are the global ranks that had not come to it."""

    missing: tuple[int, ...] = ()


class PeerLost(CollectiveTimeout):
    """A rank of the group has ended or is stopped; `missing` names those that do not answer or come."""


class RankLost(CommunicationError):
    """Ranks were lost, and new processes have their places; `missing` are those ranks.

    Every other rank gets it, from the call that it is in or from its next one. `Mesh.reopen` meets the new processes.
    """

    missing: tuple[int, ...] = ()


class BarrierTimeout(CommunicationError):
    """Some ranks did not come to a barrier in time; `missing` are their global ranks."""

    missing: tuple[int, ...] = ()


class DeadlockError(MeshcommError):
    """Ranks wait for each other in a circle, or for what no rank will do; proved, not waited for.

    `circle` are the global ranks that wait for each other, each for the next; empty where there is
    no circle. `waiting` are all that wait.
    """

    circle: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()


class UnmatchedMessage(MeshcommError):
    """A send without its receive, or a receive without its send; `waiting` are the ranks of such ends."""

    waiting: tuple[int, ...] = ()


class HandleNotWaited(MeshcommError):
    """A rank ended without waiting for a call that it had begun; `mismatched_ranks` are those that did."""

    mismatched_ranks: tuple[int, ...] = ()


class RankFailed(MeshcommError):
    """The program of some ranks raised; `by_rank` has each one's exception, the first is the cause.

    Or ranks were lost, and nobody can take their places, as others have ended: then `by_rank` has where.
    """

    by_rank: dict[int, BaseException]


class TrainingError(MeshcommError):
    """A training run cannot go on; says at which step and why."""


class MeshTestError(MeshcommError):
    """A test cannot run on a mesh as it is written."""


class ViewError(MeshcommError):
    """A page cannot be made of what was given, or not be served or written where it was asked to be."""
