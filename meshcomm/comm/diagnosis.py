"""Finds why a call does not end: which ranks are missing, at which lines they are, and which error to raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, final

from meshcomm.comm.mismatch import blamed, majority
from meshcomm.comm.waits import ChainEnd, chain_ends, ends_of, shortest_way
from meshcomm.errors import CallMismatchError, CollectiveTimeout, CommunicationError, MeshcommError, PeerLost
from meshcomm.layout.sizes import fold, rank_text, ranks_text

if TYPE_CHECKING:
    from meshcomm.comm.flight_recorder import FlightRecorder

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
    "no report": "left no report: no rank asked it, or it could not write one",
}

# The hint for a rank that cannot be reached at the address that it offered.
INTERFACES: Final = "[network] interfaces; meshcomm doctor, under the launcher, shows each rank's address"


# A barrier of torch that is no collective: rank 0 waits for a message of each rank.
BARRIER: Final = "monitored_barrier"


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
    (Reason.TIMEOUT, ("timed out", "timeout", "failed to pass monitoredbarrier")),
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
    text = text_of(error).lower()
    found = next((why for why, texts in _TEXTS if any(said in text for said in texts)), Reason.OTHER)
    if found is Reason.OTHER and error.__cause__ is not None:
        return reason_of(error.__cause__)
    return found


def text_of(error: BaseException) -> str:
    """Return an error's text, or what Python prints in its place if the error's own `__str__` raises an exception."""
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text."""
    return next(iter(text_of(error).strip().splitlines()), type(error).__name__)


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
    chain: the ranks of `missing`, those that they wait for, and so on; see `CommunicationError.chain`.
    """

    missing: Sequence[int] = ()
    silent: bool = False
    mismatched: Sequence[int] = ()
    number: int = 0
    lines: Sequence[str] = ()
    tie: bool = False
    chain: Sequence[Sequence[Any]] = ()


class Place(NamedTuple):
    """Where a rank is, as far as others know. doing: its call or its line. waits_for: ranks that keep that call from ending."""

    name: str
    doing: str
    waits_for: tuple[int, ...] = ()


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
    places = places_of(statuses, processes, blocked.label)
    missing = list(dict.fromkeys(rank for rank, _ in found))
    waits = {**{rank: place.waits_for for rank, place in places.items()}, blocked.rank: missing}
    ends = ends_of(blocked.rank, waits)
    at_end = [rank for end in ends for rank in end.ranks]
    lines = [
        f"{name_of_rank(rank, statuses.get(rank))} {doing or _SILENT[processes.get(rank, '')]}"
        # The ranks at the end of the chain first.
        for rank, doing in sorted(found, key=lambda each: each[0] not in at_end)
    ]
    if not found and blocked.messages is None:
        lines = [
            f"{name_of_rank(rank, status)} has continued: it {doing_of(status)}"
            for rank, status in ((rank, statuses[rank]) for rank in blocked.ranks if rank in statuses)
            if (group := _group(status, blocked.label)) is not None and group["started"] > blocked.number
        ]
    lines = [*_chain_lines(blocked.rank, missing, waits, ends, places), *lines]
    silent = any(doing is None and processes.get(rank) != "runs" for rank, doing in found)
    on_the_way = [rank for rank in places if rank in at_end or any(rank in end.waiters for end in ends)]
    chain = [[rank, *places[rank]._replace(waits_for=tuple(waits[rank]))] for rank in on_the_way]
    return Diagnosis(missing, silent, lines=_first(lines), chain=chain)


def unasked(blocked: BlockedCall, statuses: Statuses, silent: Mapping[int, str]) -> list[int]:
    """Return the ranks at the ends of the chains of waiting that have not been asked yet. silent: ranks that do not answer."""
    waits = {rank: place.waits_for for rank, place in places_of(statuses, silent).items()}
    waits[blocked.rank] = tuple(rank for rank, _ in absent(blocked, statuses))
    ends = [rank for end in ends_of(blocked.rank, waits) for rank in end.ranks]
    return [rank for rank in ends if rank not in statuses and rank not in silent]


def places_of(
    statuses: Statuses, silent: Mapping[int, str] = MappingProxyType({}), label: str | None = None
) -> dict[int, Place]:
    """Return where each rank is.

    silent: for ranks that are not in `statuses`, the state of their process; see `diagnose`. label: the group whose last call
    is named for a rank that is in no call.
    """
    found = {
        rank: Place(name_of_rank(rank, None), _SILENT[state])
        for rank, state in silent.items()
        if rank not in statuses
    }
    for rank, status in statuses.items():
        others, doing = _waits_for(rank, status, statuses, silent, label)
        found[rank] = Place(name_of_rank(rank, status), doing, others)
    return found


def _chain_lines(
    start: int,
    missing: Sequence[int],
    waits: Mapping[int, Sequence[int]],
    ends: Sequence[ChainEnd],
    places: Mapping[int, Place],
) -> list[str]:
    """Return lines about ranks that are not missing themselves, but that missing ranks wait for, the end of the chain first."""
    lines = []
    for end in ends:
        if end.is_circle:
            ranks = end.ranks
            lines.append(f"{ranks_text(sorted(ranks))} wait for each other")
        else:
            ranks = tuple(reversed(shortest_way(waits, start, end.ranks[0])[2:]))
        lines += [
            f"{places[rank].name} {places[rank].doing}"
            for rank in ranks
            if rank in places and rank not in missing
        ]
    return list(dict.fromkeys(lines))


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
    for rank in _behind(blocked, statuses):
        status = statuses.get(rank)
        if status is None:
            found.append((rank, None))
        else:
            doing = _waits_for(rank, status, statuses, {}, blocked.label)[1]
            found.append((rank, f"has not arrived: it {doing}"))
    return found


def _behind(blocked: BlockedCall, statuses: Statuses) -> list[int]:
    """Return the ranks that have not arrived at a collective or that do not answer."""
    groups = {rank: _group(statuses.get(rank), blocked.label) for rank in blocked.ranks}
    return [rank for rank, group in groups.items() if group is None or group["started"] < blocked.number]


def _waits_for(
    rank: int, status: Status, statuses: Statuses, silent: Mapping[int, str], label: str | None = None
) -> tuple[tuple[int, ...], str]:
    """Return the ranks that a rank waits for in the call that blocks it or that failed, and text as from `doing_of`.

    Of ranks that do not answer, only those whose process has ended or is stopped, unless there are no others.
    """
    failed = status.get("failed") or {}
    if (waited_for := failed.get("waited_for")) and not {*waited_for} <= {rank}:
        return tuple(waited_for), doing_of(status, label)
    calls = []
    for group in reversed(status["groups"]):
        ours = failed.get("label") == group["label"]
        # The rank is blocked in the call, or was when it failed.
        call = (failed.get("waiting") if ours else None) or _blocked_in(group) or (ours and group["last"])
        if call:
            calls.append((not ours, "parts" in call, group, call))
    # A collective explains more than a message.
    for _, is_message, group, call in sorted(calls, key=lambda each: each[:2]):
        waiting = call if is_message else None
        number = group["started"] if waiting else call["number"]
        blocked = BlockedCall(rank, group["label"], group["ranks"], number, waiting)
        if waiting is not None:
            others = list(dict.fromkeys(peer for peer, _ in absent(blocked, statuses)))
        else:
            others = _behind(blocked, statuses)
        behind = [other for other in others if other in statuses]
        behind += [other for other in others if silent.get(other) in ("ended", "stopped")]
        if not behind and not others:
            continue
        counts = {
            theirs["started"] for other in behind if (theirs := _group(statuses.get(other), group["label"]))
        }
        text = doing_of(status, label) if failed else _is_in(call)
        if behind and waiting is None and not failed:
            text += f", which {ranks_text(behind)} {'have' if behind[1:] else 'has'} not reached"
            text += (
                f" after {fold(sorted(counts))} call{'' if counts == {1} else 's'}" if counts - {0} else ""
            )
        return tuple(behind or others), text
    return (), doing_of(status, label)


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
        # What it waits for now has not moved.
        for way, other, begun, _ in (_waiting_in(status, label) or {}).get("parts", ()):
            done[begun] = done.get(begun, 0) - (way == half and other == rank)
        others = ", ".join(f"{count} with tag {other}" for other, count in sorted(done.items()) if count > 0)
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
        return _is_in(call)
    if status.get("barrier"):
        return f"is in {BARRIER}, at {status['main']}"
    own = _group(status, label)
    after = ""
    thread = f"; {status['thread']}" if status.get("thread") else ""
    if own is not None and own["last"] is not None:
        after = f", after {own['last']['call']}, call {own['last']['number']}"
    if status.get("closed"):
        raised = status.get("raised")
        return f"{_left(status)}{after}" + (f", when it raised {raised}" if raised else thread)
    raised = f"; {status['raised']}, and goes on" if status.get("raised") else ""
    return f"is at {status['main']}{after}{thread}{raised}"


def _is_in(call: Mapping[str, Any]) -> str:
    return f"is in {call_text(call)}, at {call['callsite']}"


def _left(status: Status) -> str:
    return "has closed the mesh" if status["coords"] else "has ended, or left torch's default group"


def name_of_rank(rank: int, status: Status | None) -> str:
    """Return the rank as text, with its coords if the rank answered."""
    return rank_text(rank, None if status is None else status["coords"])


def activity(rank: int, status: Status | None, process: str = "") -> str:
    """Return one line of text: the rank, and its call or line. process: the state of its process, see `diagnose`."""
    return f"{name_of_rank(rank, status)} {_SILENT[process] if status is None else doing_of(status)}"


def root_cause(statuses: Statuses, silent: Mapping[int, str] = MappingProxyType({})) -> list[str]:
    """Return the root cause in a job's reports: differing calls, a circular wait, or the ranks that others wait for.

    silent: for ranks that do not answer, the state of their process. A rank that is in neither mapping was not asked.
    """
    for label, mismatch in _mismatches(statuses):
        return [
            f"the ranks of {label} made different calls with the sequence number {mismatch.number}:",
            *(f"  {line}" for line in mismatch.lines),
            "  mesh.step() at the end of each step finds the step, and the call that was left out",
        ]
    places = places_of(statuses, silent)
    waits = {rank: place.waits_for for rank, place in places.items() if place.waits_for}
    lines = []
    for end in chain_ends(waits):
        if end.is_circle:
            lines.append("circular wait:")
            for rank, other in zip(end.ranks, [*end.ranks[1:], end.ranks[0]], strict=True):
                lines.append(f"  {places[rank].name} {places[rank].doing} and waits for rank {other}")
            continue
        root, direct = end.ranks[0], [rank for rank in end.waiters if end.ranks[0] in waits[rank]]
        waits_for = f"wait{'' if direct[1:] else 's'} for it in {_call_of(statuses[direct[0]])}"
        doing = activity(root, statuses.get(root), silent.get(root, "no report"))
        through = sorted({*end.waiters} - {*direct})
        others = f", and {ranks_text(through)} for {'them' if direct[1:] else 'that rank'}" if through else ""
        lines.append(f"{doing}; {ranks_text(direct)} {waits_for}{others}")
    return lines or ["no rank was found waiting for another: the reports do not show a cause"]


def whereabouts(statuses: Statuses, silent: Mapping[int, str]) -> list[str]:
    """Return lines that say where the ranks are, the cause first if ranks wait for others. silent: see `root_cause`."""
    places = places_of(statuses, silent)
    alike: dict[str, list[int]] = {}
    for rank, place in places.items():
        alike.setdefault(place.doing, []).append(rank)
    waiting = any(place.waits_for for place in places.values())
    return [
        *(root_cause(statuses, silent) if waiting else ()),
        *_first(
            [
                f"{ranks_text(ranks)}: each {doing}" if ranks[1:] else f"{places[ranks[0]].name} {doing}"
                for doing, ranks in alike.items()
            ]
        ),
    ]


def _call_of(status: Status) -> str:
    failed = status.get("failed")
    return f"{failed['call']}, at {failed['callsite']}" if failed else doing_of(status).removeprefix("is in ")


def find_hung(
    statuses: Statuses, processes: Mapping[int, str], ask: Callable[[list[int]], Statuses]
) -> dict[int, str]:
    """Return the ranks at which chains of waiting end although they are in no call, or do not answer. With what each of them
    does. {} if ranks make different calls, or wait in a circle.

    processes: see `diagnose`. ask: returns the records that ranks have now. Calls time out together, so a rank may have been
    on its way from its own failed call to the error: a rank hangs if it is found so twice.
    """
    hung = _hung(statuses, processes)
    if running := [rank for rank in hung if rank in statuses]:
        later = _hung({**statuses, **ask(running)}, processes)
        hung = {rank: what for rank, what in later.items() if rank in hung}
    return hung


def _hung(statuses: Statuses, processes: Mapping[int, str]) -> dict[int, str]:
    places = places_of(statuses, processes)
    ends = chain_ends({rank: place.waits_for for rank, place in places.items() if place.waits_for})
    if any(end.is_circle for end in ends) or any(True for _ in _mismatches(statuses)):
        return {}
    found = {}
    for rank in sorted(rank for end in ends for rank in end.ranks):
        status, process = statuses.get(rank), processes.get(rank, "")
        if status is None:
            if process != "ended":
                found[rank] = _SILENT[process]
        # A rank whose own call has just failed waits for nobody any longer, and does not hang either.
        elif not (
            any(map(status.get, ("closed", "failed", "call_failed")))
            or any(map(_blocked_in, status["groups"]))
        ):
            found[rank] = doing_of(status)
    return found


def _mismatches(statuses: Statuses) -> Iterator[tuple[str, Diagnosis]]:
    """Yield the groups whose ranks make different calls."""
    groups = {group["label"]: group["ranks"] for status in statuses.values() for group in status["groups"]}
    for label, ranks in groups.items():
        if (mismatch := find_mismatch(label, ranks, statuses)) is not None:
            yield label, mismatch


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


def _waiting_in(status: Status, label: str) -> Any:
    """Return the messages that a rank waits for in a group; None if there are none."""
    group = _group(status, label)
    return None if group is None else group["messages"].get("waiting")


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
        return self._error(reason, lines, expected, hint, found.missing, found.chain)

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
        chain: Sequence[Sequence[Any]] = (),
    ) -> MeshcommError:
        kind = {Reason.CLOSED: PeerLost, Reason.TIMEOUT: CollectiveTimeout}.get(reason, CommunicationError)
        given = "\n".join([self._first, *lines])
        facts: Any = {"missing": tuple(missing)} if issubclass(kind, CollectiveTimeout) else {}
        what = f"{self.at} {reason.value}"
        return kind(what, given=given, expected=expected, hint=hint, call=self._call, chain=chain, **facts)
