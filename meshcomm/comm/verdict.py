"""From what each rank says of itself to who keeps whom waiting. Plain data in, plain text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def doing(status: Status, label: str | None = None) -> str:
    """What a rank is doing: the call that it is inside of, else where its program is."""
    inside = [g["last"] for g in status["groups"] if g["last"] is not None and g["last"]["inside"]]
    if inside:
        last = inside[-1]
        return f'is in {last["call"]} along "{last["dim"]}", call {last["number"]}, at {last["site"]}'
    own = _group(status, label) if label is not None else None
    after = ""
    if own is not None and own["last"] is not None:
        after = f", after {own['last']['call']}, call {own['last']['number']}"
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


def verdict(statuses: Mapping[int, Status]) -> list[str]:
    """What the reports of a job say together: a circular wait, or who keeps the others waiting."""
    waits: dict[int, dict[int, str]] = {}
    blocked: dict[int, tuple[Any, list[Absent]]] = {}
    for rank, status in statuses.items():
        for group in status["groups"]:
            last = group["last"]
            stuck = status.get("failed") or {}
            if last is None or not (last["inside"] or stuck.get("label") == group["label"]):
                continue
            absent = absent_from(group["label"], group["ranks"], group["started"], statuses)
            if absent:
                blocked[rank] = (last, absent)
                waits[rank] = {each.rank: last["dim"] for each in absent}
    if not blocked:
        return ["no rank was found waiting for another: the reports hold no verdict"]
    circle = _circle(waits)
    if circle:
        parts = []
        for rank, following in zip(circle, [*circle[1:], circle[0]], strict=True):
            last = blocked[rank][0]
            parts.append(
                f'{name_of_rank(rank, statuses[rank])} in {last["call"]} along "{last["dim"]}" at {last["site"]} '
                f"waits for rank {following}"
            )
        return ["circular wait:", *(f"  {part}" for part in parts)]
    # A rank that others wait for, and that waits for nobody, is where it began.
    roots: dict[int, list[int]] = {}
    for rank, others in waits.items():
        for other in others:
            if other not in waits:
                roots.setdefault(other, []).append(rank)
    lines = []
    for root, waiting in sorted(roots.items(), key=lambda item: -len(item[1])):
        found = statuses.get(root)
        does = "does not answer: it has ended, or is stopped" if found is None else doing(found)
        last = blocked[waiting[0]][0]
        lines.append(
            f"{name_of_rank(root, found)} {does}; rank {fold(sorted(waiting))} wait{'s' if len(waiting) == 1 else ''} "
            f'for it in {last["call"]} along "{last["dim"]}", call {last["number"]}, at {last["site"]}'
        )
    return lines


def _circle(waits: Mapping[int, Mapping[int, str]]) -> list[int]:
    """A shortest-first search for ranks that wait for each other in a ring."""
    for start in sorted(waits):
        paths = [[start]]
        seen = {start}
        while paths:
            path = paths.pop(0)
            for other in waits.get(path[-1], {}):
                if other == start:
                    return path
                if other in waits and other not in seen:
                    seen.add(other)
                    paths.append([*path, other])
    return []


def _group(status: Status, label: str | None) -> Any:
    return next((group for group in status["groups"] if group["label"] == label), None)
