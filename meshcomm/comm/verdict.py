"""From what each rank says of itself to who keeps whom waiting. Plain data in, plain text out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from meshcomm.layout.sizes import fold

Status = Mapping[str, Any]


class Absent(NamedTuple):
    """A rank that has not come to a call, and what it does instead; doing None: it does not answer."""

    rank: int
    doing: str | None


def absent_from(
    label: str, ranks: Sequence[int], number: int, statuses: Mapping[int, Status]
) -> list[Absent]:
    """The ranks of a group that have not begun its call `number`."""
    found = []
    for rank in ranks:
        status = statuses.get(rank)
        if status is None:
            found.append(Absent(rank, None))
            continue
        group = _group(status, label)
        if group is None or group["started"] < number:
            found.append(Absent(rank, doing(status, label)))
    return found


def unmatched(
    rank: int, label: str, waiting: Mapping[str, Any], statuses: Mapping[int, Status]
) -> list[Absent]:
    """The ranks that have not done their half of the messages that `rank` waits for."""
    found = []
    for direction, peer, tag, number in waiting["parts"]:
        if peer is None:
            found += _no_sender(rank, label, tag, statuses)
            continue
        status = statuses.get(peer)
        if status is None:
            found.append(Absent(peer, None))
            continue
        half = "recv" if direction == "send" else "send"
        done = _messages_begun(status, label, half, rank)
        count = done.get(tag, 0)
        if count >= number:
            continue
        has = "received" if half == "recv" else "sent"
        short = f"has {has} {count} of {number} with tag {tag}{_elsewhere(done, tag)}"
        found.append(Absent(peer, f"{short}; it {doing(status, label)}"))
    return found


def _no_sender(rank: int, label: str, tag: int, statuses: Mapping[int, Status]) -> list[Absent]:
    """Who has sent nothing to a receive of `rank` from any rank, or has sent only what it has received before."""
    found = []
    on_its_way = False
    for other in _others(rank, label, statuses):
        status = statuses.get(other)
        if status is None:
            found.append(Absent(other, None))
            continue
        sent = _messages_begun(status, label, "send", rank)
        came = _messages_begun(statuses[rank], label, "recv", other).get(tag, 0)
        count = sent.get(tag, 0)
        on_its_way = on_its_way or count > came
        short = f"has sent {count} with tag {tag}, all received" if count else f"has sent none with tag {tag}"
        found.append(Absent(other, f"{short}{_elsewhere(sent, tag)}; it {doing(status, label)}"))
    # One message is enough; a rank that does not answer may still be why it did not come through.
    return [each for each in found if each.doing is None] if on_its_way else found


def _elsewhere(done: Mapping[int, int], tag: int) -> str:
    """How many messages had other tags; "" for none."""
    others = [f"{count} with tag {other}" for other, count in sorted(done.items()) if other != tag]
    return ", and " + ", ".join(others) if others else ""


def described(waiting: Mapping[str, Any]) -> str:
    """`recv from rank 0, message 3 with tag 0`: the messages that a call waits for."""
    parts = []
    for direction, peer, tag, number in waiting["parts"]:
        if peer is None:
            parts.append(f"from any rank with tag {tag}")
        else:
            way = "to" if direction == "send" else "from"
            parts.append(f"{way} rank {peer}, message {number} with tag {tag}")
    return f"{waiting['call']} {' and '.join(parts)}"


def doing(status: Status, label: str | None = None) -> str:
    """What a rank is doing: the call that failed it, or that it is inside of, else where its program is."""
    failed = status.get("failed")
    if failed is not None:
        # What it does since then mostly follows from that.
        closed = "has closed the mesh, and " if status.get("closed") else ""
        return f"{closed}was in {failed['call']}, at {failed['site']}, which failed"
    inside = [g["last"] for g in status["groups"] if g["last"] is not None and g["last"]["inside"]]
    if inside:
        last = inside[-1]
        return f'is in {last["call"]} along "{last["dim"]}", call {last["number"]}, at {last["site"]}'
    waits = [waiting for group in status["groups"] if (waiting := _waiting(group)) is not None]
    if waits:
        return f'is in {described(waits[-1])} along "{waits[-1]["dim"]}", at {waits[-1]["site"]}'
    own = _group(status, label) if label is not None else None
    after = ""
    if own is not None and own["last"] is not None:
        after = f", after {own['last']['call']}, call {own['last']['number']}"
    if status.get("closed"):
        raised = status.get("raised")
        return f"has closed the mesh{after}" + (f", when it raised {raised}" if raised else "")
    if status.get("torch"):
        # No call of the mesh: made past it, by hand, by DTensor, by FSDP.
        call = status["torch"][-1]
        after = f", in {call['call']}, call {call['number']} on torch's group {call['group']}{after}"
    return f"is at {status['main']}{after}"


def name_of_rank(rank: int, status: Status | None) -> str:
    """`rank 6 (pp=1 dp=1 tp=0)`."""
    if status is None:
        return f"rank {rank}"
    return f"rank {rank} ({' '.join(f'{dim}={coord}' for dim, coord in status['coords'].items())})"


def lines_of(absent: Sequence[Absent], statuses: Mapping[int, Status]) -> list[str]:
    """One line for each rank that has not come."""
    return [
        f"{name_of_rank(each.rank, statuses.get(each.rank))} "
        + (
            f"has not come: it {each.doing}"
            if each.doing is not None
            else "does not answer: it has ended, or is stopped"
        )
        for each in absent
    ]


def message_lines(absent: Sequence[Absent], statuses: Mapping[int, Status]) -> list[str]:
    """One line for each rank that has not done its half of a message."""
    return [
        f"{name_of_rank(each.rank, statuses.get(each.rank))} "
        + (each.doing if each.doing is not None else "does not answer: it has ended, or is stopped")
        for each in absent
    ]


def verdict(statuses: Mapping[int, Status]) -> list[str]:
    """What the reports of a job say together: a circular wait, or who keeps the others waiting."""
    waits: dict[int, set[int]] = {}
    calls: dict[int, str] = {}
    for rank, status in statuses.items():
        for group in status["groups"]:
            found = _blocked(rank, status, group, statuses)
            if found is not None:
                calls[rank], others = found
                waits[rank] = others
    if not waits:
        return ["no rank was found waiting for another: the reports hold no verdict"]
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
        for other in others:
            if other not in waits:
                roots.setdefault(other, []).append(rank)
    lines = []
    for root, waiting in sorted(roots.items(), key=lambda item: -len(item[1])):
        status_of_root = statuses.get(root)
        does = (
            "does not answer: it has ended, or is stopped"
            if status_of_root is None
            else doing(status_of_root)
        )
        lines.append(
            f"{name_of_rank(root, status_of_root)} {does}; "
            f"rank {fold(sorted(waiting))} wait{'s' if len(waiting) == 1 else ''} for it in {calls[waiting[0]]}"
        )
    return lines


def _blocked(
    rank: int, status: Status, group: Mapping[str, Any], statuses: Mapping[int, Status]
) -> tuple[str, set[int]] | None:
    """The call on `group` that a rank is blocked in, or was when it failed, and whom it waits for."""
    failed = status.get("failed") or {}
    ours = failed.get("label") == group["label"]
    waiting = (failed.get("waiting") if ours else None) or _waiting(group)
    if waiting is not None:
        absent = unmatched(rank, group["label"], waiting, statuses)
        told = f'{described(waiting)} along "{waiting["dim"]}" at {waiting["site"]}'
    else:
        last = group["last"]
        if last is None or not (last["inside"] or ours):
            return None
        absent = absent_from(group["label"], group["ranks"], group["started"], statuses)
        told = f'{last["call"]} along "{last["dim"]}", call {last["number"]}, at {last["site"]}'
    return (told, {each.rank for each in absent}) if absent else None


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


def _others(rank: int, label: str, statuses: Mapping[int, Status]) -> list[int]:
    own = _group(statuses[rank], label)
    return [other for other in own["ranks"] if other != rank]


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


def _group(status: Status, label: str | None) -> Any:
    return next((group for group in status["groups"] if group["label"] == label), None)
