"""The verdict on the calls of a group's ranks: which calls differ, which ranks are missing, and who waits for whom.

Every function takes plain data by rank: the calls themselves, or the ranks' statuses as in `RankRecord.data`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

from meshcomm.collectives import ROWS
from meshcomm.errors import CallMismatchError
from meshcomm.layout.sizes import fold, ranks_text
from meshcomm.watching.facts import OWN, PRIME, balance
from meshcomm.watching.waits import ChainEnd, chain_ends, ends_of, shortest_way
from meshcomm.watching.words import (
    SILENT,
    Status,
    activity,
    blocked_in,
    doing_of,
    first_lines,
    group_of,
    is_in,
    made_at,
    name_of_rank,
)

# The statuses of several ranks, and the state of the process of ranks that do not answer: "ended", "stopped" or "runs".
Statuses: TypeAlias = Mapping[int, Status]
Silent: TypeAlias = Mapping[int, str]
# The messages that a rank waits for, as in `PendingMessage.data`; None for a collective.
Waiting: TypeAlias = Mapping[str, Any] | None

# What an error expects if no majority tells which ranks are wrong.
SAME: Final = "the same calls on every rank of the group"
_NONE_SILENT: Final[Silent] = MappingProxyType({})
# Collectives to which all ranks contribute tensors of the same size.
_EQUALLY_LARGE: Final = frozenset(name for name, row in ROWS.items() if row.in_place)
# Facts that an error shows only if nothing else differs.
_UNSEEN: Final = ("sent as",)


# -- calls that differ -------------------------------------------------------------------------------------


def majority(signs: Mapping[int, Any]) -> tuple[list[int], list[int]]:
    """Return the ranks with the most common sign, and all other ranks. In a tie, no rank is in the majority, because any of
    two ranks that differ may be wrong.

    >>> majority({0: "a", 1: "b", 2: "b"}), majority({3: "a", 4: "b"}), majority({3: "a", 4: "a"})
    (([1, 2], [0]), ([], [3, 4]), ([3, 4], []))
    """
    (usual, times), *others = Counter(signs.values()).most_common(2)
    if others and others[0][1] == times:
        return [], list(signs)
    ranks = [rank for rank, sign in signs.items() if sign == usual]
    return ranks, [rank for rank in signs if signs[rank] != usual]


def alike(ranks: Sequence[int], signs: Mapping[int, Any]) -> list[list[int]]:
    """Return the ranks as lists of equal sign.

    >>> alike([0, 1, 2], {0: "a", 1: "b", 2: "a"})
    [[0, 2], [1]]
    """
    lists: dict[Any, list[int]] = {}
    for rank in ranks:
        lists.setdefault(signs[rank], []).append(rank)
    return list(lists.values())


def blamed(mismatched: Sequence[int], tie: bool, of: int | None = None) -> str:
    """Return text that names the ranks of the second list of `majority`. tie: whether the first list is empty. of: the
    number of all ranks.

    >>> blamed([0], tie=False), blamed([0, 1], tie=False, of=5), blamed([3, 4], tie=True)
    ('rank 0 is mismatched', 'ranks 0 1 of 5 are mismatched', 'ranks 3 4 do not agree')
    """
    if tie:
        return f"{ranks_text(mismatched)} do not agree"
    who = f"{ranks_text(mismatched)} of {of}" if of else ranks_text(mismatched)
    return f"{who} {'is' if len(mismatched) == 1 else 'are'} mismatched"


class ToldCall(NamedTuple):
    """A call as other ranks are told of it. rank: -1 if it is not told."""

    call: str
    facts: dict[str, Any]
    callsite: str
    rank: int = -1


def is_same(one: ToldCall, other: ToldCall) -> bool:
    """Return whether two ranks' calls can belong to one call of their group."""
    return one.call == other.call and facts_match([one.facts, other.facts])


def are_same(calls: Sequence[ToldCall]) -> bool:
    """Return whether the calls of all ranks of a group, in coord order, are one call."""
    facts = [told.facts for told in calls]
    return len({told.call for told in calls}) == 1 and facts_match(facts) and balanced(facts)


def facts_match(calls: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether each fact is equal in all calls of which it is known, except facts that may differ between ranks."""
    # Equal splits on one rank may fit unequal ones on another.
    not_compared = {*OWN, "elements"} if any("balance" in facts for facts in calls) else {*OWN}
    first: dict[str, Any] = {}
    return all(
        first.setdefault(key, value) == value
        for facts in calls
        for key, value in facts.items()
        if key not in not_compared
    )


def balanced(calls: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether each rank of an all_to_all expects what the others send it. calls: the facts, in coord order.

    Returns True if no rank has its own splits, or the splits of a rank are unknown.
    """
    if not any("balance" in facts for facts in calls):
        return True
    size, total = len(calls), 0
    for coord, facts in enumerate(calls):
        share = facts.get("balance")
        if "balance" not in facts:
            if not isinstance(facts.get("elements"), int):
                return True
            even = [facts["elements"] // size] * size
            share = balance(coord, size, even, even)
        if share is None:
            return False
        total += share
    return total % PRIME == 0


def mismatch(
    name: str, number: int, ranks: Sequence[int], calls: Sequence[ToldCall], sent: str = "nothing was sent"
) -> CallMismatchError:
    """Return the error for a group in which calls differ between ranks.

    ranks: global ranks, in the order of `calls`. Ranks that differ from the majority are mismatched. sent: what became of
    the calls.
    """
    by_rank = dict(zip(ranks, calls, strict=True))
    signs: dict[int, Any] = {}
    for rank, told in by_rank.items():
        same = (signs[other] for other in signs if is_same(by_rank[other], told))
        signs[rank] = next(same, rank)
    usual, mismatched = majority(signs)
    expected = f"as {ranks_text(usual)}: " if usual else SAME
    if not mismatched:
        # Every two calls can belong together, but not all: an all_to_all whose sizes do not fit.
        signs = {rank: rank for rank in ranks}
        usual, mismatched = majority({rank: repr(told.facts) for rank, told in by_rank.items()})
        expected = f"as {ranks_text(usual)}: "
        if len(mismatched) != 1 or not _is_even(by_rank[usual[0]].facts):
            usual, mismatched = [], list(ranks)
            expected = "each rank to expect from every other what that rank sends to it"
    seen = [{key: fact for key, fact in told.facts.items() if key not in _UNSEEN} for told in calls]
    shown = _UNSEEN if facts_match(seen) else ()
    texts = {rank: _told_text(told, shown) for rank, told in by_rank.items()}
    lines = [f"{ranks_text(same)}: {texts[same[0]]}" for same in alike(mismatched, signs)]
    expected += texts[usual[0]] if usual else ""
    return CallMismatchError(
        f'ranks differ in call {number} along "{name}": {blamed(mismatched, not usual)}; {sent}',
        given="\n".join(lines),
        expected=expected,
        hint="make the same calls in the same order on every rank of the group; "
        "look for a branch that depends on the rank",
        mismatched_ranks=tuple(mismatched),
    )


def _is_even(facts: Mapping[str, Any]) -> bool:
    """Return whether ranks that all make this all_to_all would fit each other."""
    return len({*facts.get("sends", ()), *facts.get("expects", ())}) <= 1


def _told_text(told: ToldCall, shown: Collection[str]) -> str:
    hidden = {"balance", *_UNSEEN} - {*shown} | ({"elements"} if "shape" in told.facts else set())
    facts = [
        f"{key} {_plain(fact)}" for key, fact in told.facts.items() if fact is not None and key not in hidden
    ]
    return f"{told.call}({', '.join(facts)}) at {told.callsite}"


def _plain(value: Any) -> str:
    return f"({', '.join(map(_plain, value))})" if isinstance(value, list) else str(value)


def as_data(error: CallMismatchError) -> dict[str, Any]:
    """Return an error as plain data for `error_of`."""
    facts = {key: getattr(error, key) for key in ("what", "given", "expected", "hint", "step")}
    return {**facts, "mismatched": list(error.mismatched_ranks)}


def error_of(difference: Mapping[str, Any]) -> CallMismatchError:
    """Return the error of `as_data`, or of `find_desync`."""
    facts = {key: difference[key] for key in ("given", "expected", "hint", "step")}
    return CallMismatchError(difference["what"], **facts, mismatched_ranks=tuple(difference["mismatched"]))


# -- calls that do not end ---------------------------------------------------------------------------------


class BlockedCall(NamedTuple):
    """A call that does not end on one rank: collective `number` of a group, or the `messages` that `rank` waits for."""

    rank: int
    label: str
    ranks: Sequence[int]
    number: int
    messages: Waiting = None


class Place(NamedTuple):
    """Where a rank is, as far as others know. doing: its call or its line. waits_for: ranks that keep that call from ending."""

    rank: int
    name: str
    doing: str
    waits_for: Sequence[int] = ()


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
    chain: Sequence[Place] = ()


def diagnose(blocked: BlockedCall, statuses: Statuses, silent: Silent = _NONE_SILENT) -> Diagnosis:
    """Return why the call does not end."""
    differing = None if blocked.messages else find_mismatch(blocked.label, blocked.ranks, statuses)
    if differing is not None:
        return differing
    late = absent(blocked, statuses)
    places = places_of(statuses, silent, blocked.label)
    missing = list(dict.fromkeys(rank for rank, _ in late))
    waits = {**{rank: place.waits_for for rank, place in places.items()}, blocked.rank: missing}
    ends = ends_of(blocked.rank, waits)
    at_end = [rank for end in ends for rank in end.ranks]
    lines = [
        f"{name_of_rank(rank, statuses.get(rank))} {doing or SILENT[silent.get(rank, '')]}"
        # The ranks at the end of the chain first.
        for rank, doing in sorted(late, key=lambda pair: pair[0] not in at_end)
    ]
    if not late and blocked.messages is None:
        lines = [
            f"{name_of_rank(rank, status)} has continued: it {doing_of(status)}"
            for rank, status in ((rank, statuses[rank]) for rank in blocked.ranks if rank in statuses)
            if (group := group_of(status, blocked.label)) is not None and group["started"] > blocked.number
        ]
    lines = [*_chain_lines(blocked.rank, missing, waits, ends, places), *lines]
    unheard = any(doing is None and silent.get(rank) != "runs" for rank, doing in late)
    on_the_way = {*at_end, *(rank for end in ends for rank in end.waiters)}
    chain = [
        place._replace(waits_for=tuple(waits[rank])) for rank, place in places.items() if rank in on_the_way
    ]
    return Diagnosis(missing, unheard, lines=first_lines(lines), chain=chain)


def unasked(blocked: BlockedCall, statuses: Statuses, silent: Silent) -> list[int]:
    """Return the ranks at the ends of the chains of waiting that have not been asked yet."""
    waits = {rank: place.waits_for for rank, place in places_of(statuses, silent).items()}
    waits[blocked.rank] = tuple(rank for rank, _ in absent(blocked, statuses))
    ends = [rank for end in ends_of(blocked.rank, waits) for rank in end.ranks]
    return [rank for rank in ends if rank not in statuses and rank not in silent]


def places_of(
    statuses: Statuses, silent: Silent = _NONE_SILENT, label: str | None = None
) -> dict[int, Place]:
    """Return where each rank is. label: see `doing_of`."""
    places = {
        rank: Place(rank, name_of_rank(rank, None), SILENT[state])
        for rank, state in silent.items()
        if rank not in statuses
    }
    for rank, status in statuses.items():
        others, doing = _waits_for(rank, status, statuses, silent, label)
        places[rank] = Place(rank, name_of_rank(rank, status), doing, others)
    return places


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
        rank: {row["number"]: row for row in group.get("recent", ())}
        for rank in ranks
        if (group := group_of(statuses.get(rank), label)) is not None
    }
    for number in sorted(set().union(*recent.values())):
        rows = {rank: made[number] for rank, made in recent.items() if number in made}
        what = {rank: row["call"] for rank, row in rows.items()}
        if len({*what.values()}) == 1:
            sizes = {rank: row["bytes"] for rank, row in rows.items() if row["call"] in _EQUALLY_LARGE}
            what |= {rank: f"{what[rank]} of {size} bytes" for rank, size in sizes.items()}
        usual, mismatched = majority(what)
        if mismatched:
            made = {
                rank: f"made {what[rank]}, {made_at(row)}, as call {number}" for rank, row in rows.items()
            }
            lines = first_lines([f"{name_of_rank(rank, statuses[rank])} {made[rank]}" for rank in mismatched])
            lines += [f"{ranks_text(usual)} {made[usual[0]]}"] if usual else []
            return Diagnosis((), False, mismatched, number, lines, not usual)
    return None


def absent(blocked: BlockedCall, statuses: Statuses) -> list[tuple[int, str | None]]:
    """Return the ranks that have not arrived at a call, and the activity of each; None for a rank that does not answer."""
    if blocked.messages is not None:
        return [pair for part in blocked.messages["parts"] for pair in _unmatched(blocked, part, statuses)]
    late: list[tuple[int, str | None]] = []
    for rank in _behind(blocked, statuses):
        doing = None
        if (status := statuses.get(rank)) is not None:
            doing = f"has not arrived: it {_waits_for(rank, status, statuses, {}, blocked.label)[1]}"
        late.append((rank, doing))
    return late


def _behind(blocked: BlockedCall, statuses: Statuses) -> list[int]:
    """Return the ranks that have not arrived at a collective or that do not answer."""
    groups = {rank: group_of(statuses.get(rank), blocked.label) for rank in blocked.ranks}
    return [rank for rank, group in groups.items() if group is None or group["started"] < blocked.number]


def _waits_for(
    rank: int, status: Status, statuses: Statuses, silent: Silent, label: str | None = None
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
        call = (failed.get("waiting") if ours else None) or blocked_in(group) or (ours and group["last"])
        if call:
            calls.append((not ours, "parts" in call, group, call))
    # A collective explains more than a message.
    for _, is_message, group, call in sorted(calls, key=lambda row: row[:2]):
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
            theirs["started"] for other in behind if (theirs := group_of(statuses.get(other), group["label"]))
        }
        text = doing_of(status, label) if failed else is_in(call)
        if behind and waiting is None and not failed:
            text += f", which {ranks_text(behind)} {'have' if behind[1:] else 'has'} not reached"
            text += (
                f" after {fold(sorted(counts))} call{'' if counts == {1} else 's'}" if counts - {0} else ""
            )
        return tuple(behind or others), text
    return (), doing_of(status, label)


def _unmatched(
    blocked: BlockedCall, part: Mapping[str, Any], statuses: Statuses
) -> list[tuple[int, str | None]]:
    """Return the ranks that have not begun their half of a message.

    For a receive from any rank, these are all other ranks. If one of them has sent more than the waiting rank has
    received, only ranks that do not answer are returned.
    """
    rank, label, source, tag = blocked.rank, blocked.label, part["peer"], part["tag"]
    half, has = ("recv", "received") if part["direction"] == "send" else ("send", "sent")
    late: list[tuple[int, str | None]] = []
    on_its_way = False
    for peer in [other for other in blocked.ranks if other != rank] if source is None else [source]:
        status = statuses.get(peer)
        if status is None:
            late.append((peer, None))
            continue
        done = _messages_begun(status, label, half, rank)
        count = done.pop(tag, 0)
        if source is None:
            on_its_way |= count > _messages_begun(statuses[rank], label, "recv", peer).get(tag, 0)
            counted = f"{count} with tag {tag}, all received" if count else f"none with tag {tag}"
        elif count < part["number"]:
            counted = f"{count} of {part['number']} with tag {tag}"
        else:
            continue
        # What it waits for now has not moved.
        waiting = (group_of(status, label) or {"messages": {}})["messages"].get("waiting") or {"parts": ()}
        for theirs in waiting["parts"]:
            moves = theirs["direction"] == half and theirs["peer"] == rank
            done[theirs["tag"]] = done.get(theirs["tag"], 0) - moves
        others = ", ".join(f"{count} with tag {other}" for other, count in sorted(done.items()) if count > 0)
        counted += f", and {others}" if others else ""
        late.append((peer, f"has {has} {counted}; it {doing_of(status, label)}"))
    # One message is enough, but a rank that does not answer may have prevented it from arriving.
    return [pair for pair in late if pair[1] is None] if on_its_way else late


def _messages_begun(status: Status, label: str, half: str, peer: int) -> dict[int, int]:
    """Return the number of messages that a rank has begun with `peer`, by tag."""
    group = group_of(status, label)
    rows = () if group is None else group["messages"]["begun"]
    return {row["tag"]: row["number"] for row in rows if row["direction"] == half and row["peer"] == peer}


def root_cause(statuses: Statuses, silent: Silent = _NONE_SILENT) -> list[str]:
    """Return the root cause in a job's reports: differing calls, a circular wait, or the ranks that others wait for.

    silent: for ranks that do not answer, the state of their process. A rank that is in neither mapping was not asked.
    """
    for label, differing in _mismatches(statuses):
        return [
            f"the ranks of {label} made different calls with the sequence number {differing.number}:",
            *(f"  {line}" for line in differing.lines),
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
        waiter = statuses[direct[0]]
        failed = waiter.get("failed")
        call = f"{failed['call']}, {made_at(failed)}" if failed else doing_of(waiter)
        waits_for = f"wait{'' if direct[1:] else 's'} for it in {call.removeprefix('is in ')}"
        doing = activity(root, statuses.get(root), silent.get(root, "no report"))
        through = sorted({*end.waiters} - {*direct})
        others = f", and {ranks_text(through)} for {'them' if direct[1:] else 'that rank'}" if through else ""
        lines.append(f"{doing}; {ranks_text(direct)} {waits_for}{others}")
    return lines or ["no rank was found waiting for another: the reports do not show a cause"]


def whereabouts(statuses: Statuses, silent: Silent) -> list[str]:
    """Return lines that say where the ranks are, the cause first if ranks wait for others. silent: see `root_cause`."""
    places = places_of(statuses, silent)
    doing = {rank: place.doing for rank, place in places.items()}
    waiting = any(place.waits_for for place in places.values())
    return [
        *(root_cause(statuses, silent) if waiting else ()),
        *first_lines(
            [
                f"{ranks_text(ranks) + ': each' if ranks[1:] else places[ranks[0]].name} {doing[ranks[0]]}"
                for ranks in alike([*places], doing)
            ]
        ),
    ]


def find_hung(statuses: Statuses, silent: Silent, ask: Callable[[list[int]], Statuses]) -> dict[int, str]:
    """Return the ranks at which chains of waiting end although they are in no call, or do not answer. With what each of them
    does. {} if ranks make different calls, or wait in a circle.

    ask: returns the records that ranks have now. Calls time out together, so a rank may have been on its way from its own
    failed call to the error: a rank hangs if it is found so twice.
    """
    hung = _hung(statuses, silent)
    if running := [rank for rank in hung if rank in statuses]:
        later = _hung({**statuses, **ask(running)}, silent)
        hung = {rank: what for rank, what in later.items() if rank in hung}
    return hung


def _hung(statuses: Statuses, silent: Silent) -> dict[int, str]:
    places = places_of(statuses, silent)
    ends = chain_ends({rank: place.waits_for for rank, place in places.items() if place.waits_for})
    if any(end.is_circle for end in ends) or any(True for _ in _mismatches(statuses)):
        return {}
    hung = {}
    for rank in sorted(rank for end in ends for rank in end.ranks):
        status, process = statuses.get(rank), silent.get(rank, "")
        if status is None:
            if process != "ended":
                hung[rank] = SILENT[process]
        # A rank whose own call has just failed waits for nobody any longer, and does not hang either.
        elif not any(map(status.get, ("closed", "failed", "call_failed"))) and not any(
            map(blocked_in, status["groups"])
        ):
            hung[rank] = doing_of(status)
    return hung


def _mismatches(statuses: Statuses) -> Iterator[tuple[str, Diagnosis]]:
    """Yield the groups whose ranks make different calls."""
    groups = {group["label"]: group["ranks"] for status in statuses.values() for group in status["groups"]}
    for label, ranks in groups.items():
        if (differing := find_mismatch(label, ranks, statuses)) is not None:
            yield label, differing
