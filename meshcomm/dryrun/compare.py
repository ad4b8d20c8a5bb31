"""Compare the calls of the ranks that were run. The ranks of a group must make the same calls, and each message needs a
send and a receive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, TypeVar

from meshcomm.layout.sizes import ranks_text
from meshcomm.show.units import count
from meshcomm.watching.matcher import Message, Messages
from meshcomm.watching.verdict import alike, majority

if TYPE_CHECKING:
    from meshcomm.dryrun.rank import RankStep
    from meshcomm.watching.spans import Span

T = TypeVar("T")

# Operations whose shapes may differ between ranks.
_OWN_SHAPES: Final = ("all_to_all", "gather", "scatter", "objects")

# The ranks of a group, in coord order. Groups with the same ranks are treated as one group.
Members: TypeAlias = tuple[int, ...]


class DryRunFinding(NamedTuple):
    """A predicted failure. what: a one-line summary. lines: each rank's call and its line in the program.

    ranks: the ranks whose calls differ, or that wait. dim: the group's dim. groups: how many of the examined groups have
    this failure.
    """

    what: str
    lines: tuple[str, ...]
    ranks: tuple[int, ...]
    dim: str
    groups: int = 1


def call_text(span: Span) -> str:
    """Return a description of a call and its data, such as `all_reduce sum (4, 8) float32`."""
    root = f"root {span.root}" if span.root >= 0 else ""
    shape = span.listed or ("" if span.shape is None else f"({', '.join(map(str, span.shape))})")
    nbytes = f"{span.nbytes} bytes" if span.shape is None else ""
    return " ".join(
        part for part in (span.call, span.op or "", root, shape, span.dtype or "", nbytes) if part
    )


def find_differences(steps: Sequence[RankStep], where: Callable[[int], str]) -> list[DryRunFinding]:
    """Return the first difference between the collectives of each group's ranks, and unmatched messages.

    where: returns the text for a rank, with its coords. Identical findings from several groups are merged.
    """
    collectives: dict[Members, dict[int, list[Span]]] = defaultdict(dict)
    for step in steps:
        for members in step.groups.values():
            # A rank without calls needs an entry too, so that the other ranks are compared with it.
            collectives[tuple(members)].setdefault(step.rank, [])
        for span in step.calls:
            if not span.parts:
                collectives[tuple(step.groups[span.group])][step.rank].append(span)
    differences = (_first_difference(calls, where) for calls in collectives.values() if len(calls) > 1)
    return _merged(
        [*(difference for difference in differences if difference is not None), *_messages(steps, where)]
    )


def sequence(step: RankStep) -> dict[str, list[tuple[object, ...]]]:
    """Return a rank's calls along each dim, in order, reduced to the parts that must be equal across a group."""
    calls_of_lane: dict[str, list[tuple[object, ...]]] = defaultdict(list)
    for span in step.calls:
        calls_of_lane[span.lane].append(_key(span) if not span.parts else (span.call, len(span.parts)))
    return dict(calls_of_lane)


def _key(span: Span) -> tuple[object, ...]:
    """Return the parts of a call that must be equal on all ranks of a group."""
    if span.call.startswith(_OWN_SHAPES):
        tail = span.shape[1:] if span.shape is not None and span.call.startswith("all_to_all") else None
        return span.call, span.op, span.root, tail, span.dtype
    return span.call, span.op, span.root, span.shape, span.listed, span.dtype, span.nbytes


def _first_difference(
    calls_of_rank: Mapping[int, Sequence[Span]], where: Callable[[int], str]
) -> DryRunFinding | None:
    """Return the first difference between the calls in `calls_of_rank`, a mapping from each rank of one group to its calls."""
    most = max(map(len, calls_of_rank.values()))
    for place in range(most):
        spans = {rank: calls[place] if place < len(calls) else None for rank, calls in calls_of_rank.items()}
        keys = {rank: None if span is None else _key(span) for rank, span in spans.items()}
        if len(set(keys.values())) == 1:
            continue
        usual, odd = majority(dict(sorted(keys.items())))
        label, dim = next((span.group, span.lane) for span in spans.values() if span is not None)
        # In a tie, the lists of calls of two ranks that do not agree are compared.
        other = usual[0] if usual else next(rank for rank in odd if keys[rank] != keys[odd[0]])
        difference = _difference_text(calls_of_rank[odd[0]], calls_of_rank[other], place)
        who = where(odd[0]) if len(odd) == 1 else f"{ranks_text(odd)}, {where(odd[0])} first,"
        what = f"{who} along {dim}: {difference}"
        if not usual:
            what = f"{ranks_text(odd)} along {dim} do not agree; {where(odd[0])}: {difference}"
        calls = {rank: span and (_key(span), span.site) for rank, span in spans.items()}
        lines = [f"{ranks_text(ranks)}: {_at(spans[ranks[0]])}" for ranks in alike(odd, calls)]
        lines += [f"{ranks_text(usual)}: {_at(spans[usual[0]])}"] if usual else []
        lines[-1] += f", as call {place + 1} of {label}"
        return DryRunFinding(what, tuple(lines), tuple(odd), dim)
    return None


def _difference_text(mine: Sequence[Span], theirs: Sequence[Span], place: int) -> str:
    """Describe how a rank's calls differ from the other ranks' calls, starting at index `place`."""
    call, other = (calls[place] if place < len(calls) else None for calls in (mine, theirs))
    if call is None:
        assert other is not None
        return f"{count(len(theirs) - place, 'call')} fewer than others make, starting with {call_text(other)} at {other.site}"
    if other is None:
        return f"{count(len(mine) - place, 'call')} more than others make, starting with {call_text(call)} at {call.site}"
    # Choose the explanation that leaves the most matching calls after this one.
    left_out = _alike(mine, place, theirs, place + 1)
    more = _alike(mine, place + 1, theirs, place)
    if left_out > max(more, another := _alike(mine, place + 1, theirs, place + 1)):
        return f"no {call_text(other)}, which others make at {other.site}"
    if more > another:
        return f"{_at(call)}, which others do not make"
    return f"{_at(call)}, where others make {_at(other)}"


def _alike(mine: Sequence[Span], my_place: int, theirs: Sequence[Span], their_place: int) -> int:
    """Return how many consecutive calls match, starting at `my_place` in `mine` and at `their_place` in `theirs`."""
    pairs = zip(mine[my_place:], theirs[their_place:], strict=False)
    return sum(1 for _ in takewhile(lambda pair: _key(pair[0]) == _key(pair[1]), pairs))


def _at(span: Span | None) -> str:
    return "no further call" if span is None else f"{call_text(span)} at {span.site}"


# -- messages ---------------------------------------------------------------------------------------


def _carried(span: Span) -> tuple[object, ...] | None:
    """Return the properties that must match at both ends of a message, or None if the call has several messages."""
    # torch 2.11's pipelines open connections with a message that is sent with shape () and received with shape (1,).
    return (span.shape or (1,), span.dtype, span.nbytes) if len(span.parts) == 1 else None


def post(messages: Messages[T], sends: bool, source: int, target: int, tag: int, brought: T) -> Message[T]:
    """Return the message whose one end a rank has posted."""
    if sends:
        return messages.send(source, target, tag, brought)
    return messages.receive(source, target, tag, brought, lambda count: 0)


def _messages(steps: Sequence[RankStep], where: Callable[[int], str]) -> Iterator[DryRunFinding]:
    ran = {step.rank for step in steps}
    groups: dict[Members, Messages[Span]] = defaultdict(Messages)
    # (group, from, to, tag) -> its messages in order, which are repeated where both ends have come.
    channels: dict[tuple[Members, int, int, int], dict[Message[Span], None]] = defaultdict(dict)
    for step in steps:
        for span in step.calls:
            for direction, peer, tag, _ in span.parts:
                if peer is None:
                    continue
                members = tuple(step.groups[span.group])
                other = members[peer]
                if other not in ran:
                    continue
                sends = direction == "send"
                pair = (step.rank, other) if sends else (other, step.rank)
                channels[members, *pair, tag][post(groups[members], sends, *pair, tag, span)] = None
    for (_, source, target, tag), messages in channels.items():
        tagged = f", tag {tag}," if tag else ""
        matched = [(message.sent, message.received) for message in messages if message.complete]
        for out, into in matched:
            assert out is not None and into is not None
            carried = _carried(out), _carried(into)
            if None not in carried and carried[0] != carried[1]:
                yield DryRunFinding(
                    f"{where(source)} sends {call_text(out)} to {where(target)}{tagged} along {out.lane}, "
                    f"which receives {call_text(into)}",
                    (f"sent at {out.site}", f"received at {into.site}"),
                    (source, target),
                    out.lane,
                )
                break
        else:
            unmatched = [message for message in messages if not message.complete]
            if unmatched:
                alone = unmatched[0].sent or unmatched[0].received
                assert alone is not None
                sends, more = unmatched[0].sent is not None, len(matched) + len(unmatched)
                fate = "is sent and never received" if sends else "is waited for and never sent"
                yield DryRunFinding(
                    f"message {len(matched) + 1} from {where(source)} to {where(target)}{tagged} "
                    f"along {alone.lane} {fate}: {call_text(alone)} at {alone.site}",
                    (f"{more if sends else len(matched)} sent, {len(matched) if sends else more} received",),
                    (source if sends else target,),
                    alone.lane,
                )


def _merged(findings: Sequence[DryRunFinding]) -> list[DryRunFinding]:
    """Merge identical findings from several groups into one that gives the number of groups."""
    alike: dict[tuple[str, tuple[str, ...]], DryRunFinding] = {}
    for finding in findings:
        # The key consists of the calls and their source lines, without the ranks.
        key = (
            finding.dim,
            tuple(line.partition(": ")[2].partition(", as call")[0] or line for line in finding.lines),
        )
        earlier = alike.get(key)
        alike[key] = finding if earlier is None else earlier._replace(groups=earlier.groups + 1)
    return list(alike.values())
