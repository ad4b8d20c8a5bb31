"""Why does a call not end? From what each rank says of itself to the rank and the line. Plain data in, text out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from meshcomm.layout.sizes import fold

# As `Watchdog.status` has it, by rank where there are several.
Status: TypeAlias = Mapping[str, Any]
Statuses: TypeAlias = Mapping[int, Status]

# Ranks that one error has a line for, of groups with more.
_LINES: Final = 16

_SILENT: Final = "does not answer: it has ended, or is stopped"


class Diagnosis(NamedTuple):
    """Who keeps a call from ending.

    missing: ranks that have not come to the call. silent: some of them do not answer. mismatched: ranks that
    made another call than most with the same sequence number. lines: all of it in words, a line for each rank.
    """

    missing: Sequence[int] = ()
    silent: bool = False
    mismatched: Sequence[int] = ()
    lines: Sequence[str] = ()


class Mismatch(NamedTuple):
    """Different calls of the ranks of a group with one sequence number.

    calls: operation and callsite by rank. mismatched: the ranks that differ from most others; of equally many,
    those without the lowest rank.
    """

    label: str
    number: int
    calls: Mapping[int, tuple[str, str]]
    mismatched: Sequence[int]

    def lines(self, statuses: Statuses) -> list[str]:
        """Those that differ first, each with its line; then the others together."""
        told = [
            f"{name_of_rank(rank, statuses.get(rank))} made {call}, at {site}, as call {self.number}"
            for rank, (call, site) in self.calls.items()
            if rank in self.mismatched
        ]
        usual = [rank for rank in self.calls if rank not in self.mismatched]
        call, site = self.calls[usual[0]]
        return [
            *_first(told),
            f"rank{'s' if len(usual) > 1 else ''} {fold(usual)} made {call}, at {site}, as call {self.number}",
        ]


def diagnose(label: str, ranks: Sequence[int], number: int, statuses: Statuses) -> Diagnosis:
    """Why the collective with this sequence number on a group of `ranks` does not end."""
    mismatch = find_mismatch(label, ranks, statuses)
    if mismatch is not None:
        return Diagnosis(mismatched=mismatch.mismatched, lines=mismatch.lines(statuses))
    absent = _absent(label, ranks, number, statuses)
    lines = [
        f"{name_of_rank(rank, statuses.get(rank))} "
        + (_SILENT if doing is None else f"has not come: it {doing}")
        for rank, doing in absent.items()
    ]
    if not absent:
        for rank in ranks:
            group = _group(statuses.get(rank), label)
            if group is not None and group["started"] > number:
                lines.append(
                    f"{name_of_rank(rank, statuses[rank])} has gone on: it {doing_of(statuses[rank])}"
                )
    return Diagnosis(list(absent), None in absent.values(), lines=_first(lines))


def diagnose_message(rank: int, label: str, waiting: Mapping[str, Any], statuses: Statuses) -> Diagnosis:
    """Why the messages that `rank` waits for do not come, or are not taken."""
    absent = unmatched(rank, label, waiting, statuses)
    lines = [f"{name_of_rank(peer, statuses.get(peer))} {doing or _SILENT}" for peer, doing in absent]
    silent = any(doing is None for _, doing in absent)
    return Diagnosis(list(dict.fromkeys(peer for peer, _ in absent)), silent, lines=_first(lines))


def find_mismatch(label: str, ranks: Sequence[int], statuses: Statuses) -> Mismatch | None:
    """The first sequence number on the group with which ranks made different operations, as far as is remembered."""
    recent: dict[int, dict[int, tuple[str, str]]] = {}
    for rank in ranks:
        group = _group(statuses.get(rank), label)
        if group is not None:
            recent[rank] = {number: (call, site) for number, call, site in group.get("recent", ())}
    for number in sorted(set().union(*recent.values())):
        calls = {rank: made[number] for rank, made in recent.items() if number in made}
        counted = Counter(call for call, _ in calls.values())
        if len(counted) > 1:
            usual = counted.most_common(1)[0][0]
            odd = [rank for rank, (call, _) in calls.items() if call != usual]
            return Mismatch(label, number, calls, odd)
    return None


def unmatched(
    rank: int, label: str, waiting: Mapping[str, Any], statuses: Statuses
) -> list[tuple[int, str | None]]:
    """The ranks that have not done their half of the messages that `rank` waits for, and what they do; None: silent."""
    found: list[tuple[int, str | None]] = []
    for direction, peer, tag, number in waiting["parts"]:
        if peer is None:
            found += _no_sender(rank, label, tag, statuses)
            continue
        status = statuses.get(peer)
        if status is None:
            found.append((peer, None))
            continue
        half, has = ("recv", "received") if direction == "send" else ("send", "sent")
        done = _messages_begun(status, label, half, rank)
        count = done.get(tag, 0)
        if count < number:
            short = f"has {has} {count} of {number} with tag {tag}{_elsewhere(done, tag)}"
            found.append((peer, f"{short}; it {doing_of(status, label)}"))
    return found


def described(waiting: Mapping[str, Any]) -> str:
    """`recv from rank 0, message 3 with tag 0`: the messages that a call waits for."""
    parts = [
        f"from any rank with tag {tag}"
        if peer is None
        else f"{'to' if direction == 'send' else 'from'} rank {peer}, message {number} with tag {tag}"
        for direction, peer, tag, number in waiting["parts"]
    ]
    return f"{waiting['call']} {' and '.join(parts)}"


def doing_of(status: Status, label: str | None = None) -> str:
    """What a rank is doing: the call that failed it, or that it is inside of, else where its program is."""
    failed = status.get("failed")
    if failed is not None:
        # What it does since then mostly follows from that.
        closed = "has closed the mesh, and " if status.get("closed") else ""
        ranks = failed.get("waited_for")
        why = f": it waited for rank{'s' if len(ranks) > 1 else ''} {fold(ranks)}" if ranks else ""
        return f"{closed}was in {failed['call']}, at {failed['site']}, which failed{why}"
    inside = [last for group in status["groups"] if (last := group["last"]) is not None and last["inside"]]
    if inside:
        last = inside[-1]
        return f'is in {last["call"]} along "{last["dim"]}", call {last["number"]}, at {last["site"]}'
    waits = [waiting for group in status["groups"] if (waiting := _waiting(group)) is not None]
    if waits:
        return f'is in {described(waits[-1])} along "{waits[-1]["dim"]}", at {waits[-1]["site"]}'
    own = _group(status, label)
    after = ""
    if own is not None and own["last"] is not None:
        after = f", after {own['last']['call']}, call {own['last']['number']}"
    if status.get("closed"):
        raised = status.get("raised")
        return f"has closed the mesh{after}" + (f", when it raised {raised}" if raised else "")
    if status.get("torch"):
        # On a group that is not of the mesh, or where torch has no hooks of groups.
        call = status["torch"][-1]
        after = f", in {call['call']}, call {call['number']} on torch's group {call['group']}{after}"
    return f"is at {status['main']}{after}"


def name_of_rank(rank: int, status: Status | None) -> str:
    """`rank 6 (pp=1 dp=1 tp=0)`."""
    if status is None:
        return f"rank {rank}"
    return f"rank {rank} ({' '.join(f'{dim}={coord}' for dim, coord in status['coords'].items())})"


def root_cause(statuses: Statuses) -> list[str]:
    """What the reports of a job say together: calls that differ, a circular wait, or who keeps the others waiting."""
    groups = {group["label"]: group["ranks"] for status in statuses.values() for group in status["groups"]}
    for label, ranks in groups.items():
        mismatch = find_mismatch(label, ranks, statuses)
        if mismatch is not None:
            return [
                f"the ranks of {label} made different calls with the sequence number {mismatch.number}:",
                *(f"  {line}" for line in mismatch.lines(statuses)),
                "  mesh.step() at the end of each step finds the step, and the call that was left out",
            ]
    waits: dict[int, set[int]] = {}
    calls: dict[int, str] = {}
    for rank, status in statuses.items():
        for group in status["groups"]:
            found = _blocked(rank, status, group, statuses)
            if found is not None:
                calls[rank], waits[rank] = found
    if not waits:
        return ["no rank was found waiting for another: the reports hold no diagnosis"]
    circle = _circle(waits)
    if circle:
        following = [*circle[1:], circle[0]]
        return [
            "circular wait:",
            *(
                f"  {name_of_rank(rank, statuses[rank])} in {calls[rank]} waits for rank {other}"
                for rank, other in zip(circle, following, strict=True)
            ),
        ]
    # A rank that others wait for, and that waits for nobody, is where it began.
    roots: dict[int, list[int]] = {}
    for rank, others in waits.items():
        for other in others - waits.keys():
            roots.setdefault(other, []).append(rank)
    lines = []
    for root, waiting in sorted(roots.items(), key=lambda item: -len(item[1])):
        status_of_root = statuses.get(root)
        does = _SILENT if status_of_root is None else doing_of(status_of_root)
        lines.append(
            f"{name_of_rank(root, status_of_root)} {does}; "
            f"rank {fold(sorted(waiting))} wait{'s' if len(waiting) == 1 else ''} for it in {calls[waiting[0]]}"
        )
    return lines


def _first(lines: Sequence[str]) -> list[str]:
    if len(lines) <= _LINES:
        return list(lines)
    return [*lines[:_LINES], f"and {len(lines) - _LINES} more ranks"]


def _absent(label: str, ranks: Sequence[int], number: int, statuses: Statuses) -> dict[int, str | None]:
    """The ranks that have not begun the call, and what they do; None: silent."""
    found: dict[int, str | None] = {}
    for rank in ranks:
        status = statuses.get(rank)
        if status is None:
            found[rank] = None
            continue
        group = _group(status, label)
        if group is None or group["started"] < number:
            found[rank] = doing_of(status, label)
    return found


def _no_sender(rank: int, label: str, tag: int, statuses: Statuses) -> list[tuple[int, str | None]]:
    """Who has sent nothing to a receive of `rank` from any rank, or has sent only what it has received before."""
    found: list[tuple[int, str | None]] = []
    on_its_way = False
    own = _group(statuses[rank], label)
    for other in (other for other in own["ranks"] if other != rank):
        status = statuses.get(other)
        if status is None:
            found.append((other, None))
            continue
        sent = _messages_begun(status, label, "send", rank)
        came = _messages_begun(statuses[rank], label, "recv", other).get(tag, 0)
        count = sent.get(tag, 0)
        on_its_way = on_its_way or count > came
        short = f"has sent {count} with tag {tag}, all received" if count else f"has sent none with tag {tag}"
        found.append((other, f"{short}{_elsewhere(sent, tag)}; it {doing_of(status, label)}"))
    # One message is enough; a rank that does not answer may still be why it did not come through.
    return [each for each in found if each[1] is None] if on_its_way else found


def _elsewhere(done: Mapping[int, int], tag: int) -> str:
    """How many messages had other tags; "" for none."""
    others = [f"{count} with tag {other}" for other, count in sorted(done.items()) if other != tag]
    return ", and " + ", ".join(others) if others else ""


def _blocked(
    rank: int, status: Status, group: Mapping[str, Any], statuses: Statuses
) -> tuple[str, set[int]] | None:
    """The call on `group` that a rank is blocked in, or was when it failed, and whom it waits for."""
    failed = status.get("failed") or {}
    ours = failed.get("label") == group["label"]
    waiting = (failed.get("waiting") if ours else None) or _waiting(group)
    if waiting is not None:
        others = {peer for peer, _ in unmatched(rank, group["label"], waiting, statuses)}
        told = f'{described(waiting)} along "{waiting["dim"]}" at {waiting["site"]}'
    else:
        last = group["last"]
        if last is None or not (last["inside"] or ours):
            return None
        others = set(_absent(group["label"], group["ranks"], group["started"], statuses))
        told = f'{last["call"]} along "{last["dim"]}", call {last["number"]}, at {last["site"]}'
    return (told, others) if others else None


def _waiting(group: Mapping[str, Any]) -> Any:
    """The message that a rank waits for on a group; a collective that it is inside of says more."""
    last = group["last"]
    return None if last is not None and last["inside"] else group.get("messages", {}).get("waiting")


def _messages_begun(status: Status, label: str, half: str, peer: int) -> dict[int, int]:
    """Messages that a rank has begun with `peer`, by tag."""
    group = _group(status, label)
    if group is None:
        return {}
    return {tag: n for way, other, tag, n in group["messages"]["begun"] if way == half and other == peer}


def _circle(waits: Mapping[int, Iterable[int]]) -> list[int]:
    """A shortest-first search for ranks that wait for each other in a ring."""
    for start in sorted(waits):
        paths = [[start]]
        seen = {start}
        while paths:
            path = paths.pop(0)
            for other in waits.get(path[-1], ()):
                if other == start:
                    return path
                if other in waits and other not in seen:
                    seen.add(other)
                    paths.append([*path, other])
    return []


def _group(status: Status | None, label: str | None) -> Any:
    groups = () if status is None else status["groups"]
    return next((group for group in groups if group["label"] == label), None)
