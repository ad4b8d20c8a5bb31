"""A trace in the JSON format of Chrome's tracing, which Perfetto reads too.

The format: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from meshcomm.comm.spans import Span

Event = dict[str, Any]
# Both ends of a message know it by this: group, from rank, to rank, tag, number.
_Key = tuple[str, int, int, int, int]
_NS: Final = 1e-3  # of a microsecond


def part_of(
    rank: int, name: str, lanes: Sequence[str], spans: Sequence[Span], groups: Mapping[str, Sequence[int]]
) -> bytes:
    """One rank's part of a trace, compressed: lanes, events, and the ends of its messages.

    name: of the rank. lanes: of dims, in their order. groups: global ranks by label. Times are the spans', none
    of which is open.
    """
    used = dict.fromkeys(span.lane for span in spans)
    # Stretches of the program first, then dims as the plan has them, then what else there is.
    names = [
        *(span.lane for span in spans if not span.group),
        *(lane for lane in lanes if lane in used),
        *used,
    ]
    order = {lane: tid for tid, lane in enumerate(dict.fromkeys(names))}
    process: Event = {"ph": "M", "pid": rank, "tid": 0}
    events = [
        {**process, "name": "process_name", "args": {"name": name}},
        {**process, "name": "process_sort_index", "args": {"sort_index": rank}},
    ]
    for lane, tid in order.items():
        events.append({**process, "tid": tid, "name": "thread_name", "args": {"name": lane}})
        events.append({**process, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
    ends: list[tuple[_Key, bool, Event]] = []
    for number, span in enumerate(spans):
        at = {"pid": rank, "tid": order[span.lane]}
        messages = _messages(span, groups.get(span.group, ()))
        slices = list(_slices(span, messages, number))
        events += [{**at, **event} for event in slices]
        # A message leaves where its call begins, and has come where the last wait ends.
        last = [event for event in slices if event["ph"] == "X"][-1]
        came = max(last["ts"], last["ts"] + last["dur"] - _NS)
        for sends, peer, tag, count in messages:
            if peer is not None:
                key = (span.group, *((rank, peer) if sends else (peer, rank)), tag, count)
                ends.append((key, sends, {**at, "ts": slices[0]["ts"] if sends else came}))
    text = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return zlib.compress(json.dumps([text, ends]).encode(), 1)


def write(path: Path, parts: Sequence[bytes], facts: Mapping[str, Any]) -> None:
    """One file of all parts, which appears when it is whole, or not at all. facts: about all of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    half = Path(name)
    # Ends of messages whose other end has not been seen.
    unmatched: dict[_Key, tuple[bool, Event]] = {}
    flows = 0
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            for number, part in enumerate(parts):
                text, ends = json.loads(zlib.decompress(part))
                file.write((",\n" if number else '{"displayTimeUnit": "ms", "traceEvents": [\n') + text)
                for key, sends, event in ends:
                    other = unmatched.pop(tuple(key), None)
                    if other is None or other[0] == sends:
                        unmatched[tuple(key)] = (sends, event)
                        continue
                    flows += 1
                    for way, end in ((sends, event), other):
                        kind = {"ph": "s"} if way else {"ph": "f", "bp": "e"}
                        flow = {**end, **kind, "id": flows, "cat": "message", "name": "message"}
                        file.write(",\n" + json.dumps(flow, separators=(",", ":")))
            facts = {**facts, "unmatched_messages": len(unmatched)}
            file.write(f'\n], "otherData": {json.dumps(facts)}}}\n')
        half.chmod(0o644)
        half.replace(path)
    finally:
        with suppress(OSError):
            half.unlink(missing_ok=True)


def _messages(span: Span, ranks: Sequence[int]) -> list[tuple[bool, int | None, int, int]]:
    """Whether it is sent, the other rank (None where it never came), tag, number."""
    return [
        (way == "send", None if peer is None else ranks[peer], tag, number)
        for way, peer, tag, number in span.parts
    ]


def _slices(
    span: Span, messages: Sequence[tuple[bool, int | None, int, int]], number: int
) -> Iterator[Event]:
    """What is drawn of a call: a slice, and where it is waited for later, one for each wait and a bar above."""
    facts: dict[str, Any] = {"site": span.site}
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
            yield drawn(f"wait for {span.call}", since, now, {"site": span.site})
        # From start to the end of the wait, whatever the program does in between.
        bar = {"name": f"{span.call} {span.lane}", "cat": "under way", "id": number}
        yield {**bar, "ph": "b", "ts": span.began * 1e6, "args": facts}
        yield {**bar, "ph": "e", "ts": over * 1e6}
