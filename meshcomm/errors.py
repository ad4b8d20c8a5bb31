"""meshcomm's exceptions. Each message states the error, the given value, the expected value and a fix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshcomm.lines import lines_of


class MeshcommError(Exception):
    """Base class of all meshcomm errors.

    The first line of the message states the error. Up to three indented lines follow, with the given value, the
    expected value and a fix.

    facts: attributes that the error's class documents.
    of_job: whether the ranks that these attributes name are those of this job; False for the ranks of a link.
    """

    of_job = True

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

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows: the program's lines up to this error and up to its first cause, and the message."""
        first: BaseException = self
        while first.__cause__ is not None:
            first = first.__cause__
        lines = dict.fromkeys([*lines_of(self), *lines_of(first)])
        return [
            *lines,
            f"{type(self).__name__}: {self}",
            "all frames: import traceback; traceback.print_last()",
        ]


def parts_of(error: BaseException) -> dict[str, Any]:
    """Return an error as plain data: type, what, given, expected and try, of which an error of other code has the first two."""
    ours = error if isinstance(error, MeshcommError) else MeshcommError(str(error))
    parts = {"what": ours.what, "given": ours.given, "expected": ours.expected, "try": ours.hint}
    return {"type": type(error).__name__, **parts}


class ConfigError(MeshcommError):
    """A configuration file or override is invalid. The error lists every problem found, not only the first."""


class LayoutError(MeshcommError):
    """Names, sizes or ranks do not form a mesh."""


class UnknownDim(LayoutError):
    """The mesh does not have the named dim, or no declared group covers the dims."""


class LaunchError(MeshcommError):
    """The way this process was started does not allow it to open a mesh."""


class MeshMismatchError(MeshcommError):
    """Ranks disagree about the mesh, or a rank is missing from the rendezvous.

    `mismatched_ranks` lists the ranks that differ from the majority, or all ranks if there is no majority. `missing` lists
    the ranks that did not arrive.
    """

    mismatched_ranks: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()


class NotMember(MeshcommError):
    """A rank outside the mesh called a method that only ranks of the mesh may call."""


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
    """The backend failed while communicating. The backend's error is the cause of this exception.

    `call` describes the collective that failed, if any: the "label" of its group, its sequence "number" in the
    group, "call" (the operation), "dim" and "callsite" (the user's line).

    `chain` lists the ranks that this rank waits for, directly or through others, and this rank itself. Each entry has the
    rank, its name with its coords, what the rank does, and the ranks that it waits for.
    """

    call: Mapping[str, Any] | None = None
    chain: Sequence[Sequence[Any]] = ()


class ObjectError(MeshcommError):
    """A Python object cannot be sent, or a received message is not a valid object.

    The message shows where in the object the problem is.
    """


class StoreError(MeshcommError):
    """The job's store refused an operation or cannot be reached."""


class StoreTimeout(StoreError):
    """A key was not set within the timeout."""


class CallMismatchError(MeshcommError):
    """Ranks of a group made different calls. Raised before their data meets, or later if `mesh.step` found the difference.

    `mismatched_ranks` lists the global ranks that differ from the majority. Without a majority, as in a group of two ranks,
    it lists all ranks that made a call. `step` is the first step whose results are not reliable, in the program's
    numbering, or None if `mesh.step` did not find the difference.
    """

    mismatched_ranks: tuple[int, ...] = ()
    step: int | None = None


class CollectiveTimeout(CommunicationError):
    """A call did not complete within its group's timeout. `missing` lists the global ranks that had not reached the call."""

    missing: tuple[int, ...] = ()


class PeerLost(CollectiveTimeout):
    """A rank of the group has exited or is stopped. `missing` lists the ranks that do not answer or did not arrive."""


class RankLost(CommunicationError):
    """Ranks were lost and new processes replaced them. `missing` lists the lost ranks.

    Every other rank raises this from its current or next call. `Elastic.reopen` connects to the new
    processes.
    """

    missing: tuple[int, ...] = ()


class TransferMismatch(MeshcommError):
    """The two sides of a link do not fit together. Raised on every rank of both sides, before any bytes are sent.

    `problems` lists every difference as text.
    """

    problems: tuple[str, ...] = ()


class TransferFailed(CommunicationError):
    """A tensor or a version of weights did not arrive, because a rank of either side was lost or did not come.

    `version` is the version, if the ranks had agreed on it. `missing` lists the ranks that are lost or have not come, as (side,
    rank) pairs with side "source" or "target".
    """

    of_job = False
    version: int | None = None
    missing: tuple[tuple[str, int], ...] = ()


class SourceChanged(MeshcommError):
    """A source tensor changed while it was sent. Raised on every rank of both sides; no target has the version.

    `names` lists the tensors.
    """

    names: tuple[str, ...] = ()


class WeightsTorn(MeshcommError):
    """The weights on this rank are not those of one version: none has arrived, or the last one was interrupted."""


class TransferTimeout(CommunicationError):
    """One side of a link did not come in time: the whole `side`, "source" or "target", or some of its ranks.

    `missing` lists the global ranks of that side's job that did not come. It is empty if the whole side did not come.
    """

    side: str = ""
    missing: tuple[int, ...] = ()


class BarrierTimeout(CommunicationError):
    """Some ranks did not reach a barrier in time. `missing` lists the global ranks that did not arrive."""

    missing: tuple[int, ...] = ()


class DeadlockError(MeshcommError):
    """Ranks wait for each other in a cycle, or for an event that no rank will cause. Raised without waiting for a timeout.

    `circle` lists the global ranks of the cycle, each waiting for the next, and is empty if there is no cycle.
    `waiting` lists all waiting ranks.
    """

    circle: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()


class UnmatchedMessage(MeshcommError):
    """A send without a receive, or a receive without a send. `waiting` lists the ranks that made these calls."""

    waiting: tuple[int, ...] = ()


class HandleNotWaited(MeshcommError):
    """A rank finished without waiting for a call that it had started. `mismatched_ranks` lists all such ranks."""

    mismatched_ranks: tuple[int, ...] = ()


class RankFailed(MeshcommError):
    """The program raised an exception on some ranks. `by_rank` maps each rank to its exception; the first is the cause.

    Also raised if ranks were lost and cannot be replaced because other ranks have finished. In that case, `by_rank`
    records where each rank was lost.
    """

    by_rank: dict[int, BaseException]


class TrainingError(MeshcommError):
    """A training run cannot continue. The message gives the step and the reason."""


class MeshTestError(MeshcommError):
    """A test, as written, cannot run on a mesh."""


class ViewError(MeshcommError):
    """A page cannot be built from the given input, or cannot be served or written at the requested location."""
