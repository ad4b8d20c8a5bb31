"""A call that the backend gave up on, in words: who has not come to it, and what do they do instead?"""

from __future__ import annotations

from typing import Any, final

from meshcomm.comm.handle import broken
from meshcomm.comm.recorder import Recorder
from meshcomm.comm.verdict import absent_from, described, lines_of, message_lines, unmatched
from meshcomm.errors import CollectiveTimeout, CommunicationError, PeerLost
from meshcomm.layout.sizes import fold


@final
class FailedCall:
    """The last call on a group, or the message that its rank waits for, and what the backend said of it.

    Args:
        recorder: of the group, when the call has just failed.
        where: opens the error, as in `all_reduce along "dp" on rank 0 (dp=0)`.
        error: the backend's.
    """

    def __init__(self, recorder: Recorder, where: str, error: BaseException) -> None:
        self._recorder = recorder
        self._where = where
        self._error = error
        found = recorder.status()
        self._waiting = found["messages"]["waiting"]
        if recorder.inside or self._waiting is None:
            self._last = found["last"] or {"number": 0, "call": "a call", "dim": "?", "site": "?"}
            self._waiting = None
            self._call = f"call {self._last['number']}"
            self._begun = f'{self._last["call"]} along "{self._last["dim"]}", {self._call}'
        else:
            self._last, self._call = self._waiting, described(self._waiting)
            self._begun = f'{self._call} along "{self._last["dim"]}"'

    def facts(self) -> dict[str, Any]:
        """As reports hold it."""
        return {
            "label": self._recorder.label,
            "error": str(self._error).splitlines()[:1],
            "call": self._begun,
            "site": self._last["site"],
            "waiting": self._waiting,
        }

    def _collective(self) -> dict[str, Any] | None:
        """As `CommunicationError.call` has it; None for a message."""
        return {"label": self._recorder.label, **self._last} if self._waiting is None else None

    def verdict(self, rank: int, statuses: dict[int, Any], *, mute: bool, reports: str) -> CommunicationError:
        """The error for `rank`, whose call it was, from what the ranks that answered are doing.

        mute: the store did not answer. reports: where reports are left, "" for nowhere.
        """
        recorder, error = self._recorder, self._error
        said = " ".join(str(error).splitlines()[:1])
        if self._waiting is None:
            absent = absent_from(recorder.label, recorder.ranks, recorder.started, statuses)
            lines = lines_of(absent, statuses) or [
                f"every rank of the group has come to the call; moving its data failed: {said}"
            ]
            expected = "every rank of the group to make the same call and stay alive until it ends"
        else:
            absent = unmatched(rank, recorder.label, self._waiting, statuses)
            lines = message_lines(absent, statuses) or [
                f"both ends have begun every message of the call; moving the data failed: {said}"
            ]
            expected = (
                "a receive for every send, with the same tag, and both ends to stay alive until it ends"
            )
        if mute and absent:
            ranks = fold([each.rank for each in absent])
            lines = [
                f"rank{'s' if len(absent) > 1 else ''} {ranks} could not be asked: the job's store does not "
                "answer; the host that holds it has ended or cannot be reached from this one",
                said,
            ]
        kind, what = (
            (PeerLost, "lost a peer")
            if broken(error) or any(each.doing is None for each in absent)
            else (CollectiveTimeout, "did not end in time")
        )
        first = f"{self._call} on {recorder.label}, ranks {recorder.ranks}, at {self._last['site']}"
        verdict = kind(
            f"{self._where} {what}",
            given="\n".join([first, *lines]),
            expected=expected,
            hint=_hint(not absent and "connecting" in said, reports),
        )
        verdict.call = self._collective()
        verdict.missing = tuple(dict.fromkeys(each.rank for each in absent))
        return verdict

    def unasked(self, rank: int) -> CommunicationError:
        """The error where the store does not answer: what the backend alone can tell."""
        recorder = self._recorder
        others = [other for other in recorder.ranks if other != rank]
        lost = broken(self._error)
        # Of two ranks it is clear which one broke the connection.
        named = others if lost and len(others) == 1 else []
        first = f"{self._call} on {recorder.label}, ranks {recorder.ranks}, at {self._last['site']}"
        lines = [first, *(str(self._error).splitlines()[:1])]
        lines += [f"rank {other} broke the connection" for other in named]
        kind, what = (PeerLost, "lost a peer") if lost else (CommunicationError, "failed")
        found = kind(
            f"{self._where} {what}, and nobody could be asked why: the job's store does not answer",
            given="\n".join(lines),
            expected="a store that lives as long as the job: in the launcher, or in rank 0",
            hint="look for the first error of the process that holds the store",
        )
        found.call = self._collective()
        if isinstance(found, PeerLost):
            found.missing = tuple(named)
        return found


def _hint(unconnected: bool, reports: str) -> str:
    if unconnected:
        # Gloo's word for an address that another rank offered and that leads nowhere from here.
        return (
            "[network] interfaces; meshcomm doctor, under the launcher, shows at which address each rank is"
        )
    if reports:
        return f"meshcomm report {reports} puts the ranks' reports together"
    return "look at the ranks named above"
