"""The error of a call that the backend gave up on, or that it holds: what it said, and what the ranks were found to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Final, final

from meshcomm.comm.diagnosis import Diagnosis, Statuses, described, diagnose, diagnose_message
from meshcomm.comm.flight_recorder import FlightRecorder
from meshcomm.errors import CallMismatchError, CollectiveTimeout, CommunicationError, MeshcommError, PeerLost
from meshcomm.layout.sizes import fold

# What to try where a rank cannot be reached at the address that it offered.
INTERFACES: Final = (
    "[network] interfaces; meshcomm doctor, under the launcher, shows at which address each rank is"
)


class Reason(Enum):
    """Why a backend ends a call; the value is what an error says of the call."""

    UNREACHABLE = "could not connect"
    TIMEOUT = "did not end in time"
    CLOSED = "lost a peer"
    DATA = "failed: what came does not fit"
    OTHER = "failed"


# What backends say, in lower case; the first that is found counts. Tried: Gloo of torch 2.11 to 2.15. Of NCCL from
# ProcessGroupNCCL.cpp and NCCL's own messages.
_TEXTS: Final[Mapping[str, Sequence[tuple[str, Reason]]]] = {
    "gloo": (
        ("connecting", Reason.UNREACHABLE),  # to an address that another rank offered
        ("connect timeout", Reason.UNREACHABLE),
        ("connection closed", Reason.CLOSED),
        ("connection reset", Reason.CLOSED),
        ("connection refused", Reason.CLOSED),
        ("broken pipe", Reason.CLOSED),
        ("timed out", Reason.TIMEOUT),
        ("timeout", Reason.TIMEOUT),
        ("enforce fail", Reason.DATA),
    ),
    "nccl": (
        ("ncclremoteerror", Reason.CLOSED),
        ("remote process exited", Reason.CLOSED),
        ("communicator was aborted", Reason.CLOSED),
        ("watchdog caught collective operation timeout", Reason.TIMEOUT),
        ("ncclinvalidusage", Reason.DATA),
    ),
}


def reason_of(error: BaseException) -> Reason:
    """Why the backend ended a call, by the type of its error first; what raised another error from it counts too."""
    if isinstance(error, TimeoutError):
        return Reason.TIMEOUT
    if isinstance(error, ConnectionError):
        return Reason.CLOSED
    text = str(error).lower()
    found = next((why for texts in _TEXTS.values() for said, why in texts if said in text), Reason.OTHER)
    if found is Reason.OTHER and error.__cause__ is not None:
        return reason_of(error.__cause__)
    return found


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def shorten(error: BaseException) -> None:
    """Keep the first line of the backend's error alone: the rest is a trace through C++, and its frames are ours."""
    if isinstance(error, RuntimeError):
        error.args = (first_line(error),)
    error.__traceback__ = None


@final
class FailedCall:
    """The last collective on a group, or the message that its rank waits for, and what the backend said of it.

    waiting: the message, as `MessageLog.status` has it; None for a collective. number: the collective's.

    Args:
        recorder: of the group, when the call has just failed, or is under way.
        where: opens the error, as in `all_reduce along "dp" on rank 0 (dp=0)`.
        error: the backend's.
    """

    def __init__(self, recorder: FlightRecorder, where: str, error: BaseException) -> None:
        found = recorder.status()
        self.label = recorder.label
        self.ranks = recorder.ranks
        # A message past the mesh is waited for while a collective before it, past the mesh too, may be under way.
        inside = recorder.under_way is not None
        self.waiting: Mapping[str, Any] | None = None if inside else found["messages"]["waiting"]
        self.number: int = found["started"]
        self.reason = reason_of(error)
        self._said = first_line(error)
        self._where = where
        # As `CommunicationError.call` has it.
        self._call: Mapping[str, Any] | None = None
        if self.waiting is None:
            last = found["last"] or {"number": 0, "call": "a call", "dim": "?", "site": "?"}
            self._call = {"label": self.label, **last}
            call, self._told = (
                f"call {self.number}",
                f'{last["call"]} along "{last["dim"]}", call {self.number}',
            )
        else:
            last = self.waiting
            call = described(last)
            self._told = f'{call} along "{last["dim"]}"'
        self._site = last["site"]
        who = list(self.ranks) if len(self.ranks) <= 16 else fold(self.ranks)
        self._first = f"{call} on {self.label}, ranks {who}, at {self._site}"

    def facts(self) -> dict[str, Any]:
        """As reports hold it."""
        return {
            "label": self.label,
            "error": [self._said],
            "call": self._told,
            "site": self._site,
            "waiting": self.waiting,
        }

    def asks(self, rank: int) -> list[int]:
        """Whom `rank` has to ask for a diagnosis: all others of the group, or of a message its other ends."""
        peers = None if self.waiting is None else [peer for _, peer, _, _ in self.waiting["parts"]]
        asked = self.ranks if peers is None or None in peers else dict.fromkeys(peers)
        return [other for other in asked if other != rank]

    def diagnosis(self, rank: int, statuses: Statuses) -> Diagnosis:
        """Who keeps the call of `rank` from ending, by the statuses of the ranks that answered."""
        if self.waiting is None:
            return diagnose(self.label, self.ranks, self.number, statuses)
        return diagnose_message(rank, self.label, self.waiting, statuses)

    def error(self, found: Diagnosis, reports: str) -> MeshcommError:
        """The error for the rank whose call it was.

        reports: where reports are left, "" for nowhere.
        """
        if found.mismatched:
            mismatch = CallMismatchError(
                f"{self._where} {self.reason.value}: the ranks of the group make different calls, rank "
                f"{fold(found.mismatched)} {'is' if len(found.mismatched) == 1 else 'are'} mismatched",
                given="\n".join([self._first, *found.lines]),
                expected="the same calls in the same order on every rank of the group",
                hint="look for a call that only some ranks make; mesh.step() at the end of each step names the "
                "step and the call that was left out",
            )
            mismatch.mismatched_ranks = tuple(found.mismatched)
            return mismatch
        lines = list(found.lines)
        if self.waiting is None:
            what = "every rank of the group has come to the call"
            expected = "every rank of the group to make the same call and stay alive until it ends"
        else:
            what = "both ends have begun every message of the call"
            expected = (
                "a receive for every send, with the same tag, and both ends to stay alive until it ends"
            )
        if not found.missing:
            lines = [f"{what}; moving its data failed: {self._said}", *lines]
        if found.silent or self.reason is Reason.CLOSED:
            return self._error(PeerLost, Reason.CLOSED, lines, expected, _hint(reports), found.missing)
        if self.reason is Reason.DATA:
            return self._error(CommunicationError, Reason.DATA, lines, expected, _hint(reports))
        hint = _hint(reports)
        if self.reason is Reason.UNREACHABLE and not found.missing:
            hint = INTERFACES
        return self._error(CollectiveTimeout, Reason.TIMEOUT, lines, expected, hint, found.missing)

    def unasked(self, rank: int, silent: bool) -> MeshcommError:
        """The error where nobody could be asked: what the backend alone can tell.

        silent: the job's store does not answer, and has not failed either.
        """
        others = [other for other in self.ranks if other != rank]
        lost = silent or self.reason is Reason.CLOSED
        # Of two ranks it is clear which one broke the connection.
        missing = others if silent or (lost and len(others) == 1) else []
        why = "the host that holds it has ended or cannot be reached from this one"
        lines = [
            self._said,
            f"rank{'s' if len(others) > 1 else ''} {fold(others)} could not be asked: the job's store does not answer; {why}",
        ]
        kind = (
            PeerLost if lost else CollectiveTimeout if self.reason is Reason.TIMEOUT else CommunicationError
        )
        return self._error(
            kind,
            Reason.CLOSED if lost else self.reason,
            lines,
            "a store that lives as long as the job: in the launcher, or in rank 0",
            "look for the first error of the process that holds the store",
            missing,
        )

    def other(self) -> MeshcommError:
        """The error where the backend failed by itself: no rank is waited for."""
        return self._error(
            CommunicationError,
            Reason.OTHER,
            [self._said],
            "a call that the backend can make",
            "look at the backend's own error, which is the cause",
        )

    def _error(
        self,
        kind: type[CommunicationError],
        reason: Reason,
        lines: Sequence[str],
        expected: str,
        hint: str,
        missing: Sequence[int] = (),
    ) -> MeshcommError:
        error = kind(
            f"{self._where} {reason.value}",
            given="\n".join([self._first, *lines]),
            expected=expected,
            hint=hint,
        )
        error.call = self._call
        if isinstance(error, CollectiveTimeout):
            error.missing = tuple(missing)
        return error


def _hint(reports: str) -> str:
    if reports:
        return f"meshcomm report {reports} puts the ranks' reports together"
    return "look at the ranks named above"
