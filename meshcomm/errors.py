"""The exceptions of meshcomm. Each text states the error, the given value, the expected value and a fix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class MeshcommError(Exception):
    """Base class of all errors of meshcomm.

    The first line of the text states the error. Up to three indented lines follow: the given value, the expected
    value, and a fix. facts: attributes that the class of the error documents.
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
    """A configuration file or override is invalid. The error lists every problem found, not only the first."""


class LayoutError(MeshcommError):
    """Names, sizes or ranks do not form a mesh."""


class UnknownDim(LayoutError):
    """A dim name that the mesh does not have, or dims that no declared group covers."""


class LaunchError(MeshcommError):
    """The way this process was started does not allow it to open a mesh."""


class MeshMismatchError(MeshcommError):
    """Ranks disagree about the mesh, or a rank is missing from the rendezvous.

    `mismatched_ranks` are the ranks that differ from the majority; `missing` are the ranks that did not arrive.
    """

    mismatched_ranks: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()


class NotMember(MeshcommError):
    """A rank outside the mesh called a method that needs a place in the mesh."""


class MeshClosed(MeshcommError):
    """The mesh is closed and cannot communicate."""


class ShapeError(MeshcommError):
    """The shape, dtype, device or memory layout of a tensor does not fit the call."""


class PatternError(MeshcommError):
    """A rearrange pattern has a syntax error, or does not fit the tensor or the mesh."""


class UnsupportedOp(MeshcommError):
    """The backend does not support the operation. Raised before any bytes are sent."""


class AutogradError(MeshcommError):
    """An in-place collective received a tensor that requires gradients."""


class CommunicationError(MeshcommError):
    """The backend failed while communicating. Its error is the cause.

    `call` describes the collective that failed, if any: the "label" of its group, its sequence "number" in the
    group, "call" (the operation), "dim" and "callsite" (the user's line).
    """

    call: Mapping[str, Any] | None = None


class ObjectError(MeshcommError):
    """A Python object cannot be sent, or a received message is not a valid object.

    The text gives the place inside the object.
    """


class StoreError(MeshcommError):
    """The job's store refused an operation or cannot be reached."""


class StoreTimeout(StoreError):
    """A key was not set within the timeout."""


class CallMismatchError(MeshcommError):
    """Ranks of a group were about to make different calls, so nothing was sent; or `mesh.step` found a difference.

    `mismatched_ranks` are the global ranks that differ from the majority. `step` is set if `mesh.step` found the
    difference: the first step whose results are not reliable, in the program's numbering. Otherwise it is None.
    """

    mismatched_ranks: tuple[int, ...] = ()
    step: int | None = None


class CollectiveTimeout(CommunicationError):
    """A call did not end within its group's timeout. `missing` are the global ranks that had not reached it."""

    missing: tuple[int, ...] = ()


class PeerLost(CollectiveTimeout):
    """A rank of the group has ended or is stopped. `missing` are the ranks that do not answer or did not arrive."""


class RankLost(CommunicationError):
    """Ranks were lost and new processes replaced them. `missing` are the lost ranks.

    Every other rank raises this from its current call or its next one. `Mesh.reopen` connects to the new
    processes.
    """

    missing: tuple[int, ...] = ()


class BarrierTimeout(CommunicationError):
    """Some ranks did not reach a barrier in time. `missing` are their global ranks."""

    missing: tuple[int, ...] = ()


class DeadlockError(MeshcommError):
    """Ranks wait for each other in a cycle, or for an event that no rank will cause. Raised without a timeout.

    `circle` are the global ranks of the cycle, each waiting for the next; it is empty if there is no cycle.
    `waiting` are all ranks that wait.
    """

    circle: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()


class UnmatchedMessage(MeshcommError):
    """A send without a receive, or a receive without a send. `waiting` are the ranks of these calls."""

    waiting: tuple[int, ...] = ()


class HandleNotWaited(MeshcommError):
    """A rank ended without waiting for a call that it had started. `mismatched_ranks` are these ranks."""

    mismatched_ranks: tuple[int, ...] = ()


class RankFailed(MeshcommError):
    """The program raised on some ranks. `by_rank` has the exception of each rank; the first one is the cause.

    Also raised if ranks were lost and cannot be replaced because other ranks have ended. Then `by_rank` records
    the place at which each rank was lost.
    """

    by_rank: dict[int, BaseException]


class TrainingError(MeshcommError):
    """A training run cannot continue. The text gives the step and the reason."""


class MeshTestError(MeshcommError):
    """A test cannot run on a mesh as written."""


class ViewError(MeshcommError):
    """A page cannot be built from the given input, or cannot be served or written at the requested place."""
