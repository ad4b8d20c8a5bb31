"""The error of a failed call, from the verdict on the ranks that it waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

from meshcomm.errors import CallMismatchError, CollectiveTimeout, CommunicationError, MeshcommError, PeerLost
from meshcomm.layout.sizes import fold, ranks_text
from meshcomm.watching.exceptions import Reason, first_line, reason_of
from meshcomm.watching.recorder import FlightRecorder
from meshcomm.watching.verdict import BlockedCall, Diagnosis, Waiting, blamed
from meshcomm.watching.words import INTERFACES, UNKNOWN, call_text, described, made_at


@final
class FailedCall:
    """A failed call, which is a group's last collective or the messages that a rank waits for, and the backend's error.

    group: as in `FlightRecorder.status`. where: the beginning of the error text. made: the failed
    collective, as in `FlightRecorder.call_data`, if it is not the group's last. facts: the call, as stored in
    reports. at: text that names the call and its rank.
    """

    def __init__(
        self,
        rank: int,
        group: Mapping[str, Any],
        where: str,
        error: BaseException,
        made: Mapping[str, Any] | None = None,
    ) -> None:
        label, ranks = group["label"], group["ranks"]
        waiting: Waiting = None if made is not None else group["messages"]["waiting"]
        last = made or group["last"] or UNKNOWN
        self.blocked = BlockedCall(rank, label, ranks, last["number"], waiting)
        self.reason = reason_of(error)
        self._error_line = first_line(error)
        self.at = where
        call = waiting or last
        # In the form of `CommunicationError.call`.
        self._call = None if waiting else {"label": label, **last}
        which = described(waiting) if waiting else f"call {last['number']}"
        who = list(ranks) if len(ranks) <= 16 else fold(ranks)
        self._first = f"{which} on {label}, ranks {who}, {made_at(call)}"
        self.facts: dict[str, Any] = {
            # `waiting` has the parts of a message.
            **{key: call[key] for key in call if key != "parts"},
            "label": label,
            "error": [self._error_line],
            "call": call_text(call),
            "waiting": waiting,
        }

    @classmethod
    def last_of(cls, rank: int, recorder: FlightRecorder, where: str, error: BaseException) -> FailedCall:
        """Return the call that has just failed in a group, or is still in progress."""
        group = recorder.status()
        # The program can wait for a message made outside the mesh while an earlier collective is still under way.
        return cls(rank, group, where, error, group["last"] if recorder.under_way is not None else None)

    @property
    def asks(self) -> list[int]:
        """The ranks to ask for a diagnosis: all other ranks of the group, or the peers of the messages."""
        peers = (
            set()
            if self.blocked.messages is None
            else {part["peer"] for part in self.blocked.messages["parts"]}
        )
        everybody = not peers or None in peers
        return [
            rank for rank in self.blocked.ranks if rank != self.blocked.rank and (everybody or rank in peers)
        ]

    def error(self, diagnosis: Diagnosis, reports: str) -> MeshcommError:
        """Return the error to raise on the call's rank. reports: the reports' folder; "" if no report was written."""
        hint = "look at the ranks named above"
        if reports:
            hint = f"meshcomm report {reports} combines the ranks' reports"
        if diagnosis.mismatched:
            return CallMismatchError(
                f"{self.at} {self.reason.value}: the ranks of the group make different calls, "
                f"{blamed(diagnosis.mismatched, diagnosis.tie)}",
                given="\n".join([self._first, *diagnosis.lines]),
                expected="the same calls in the same order on every rank of the group",
                hint="look for a call that only some ranks make; mesh.step() at the end of each step names the "
                "step and the call that was left out",
                mismatched_ranks=tuple(diagnosis.mismatched),
            )
        if self.blocked.messages is None:
            complete = "every rank of the group has arrived at the call"
            expected = "every rank of the group to make the same call and stay alive until it ends"
        else:
            complete = "both ends have begun every message of the call"
            expected = (
                "a receive for every send, with the same tag, and both ends to stay alive until it ends"
            )
        lines = list(diagnosis.lines)
        if not diagnosis.missing:
            lines.insert(0, f"{complete}; moving its data failed: {self._error_line}")
            if self.reason is Reason.UNREACHABLE:
                hint = INTERFACES
        reason = Reason.CLOSED if diagnosis.silent else self.reason
        if reason is Reason.UNREACHABLE:
            reason = Reason.TIMEOUT
        return self._error(reason, lines, expected, hint, diagnosis.missing, diagnosis.chain)

    def error_unasked(self, silent: bool, host: int | None = None) -> MeshcommError:
        """Return the error if no rank could be asked: only the backend's error is known.

        silent: whether the job's store did not answer, although it has not failed. host: the rank whose process serves the
            store, which is lost with it; None if it is no rank of the group.
        """
        others = [rank for rank in self.blocked.ranks if rank != self.blocked.rank]
        reason = Reason.CLOSED if silent or host in others else self.reason
        # With two ranks, it is clear which rank broke the connection.
        clear = silent or (reason is Reason.CLOSED and len(others) == 1)
        why = "the host of the store is down or cannot be reached from this host"
        lines = [
            self._error_line,
            f"{ranks_text(others)} could not be asked: the job's store does not answer; {why}",
        ]
        if host is not None and host in others:
            others, clear = [host], True
            lines.append(f"rank {host} serves the store: its process has ended or is stopped")
        expected = "a store that lives as long as the job, in the launcher or in rank 0"
        hint = "look for the first error reported by the process that hosts the store"
        return self._error(reason, lines, expected, hint, others if clear else ())

    def error_alone(self) -> MeshcommError:
        """Return the error if the backend itself failed and the call waits for no rank."""
        hint = "look at the backend's own error, which is the cause"
        return self._error(Reason.OTHER, [self._error_line], "a call that the backend can complete", hint)

    def _error(
        self,
        reason: Reason,
        lines: Sequence[str],
        expected: str,
        hint: str,
        missing: Sequence[int] = (),
        chain: Sequence[Sequence[Any]] = (),
    ) -> MeshcommError:
        kind = {Reason.CLOSED: PeerLost, Reason.TIMEOUT: CollectiveTimeout}.get(reason, CommunicationError)
        given = "\n".join([self._first, *lines])
        facts: Any = {"missing": tuple(missing)} if issubclass(kind, CollectiveTimeout) else {}
        what = f"{self.at} {reason.value}"
        return kind(what, given=given, expected=expected, hint=hint, call=self._call, chain=chain, **facts)
