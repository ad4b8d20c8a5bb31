"""Finds why a call does not end: which ranks are missing, at which lines they are, and which error to raise."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar, final

from meshcomm.comm.mismatch import blamed, majority
from meshcomm.errors import CallMismatchError, CollectiveTimeout, CommunicationError, MeshcommError, PeerLost
from meshcomm.layout.sizes import fold, rank_text, ranks_text

if TYPE_CHECKING:
    from meshcomm.comm.flight_recorder import FlightRecorder

Node = TypeVar("Node")

# The status of one rank, as in `RankRecord.data`, and the statuses of several ranks by rank.
Status: TypeAlias = Mapping[str, Any]
Statuses: TypeAlias = Mapping[int, Status]
# The messages that a rank waits for, as in `MessageLog.status`; None for a collective.
Waiting: TypeAlias = Mapping[str, Any] | None

# An error has lines for at most this many ranks.
_LINES: Final = 16

# Why a rank does not answer, by the state of its process; "" if unknown.
_SILENT: Final = {
    "": "does not answer: it has ended, is stopped, or a call into C holds Python's GIL",
    "ended": "does not answer: its process has ended",
    "stopped": "does not answer: its process is stopped",
    "runs": "does not answer, but its process runs: a call into C holds Python's GIL, or its host is overloaded",
}

# The hint for a rank that cannot be reached at the address that it offered.
INTERFACES: Final = "[network] interfaces; meshcomm doctor, under the launcher, shows each rank's address"


class Reason(Enum):
    """Why a backend ends a call; the value becomes part of the error's text."""

    UNREACHABLE = "could not connect"
    TIMEOUT = "did not end in time"
    CLOSED = "lost a peer"
    DATA = "failed: the received data does not match the call"
    OTHER = "failed"


# Parts of backends' error texts, in lower case; the first match decides. Gloo's are tested with torch 2.11 to 2.15. Gloo
# connects to an address that another rank offered. NCCL's are from ProcessGroupNCCL.cpp and NCCL's own messages.
_TEXTS: Final = (
    (Reason.UNREACHABLE, ("connecting", "connect timeout", "unable to find address")),
    (Reason.CLOSED, ("connection closed", "connection reset", "connection refused", "broken pipe")),
    (Reason.TIMEOUT, ("timed out", "timeout")),
    (Reason.DATA, ("enforce fail", "ncclinvalidusage")),
    (Reason.CLOSED, ("ncclremoteerror", "remote process exited", "communicator was aborted")),
)


def reason_of(error: BaseException) -> Reason:
    """Return why the backend ended a call. The type of the error takes precedence over its text. The errors in its
    chain of causes are also searched.
    """
    if isinstance(error, TimeoutError):
        return Reason.TIMEOUT
    if isinstance(error, ConnectionError):
        return Reason.CLOSED
    text = str(error).lower()
    found = next((why for why, texts in _TEXTS if any(said in text for said in texts)), Reason.OTHER)
    if found is Reason.OTHER and error.__cause__ is not None:
        return reason_of(error.__cause__)
    return found


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


# -- from statuses to a diagnosis --------------------------------------------------------------------------


class BlockedCall(NamedTuple):
    """A call that does not end on one rank: collective `number` of a group, or the `messages` that `rank` waits for."""

    rank: int
    label: str
    ranks: Sequence[int]
    number: int
    messages: Waiting = None


class Diagnosis(NamedTuple):
    """The ranks that prevent a call from completing.

    missing: the ranks that have not arrived at the call. silent: whether some of them do not answer. mismatched: the
    ranks whose call `number` differs from the majority's. lines: one line per rank. tie: whether there is no majority.
    """

    missing: Sequence[int] = ()
    silent: bool = False
    mismatched: Sequence[int] = ()
    number: int = 0
    lines: Sequence[str] = ()
    tie: bool = False


def diagnose(
    blocked: BlockedCall, statuses: Statuses, processes: Mapping[int, str] = MappingProxyType({})
) -> Diagnosis:
    """Return why the call does not end.

    processes: for ranks that are not in `statuses`, the state of their process: "ended", "stopped" or "runs".
    """
    if (
        blocked.messages is None
        and (mismatch := find_mismatch(blocked.label, blocked.ranks, statuses)) is not None
    ):
        return mismatch
    found = absent(blocked, statuses)
    lines = [
        f"{name_of_rank(rank, statuses.get(rank))} {doing or _SILENT[processes.get(rank, '')]}"
        for rank, doing in found
    ]
    if not found and blocked.messages is None:
        lines = [
            f"{name_of_rank(rank, status)} has continued: it {doing_of(status)}"
            for rank, status in ((rank, statuses[rank]) for rank in blocked.ranks if rank in statuses)
            if (group := _group(status, blocked.label)) is not None and group["started"] > blocked.number
        ]
    missing = list(dict.fromkeys(rank for rank, _ in found))
    silent = any(doing is None and processes.get(rank) != "runs" for rank, doing in found)
    return Diagnosis(missing, silent, lines=_first(lines))


def find_mismatch(label: str, ranks: Sequence[int], statuses: Statuses) -> Diagnosis | None:
    """Return the first recorded sequence number in the group at which ranks made different calls.

    For operations that need the same size on all ranks, the sizes are compared too.
    """
    recent = {
        rank: {number: made for number, *made in group.get("recent", ())}
        for rank in ranks
        if (group := _group(statuses.get(rank), label)) is not None
    }
    for number in sorted(set().union(*recent.values())):
        calls = {rank: made[number] for rank, made in recent.items() if number in made}
        sized = len({call for call, *_ in calls.values()}) == 1
        what = {
            rank: f"{call} of {nbytes} bytes" if sized and nbytes is not None else call
            for rank, (call, _, nbytes) in calls.items()
        }
        usual, mismatched = majority(what)
        if mismatched:
            made = {rank: f"made {what[rank]}, at {calls[rank][1]}, as call {number}" for rank in calls}
            lines = _first([f"{name_of_rank(rank, statuses[rank])} {made[rank]}" for rank in mismatched])
            lines += [f"{ranks_text(usual)} {made[usual[0]]}"] if usual else []
            return Diagnosis((), False, mismatched, number, lines, not usual)
    return None


def absent(blocked: BlockedCall, statuses: Statuses) -> list[tuple[int, str | None]]:
    """Return the ranks that have not arrived at a call, and the activity of each; None for a rank that does not answer."""
    if blocked.messages is not None:
        return [each for part in blocked.messages["parts"] for each in _unmatched(blocked, part, statuses)]
    found: list[tuple[int, str | None]] = []
    for rank in blocked.ranks:
        status = statuses.get(rank)
        group = _group(status, blocked.label)
        if status is None:
            found.append((rank, None))
        elif group is None or group["started"] < blocked.number:
            doing = doing_of(status, blocked.label) + _waits_for(status, statuses)
            found.append((rank, f"has not arrived: it {doing}"))
    return found


def _waits_for(status: Status, statuses: Statuses) -> str:
    """Return text that names the queried ranks that have not reached the collective in which a rank is blocked."""
    if status.get("failed"):
        return ""
    for group in reversed(status["groups"]):
        call = _blocked_in(group)
        if call is None or "parts" in call:
            continue
        others = {rank: _group(statuses.get(rank), group["label"]) for rank in group["ranks"]}
        behind = [rank for rank, each in others.items() if each and each["started"] < call["number"]]
        if behind:
            has = "have" if len(behind) > 1 else "has"
            return f", which {ranks_text(behind)} {has} not reached"
    return ""


def _unmatched(blocked: BlockedCall, part: Sequence[Any], statuses: Statuses) -> list[tuple[int, str | None]]:
    """Return the ranks that have not begun their half of a message.

    For a receive from any rank, these are all other ranks. If one of them has sent more than the waiting rank has
    received, only ranks that do not answer are returned.
    """
    rank, label = blocked.rank, blocked.label
    direction, source, tag, number = part
    half, has = ("recv", "received") if direction == "send" else ("send", "sent")
    found: list[tuple[int, str | None]] = []
    on_its_way = False
    for peer in [other for other in blocked.ranks if other != rank] if source is None else [source]:
        status = statuses.get(peer)
        if status is None:
            found.append((peer, None))
            continue
        done = _messages_begun(status, label, half, rank)
        count = done.pop(tag, 0)
        if source is None:
            on_its_way |= count > _messages_begun(statuses[rank], label, "recv", peer).get(tag, 0)
            said = f"{count} with tag {tag}, all received" if count else f"none with tag {tag}"
        elif count < number:
            said = f"{count} of {number} with tag {tag}"
        else:
            continue
        others = ", ".join(f"{count} with tag {other}" for other, count in sorted(done.items()))
        said += f", and {others}" if others else ""
        found.append((peer, f"has {has} {said}; it {doing_of(status, label)}"))
    # One message is enough, but a rank that does not answer may have prevented it from arriving.
    return [each for each in found if each[1] is None] if on_its_way else found


def described(waiting: Mapping[str, Any]) -> str:
    """Return text such as `recv from rank 0, message 3 with tag 0` for the messages that a call waits for."""
    parts = [
        f"from any rank with tag {tag}"
        if peer is None
        else f"{'to' if direction == 'send' else 'from'} rank {peer}, message {number} with tag {tag}"
        for direction, peer, tag, number in waiting["parts"]
    ]
    return f"{waiting['call']} {' and '.join(parts)}"


def doing_of(status: Status, label: str | None = None) -> str:
    """Return text that names the call that failed on a rank or blocks the rank; otherwise, the line that the rank executes."""
    failed = status.get("failed")
    if failed is not None:
        # The rank's later activity usually follows from the failure.
        closed = f"{_left(status)}, and " if status.get("closed") else ""
        ranks = failed.get("waited_for")
        why = f": it waited for {ranks_text(ranks)}" if ranks else ""
        return f"{closed}was in {failed['call']}, at {failed['callsite']}, which failed{why}"
    calls = [call for group in status["groups"] if (call := _blocked_in(group)) is not None]
    if calls:
        # A collective explains more than a message.
        call = next((each for each in reversed(calls) if "parts" not in each), calls[-1])
        return f"is in {call_text(call)}, at {call['callsite']}"
    own = _group(status, label)
    after = ""
    thread = f"; {status['thread']}" if status.get("thread") else ""
    if own is not None and own["last"] is not None:
        after = f", after {own['last']['call']}, call {own['last']['number']}"
    if status.get("closed"):
        raised = status.get("raised")
        return f"{_left(status)}{after}" + (f", when it raised {raised}" if raised else thread)
    return f"is at {status['main']}{after}{thread}"


def _left(status: Status) -> str:
    return "has closed the mesh" if status["coords"] else "has ended, or left torch's default group"


def name_of_rank(rank: int, status: Status | None) -> str:
    """Return the rank as text, with its coords if the rank answered."""
    return rank_text(rank, None if status is None else status["coords"])


def activity(rank: int, status: Status | None, process: str = "") -> str:
    """Return one line of text: the rank, and its call or line. process: the state of its process, see `diagnose`."""
    return f"{name_of_rank(rank, status)} {_SILENT[process] if status is None else doing_of(status)}"


def root_cause(statuses: Statuses) -> list[str]:
    """Return the root cause in a job's reports: differing calls, a circular wait, or the ranks that others wait for."""
    for label, mismatch in _mismatches(statuses):
        return [
            f"the ranks of {label} made different calls with the sequence number {mismatch.number}:",
            *(f"  {line}" for line in mismatch.lines),
            "  mesh.step() at the end of each step finds the step, and the call that was left out",
        ]
    waits, calls = _waits_of(statuses)
    if not waits:
        return ["no rank was found waiting for another: the reports do not show a cause"]
    if circle := find_circle(waits):
        lines = ["circular wait:"]
        for rank, other in zip(circle, [*circle[1:], circle[0]], strict=True):
            lines.append(f"  {name_of_rank(rank, statuses[rank])} in {calls[rank]} waits for rank {other}")
        return lines
    # The cause is a rank that others wait for and that waits for no other.
    roots: dict[int, list[int]] = {}
    for rank, peers in waits.items():
        for peer in peers - waits.keys():
            roots.setdefault(peer, []).append(rank)
    lines = []
    for root, waiters in sorted(roots.items(), key=lambda item: -len(item[1])):
        waits_for = f"wait{'s' if len(waiters) == 1 else ''} for it in {calls[waiters[0]]}"
        lines.append(f"{activity(root, statuses.get(root))}; rank {fold(sorted(waiters))} {waits_for}")
    return lines


def find_hung(statuses: Statuses, processes: Mapping[int, str]) -> dict[int, str]:
    """Return the ranks that others wait for, directly or through other ranks, although they wait for nobody: they do not answer,
    or are in no call. With what each of them does. {} if ranks make different calls, or wait in a circle.

    processes: see `diagnose`.
    """
    waits, _ = _waits_of(statuses)
    if find_circle(waits) or any(True for _ in _mismatches(statuses)):
        return {}
    found = {}
    for rank in sorted({peer for peers in waits.values() for peer in peers} - waits.keys()):
        status, process = statuses.get(rank), processes.get(rank, "")
        if status is None:
            if process != "ended":
                found[rank] = _SILENT[process]
        elif not (status.get("closed") or status.get("failed") or any(map(_blocked_in, status["groups"]))):
            found[rank] = doing_of(status)
    return found


def _mismatches(statuses: Statuses) -> Iterator[tuple[str, Diagnosis]]:
    """Yield the groups whose ranks make different calls."""
    groups = {group["label"]: group["ranks"] for status in statuses.values() for group in status["groups"]}
    for label, ranks in groups.items():
        if (mismatch := find_mismatch(label, ranks, statuses)) is not None:
            yield label, mismatch


def _waits_of(statuses: Statuses) -> tuple[dict[int, set[int]], dict[int, str]]:
    """Return, for each rank that waits, the ranks that have not arrived at its call, and the call as text."""
    waits: dict[int, set[int]] = {}
    calls: dict[int, str] = {}
    for rank, status in statuses.items():
        failed = status.get("failed") or {}
        for group in status["groups"]:
            label, ours = group["label"], failed.get("label") == group["label"]
            # The rank is blocked in the call, or was when it failed.
            call = (failed.get("waiting") if ours else None) or _blocked_in(group) or (ours and group["last"])
            waiting = call if call and "parts" in call else None
            blocked = BlockedCall(rank, label, group["ranks"], group["started"], waiting)
            others = absent(blocked, statuses) if call else []
            if others:
                waits[rank] = {peer for peer, _ in others}
                calls[rank] = f"{call_text(call)}, at {call['callsite']}"
    return waits, calls


def _first(lines: Sequence[str]) -> list[str]:
    if len(lines) <= _LINES:
        return list(lines)
    return [*lines[:_LINES], f"and {len(lines) - _LINES} more ranks"]


def call_text(call: Mapping[str, Any]) -> str:
    """Return text for a collective or for messages, given in the form of `FlightRecorder.status`."""
    if "parts" in call:
        return f'{described(call)} along "{call["dim"]}"'
    return f'{call["call"]} along "{call["dim"]}"' + (f", call {call['number']}" if call["number"] else "")


def _blocked_in(group: Mapping[str, Any]) -> Any:
    """Return the collective in which a rank is blocked in a group, otherwise the messages that the rank waits for;
    None if there are neither.
    """
    last = group["last"]
    return last if last is not None and last["inside"] else group.get("messages", {}).get("waiting")


def _messages_begun(status: Status, label: str, half: str, peer: int) -> dict[int, int]:
    """Return the number of messages that a rank has begun with `peer`, by tag."""
    group = _group(status, label)
    if group is None:
        return {}
    return {tag: n for way, other, tag, n in group["messages"]["begun"] if way == half and other == peer}


def find_circle(waits: Mapping[int, Collection[int]]) -> list[int]:
    """Return ranks in a cycle: each waits for the next, and the last for the first. Return [] if there is no cycle.

    waits: rank -> the ranks that it waits for. The result is a shortest cycle through the lowest rank that is in any cycle.
    """
    left = dict(waits)
    # A rank that waits only for removed ranks is in no cycle.
    while free := [rank for rank, others in left.items() if left.keys().isdisjoint(others)]:
        for rank in free:
            del left[rank]
    ways = (shortest_way(left, rank, rank) for rank in sorted(left))
    return next((way[:-1] for way in ways if way), [])


def shortest_way(after: Mapping[Node, Iterable[Node]], source: Node, target: Node) -> list[Node]:
    """Return the nodes on a path from one node to another, both included; [] if there is no path of at least one step."""
    came = dict.fromkeys(after.get(source, ()), source)
    front = list(came)
    for node in front:
        for later in after.get(node, ()):
            if later not in came:
                came[later] = node
                front.append(later)
    if target not in came:
        return []
    way = [target]
    while way[-1] != source or len(way) == 1:
        way.append(came[way[-1]])
    return way[::-1]


def _group(status: Status | None, label: str | None) -> Any:
    groups = [] if status is None else status["groups"]
    return next((group for group in groups if group["label"] == label), None)


# -- the error -------------------------------------------------------------------------------------------


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
        last = made or group["last"] or {"number": 0, "call": "a call", "dim": "?", "callsite": "?"}
        self.blocked = BlockedCall(rank, label, ranks, last["number"], waiting)
        self.reason = reason_of(error)
        self._error_line = first_line(error)
        self.at = where
        call = waiting or last
        # In the form of `CommunicationError.call`.
        self._call = None if waiting else {"label": label, **last}
        which = described(waiting) if waiting else f"call {last['number']}"
        who = list(ranks) if len(ranks) <= 16 else fold(ranks)
        self._first = f"{which} on {label}, ranks {who}, at {call['callsite']}"
        self.facts: dict[str, Any] = {
            "label": label,
            "error": [self._error_line],
            "call": call_text(call),
            "callsite": call["callsite"],
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
            else {peer for _, peer, _, _ in self.blocked.messages["parts"]}
        )
        everybody = not peers or None in peers
        return [
            rank for rank in self.blocked.ranks if rank != self.blocked.rank and (everybody or rank in peers)
        ]

    def error(self, found: Diagnosis, reports: str) -> MeshcommError:
        """Return the error to raise on the call's rank. reports: the reports' folder; "" if no report was written."""
        hint = "look at the ranks named above"
        if reports:
            hint = f"meshcomm report {reports} combines the ranks' reports"
        if found.mismatched:
            return CallMismatchError(
                f"{self.at} {self.reason.value}: the ranks of the group make different calls, "
                f"{blamed(found.mismatched, found.tie)}",
                given="\n".join([self._first, *found.lines]),
                expected="the same calls in the same order on every rank of the group",
                hint="look for a call that only some ranks make; mesh.step() at the end of each step names the "
                "step and the call that was left out",
                mismatched_ranks=tuple(found.mismatched),
            )
        if self.blocked.messages is None:
            complete = "every rank of the group has arrived at the call"
            expected = "every rank of the group to make the same call and stay alive until it ends"
        else:
            complete = "both ends have begun every message of the call"
            expected = (
                "a receive for every send, with the same tag, and both ends to stay alive until it ends"
            )
        lines = list(found.lines)
        if not found.missing:
            lines.insert(0, f"{complete}; moving its data failed: {self._error_line}")
            if self.reason is Reason.UNREACHABLE:
                hint = INTERFACES
        reason = Reason.CLOSED if found.silent else self.reason
        if reason is Reason.UNREACHABLE:
            reason = Reason.TIMEOUT
        return self._error(reason, lines, expected, hint, found.missing)

    def error_unasked(self, silent: bool) -> MeshcommError:
        """Return the error if no rank could be asked: only the backend's error is known.

        silent: whether the job's store did not answer, although it has not failed.
        """
        others = [rank for rank in self.blocked.ranks if rank != self.blocked.rank]
        reason = Reason.CLOSED if silent else self.reason
        # With two ranks, it is clear which rank broke the connection.
        clear = silent or (reason is Reason.CLOSED and len(others) == 1)
        why = "the host of the store is down or cannot be reached from this host"
        lines = [
            self._error_line,
            f"{ranks_text(others)} could not be asked: the job's store does not answer; {why}",
        ]
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
    ) -> MeshcommError:
        kind = {Reason.CLOSED: PeerLost, Reason.TIMEOUT: CollectiveTimeout}.get(reason, CommunicationError)
        given = "\n".join([self._first, *lines])
        facts: Any = {"missing": tuple(missing)} if issubclass(kind, CollectiveTimeout) else {}
        what = f"{self.at} {reason.value}"
        return kind(what, given=given, expected=expected, hint=hint, call=self._call, **facts)
