"""`mesh.trace(...)`: what every rank did inside a block, brought together in one file.

In the JSON format of Chrome's tracing, which Perfetto reads too: "Trace Event Format",
docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from os import PathLike
from pathlib import Path
from time import perf_counter as clock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, final

from meshcomm.comm.spans import Span, Spans, host, stretch
from meshcomm.errors import StoreError, UnsupportedOp
from meshcomm.mesh.together import of_every_rank

if TYPE_CHECKING:
    from meshcomm.mesh.metrics import Metrics

# Of all ranks together; one rank's part has some 20 bytes a call.
_MAX_BYTES: Final = 1 << 40

_NS: Final = 1e-3  # of a microsecond

Event: TypeAlias = dict[str, Any]


class _Clock(NamedTuple):
    """One rank's monotonic clock: when it entered and left an exchange that all ranks made.

    host: equal for ranks that share the clock. opened: when the block began. dropped: calls not kept.
    """

    rank: int
    host: int
    entered: float
    left: float
    opened: float
    dropped: int


def offsets(clocks: Sequence[_Clock]) -> dict[int, tuple[float, float]]:
    """By rank, the seconds to add to its clock for that of the first one, and how far that may be off.

    Nobody leaves the exchange before all have entered it, which bounds the offset from both sides: the middle is
    off by half of their distance at most. Ranks of one host share a clock, and the tightest bounds.
    """
    at: dict[int, list[_Clock]] = {}
    for each in clocks:
        at.setdefault(each.host, []).append(each)
    here = at[clocks[0].host]
    found = {each.rank: (0.0, 0.0) for each in here}
    for there in at.values():
        if there is not here:
            least = max(each.entered for each in here) - min(each.left for each in there)
            most = min(each.left for each in here) - max(each.entered for each in there)
            found |= {each.rank: ((least + most) / 2, (most - least) / 2) for each in there}
    return found


@final
class Trace:
    """A block in which every call of this rank along the mesh is kept; see `Mesh.trace`.

    path: of the file. dropped: calls of this rank that were too many to keep; known after the block.
    """

    def __init__(self, mesh: Metrics, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self.dropped = 0
        self._mesh = mesh
        self._dims = [dim for dim, size in mesh.layout.dims.items() if size > 1][::-1]
        self._spans = Spans()
        self._opened = 0.0

    def __enter__(self) -> Trace:
        if self._mesh.spans is not None:
            raise UnsupportedOp(
                f"a trace inside a trace on {self._mesh.label}",
                given=f"mesh.trace({str(self.path)!r}) while another is taken",
                expected="one trace at a time of each mesh",
                hint="end the outer block first",
            )
        self._opened = self._spans.step_began = clock()
        self._mesh.trace_into(self._spans)
        return self

    def stretch(self, name: str, lane: str = "program") -> AbstractContextManager[None]:
        """A block shown under `name` in a lane of its own, as in `with trace.stretch("data"):`."""
        return stretch(self._spans, lane, name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        closed = clock()
        self._mesh.trace_into(None)
        self.dropped = self._spans.dropped
        for span in self._spans.found:
            span.left = closed if span.left is None else span.left
        facts: dict[str, Any] = {"meshcomm": dict(self._mesh.dims)}
        if error is not None:
            # The others may never come: what this rank did stands alone, and must not hide the error.
            path = self.path.with_suffix(f".rank{self._mesh.rank}{self.path.suffix}")
            with suppress(OSError):
                write(path, [self._part(-self._opened)], {**facts, "alone": True})
            return
        # The second time nobody is late, which is what makes the bounds tight.
        of_every_rank(self._mesh, None)
        entered = clock()
        of_every_rank(self._mesh, None)
        mine = _Clock(self._mesh.rank, host(), entered, clock(), self._opened, self.dropped)
        clocks = [_Clock(*each) for each in of_every_rank(self._mesh, tuple(mine))]
        ahead = offsets(clocks)
        origin = min(each.opened + ahead[each.rank][0] for each in clocks)
        parts = self._gathered(self._part(ahead[self._mesh.rank][0] - origin))
        facts |= {
            "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "dropped": {str(each.rank): each.dropped for each in clocks if each.dropped},
            "clock_error_s": {str(rank): error_s for rank, (_, error_s) in ahead.items() if error_s},
        }
        problem = ""
        if parts is not None:
            try:
                write(self.path, parts, facts)
            except OSError as failed:
                problem = str(failed)
        problem = "".join(of_every_rank(self._mesh, problem))
        if problem:
            raise StoreError(
                f"the trace {self.path} could not be written",
                given=problem,
                expected="a path on the first rank's host that can be written",
                hint='mesh.trace("trace.json")',
            )

    def _part(self, shift_s: float) -> bytes:
        mesh, spans = self._mesh, self._spans.found
        lanes = [family.name for family in mesh.plan.families]
        for span in spans:
            assert span.left is not None
            span.began, span.left = span.began + shift_s, span.left + shift_s
            span.waits = [(since + shift_s, now + shift_s) for since, now in span.waits]
        return part_of(mesh.rank, mesh.label, lanes, spans, mesh.groups_by_label)

    def _gathered(self, mine: bytes) -> list[bytes] | None:
        """All parts, in the order of their ranks' coords, on the first rank of the mesh; None on the others."""
        found = [mine]
        for dim in self._dims:
            parts = self._mesh.objects.gather(dim, found, 0, max_bytes=_MAX_BYTES)
            if parts is None:
                return None
            found = [each for part in parts for each in part]
        return found


# -- the file --------------------------------------------------------------------------------------------

# Whether a message is sent, the other rank (None where it never came), tag, number.
_End: TypeAlias = tuple[bool, int | None, int, int]


def part_of(
    rank: int, name: str, lanes: Sequence[str], spans: Sequence[Span], groups: Mapping[str, Sequence[int]]
) -> bytes:
    """One rank's part of a trace, compressed: lanes, events, and the ends of its messages.

    name: of the rank. lanes: of dims, in their order. groups: global ranks by label. Times are the spans', none
    of which is open.
    """
    # Stretches of the program first, then dims as the plan has them, then what else there is.
    used = [span.lane for span in spans]
    first = [span.lane for span in spans if not span.group]
    ordered = dict.fromkeys([*first, *(lane for lane in lanes if lane in used), *used])
    order = {lane: tid for tid, lane in enumerate(ordered)}

    def about(kind: str, tid: int = 0, **facts: object) -> Event:
        return {"ph": "M", "pid": rank, "tid": tid, "name": kind, "args": facts}

    events = [about("process_name", name=name), about("process_sort_index", sort_index=rank)]
    for lane, tid in order.items():
        events += [about("thread_name", tid, name=lane), about("thread_sort_index", tid, sort_index=tid)]
    ends: list[Event] = []
    for number, span in enumerate(spans):
        ranks, at = groups.get(span.group, ()), {"pid": rank, "tid": order[span.lane]}
        messages = [
            (way == "send", None if peer is None else ranks[peer], tag, count)
            for way, peer, tag, count in span.parts
        ]
        slices = list(_slices(span, messages, number))
        events += [{**at, **event} for event in slices]
        # A message leaves where its call begins, and has come where the last wait ends.
        last = [event for event in slices if event["ph"] == "X"][-1]
        came = max(last["ts"], last["ts"] + last["dur"] - _NS)
        for sends, peer, tag, count in messages:
            if peer is not None:
                # Both ends of a message know it by this.
                way = f"{rank}>{peer}" if sends else f"{peer}>{rank}"
                flow = {"name": "message", "cat": "message", "id": f"{span.group} {way} {tag} {count}"}
                kind = {"ph": "s", "ts": slices[0]["ts"]} if sends else {"ph": "f", "bp": "e", "ts": came}
                ends.append({**at, **flow, **kind})
    return zlib.compress(json.dumps([",\n".join(map(_compact, events)), ends]).encode(), 1)


def write(path: Path, parts: Sequence[bytes], facts: Mapping[str, Any]) -> None:
    """One file of all parts, which appears when it is whole, or not at all. facts: about all of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.{os.getpid()}")
    # Ends of messages whose other end has not been seen.
    unmatched: dict[str, Event] = {}
    try:
        with half.open("w", encoding="utf-8") as file:
            for number, part in enumerate(parts):
                text, ends = json.loads(zlib.decompress(part))
                file.write((",\n" if number else '{"displayTimeUnit": "ms", "traceEvents": [\n') + text)
                for end in ends:
                    other = unmatched.pop(end["id"], None)
                    if other is None or other["ph"] == end["ph"]:
                        unmatched[end["id"]] = end
                    else:
                        file.write(f",\n{_compact(other)},\n{_compact(end)}")
            facts = {**facts, "unmatched_messages": len(unmatched)}
            file.write(f'\n], "otherData": {json.dumps(facts)}}}\n')
        half.replace(path)
    finally:
        with suppress(OSError):
            half.unlink(missing_ok=True)


def _compact(event: Event) -> str:
    return json.dumps(event, separators=(",", ":"))


def _slices(span: Span, messages: Sequence[_End], number: int) -> Iterator[Event]:
    """What is drawn of a call: a slice, and where it is waited for later, one for each wait and a bar above."""
    facts: dict[str, Any] = {"callsite": span.site}
    if span.group:
        facts |= {"group": span.group, "bytes": span.nbytes}
    if span.number:
        facts["number"] = span.number
    if span.shape is not None:
        facts |= {"shape": list(span.shape), "dtype": span.dtype}
    for sends, peer, tag, count in messages:
        text = f"rank {'?' if peer is None else peer}, message {count} with tag {tag}"
        facts.setdefault("to" if sends else "from", []).append(text)
    assert span.left is not None
    over = max([span.left, *(end for _, end in span.waits)])
    # Several messages of one call follow each other; collectives of a list may lie across each other.
    whole = not span.waits or (span.at_once and bool(messages))
    kind = "program" if not span.group else "message" if messages else "collective"

    def drawn(name: str, began: float, end: float, args: dict[str, Any]) -> Event:
        times = {"ts": began * 1e6, "dur": max(0.0, (end - began) * 1e6)}
        return {"ph": "X", "name": name, "cat": kind, **times, "args": args}

    name = span.call if whole else f"start {span.call}"
    yield drawn(name, span.began, over if whole else span.left, facts)
    if not whole:
        for since, now in span.waits:
            yield drawn(f"wait for {span.call}", since, now, {"callsite": span.site})
        # From start to the end of the wait, whatever the program does in between.
        bar = {"name": f"{span.call} {span.lane}", "cat": "under way", "id": number}
        yield {**bar, "ph": "b", "ts": span.began * 1e6, "args": facts}
        yield {**bar, "ph": "e", "ts": over * 1e6}
