"""A trace in the JSON format of Chrome's tracing, which Perfetto reads too.

The format: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, NamedTuple, final

Event = dict[str, Any]
# Both ends of a message know it by this: group, from rank, to rank, tag, number.
_Key = tuple[str, int, int, int, int]
_NS: Final = 1e-3  # of a microsecond


class Call(NamedTuple):
    """One span of a rank, times in seconds by its own clock; see meshcomm.comm.spans.Span.

    messages: (whether it is sent, the other rank, tag, number); the rank None where it never came.
    """

    group: str
    lane: str
    call: str
    number: int
    site: str
    began: float
    left: float
    nbytes: int
    shape: Sequence[int] | None
    dtype: str | None
    waits: Sequence[Sequence[float]]
    at_once: bool
    messages: Sequence[tuple[bool, int | None, int, int]]

    @property
    def over(self) -> float:
        """When the last wait for it was over, or it was left."""
        return max([self.left, *(end for _, end in self.waits)])


class Part(NamedTuple):
    """One rank's part of a trace. lanes: names of dims in their order; shift_s: added to its times."""

    rank: int
    name: str
    lanes: Sequence[str]
    shift_s: float
    calls: Sequence[Sequence[Any]]


@final
class TraceFile:
    """Writes the parts one after the other; the file appears when it is whole, or not at all."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None
        self._first = True
        self._flows = 0
        # Ends of messages whose other end has not been seen: (pid, tid, microseconds, whether it sends).
        self._open: dict[_Key, tuple[int, int, float, bool]] = {}
        self._spans = 0

    def __enter__(self) -> TraceFile:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{self._path.name}.", dir=self._path.parent)
        self._half = Path(name)
        self._file = os.fdopen(handle, "w", encoding="utf-8")
        self._file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        return self

    def add(self, part: Part) -> None:
        """A rank's lanes and events."""
        calls = [Call(*each) for each in part.calls]
        own = [call.lane for call in calls if not call.group]
        # Stretches of the program first, then dims as the plan has them, then what else there is.
        names = [*own, *(lane for lane in part.lanes if any(c.lane == lane for c in calls))]
        lanes = {name: tid for tid, name in enumerate(dict.fromkeys([*names, *(c.lane for c in calls)]))}
        for event in _named(part, lanes):
            self._put(event)
        for call in calls:
            for event in self._events(part, call, lanes[call.lane]):
                self._put(event)

    def finish(self, facts: dict[str, Any]) -> None:
        """Close the file, with what is known of the whole, and put it in its place."""
        assert self._file is not None
        facts = {**facts, "unmatched_messages": len(self._open)}
        self._file.write(f'\n], "otherData": {json.dumps(facts)}}}\n')
        self._file.close()
        self._half.chmod(0o644)
        self._half.replace(self._path)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
        with suppress(OSError):
            self._half.unlink(missing_ok=True)

    def _put(self, event: Event) -> None:
        assert self._file is not None
        self._file.write(("\n" if self._first else ",\n") + json.dumps(event, separators=(",", ":")))
        self._first = False

    def _events(self, part: Part, call: Call, tid: int) -> Iterator[Event]:
        at = {"pid": part.rank, "tid": tid}
        kind = "program" if not call.group else "message" if call.messages else "collective"
        began = (call.began + part.shift_s) * 1e6
        left, over = (call.left + part.shift_s) * 1e6, (call.over + part.shift_s) * 1e6
        # Several messages of one call follow each other; collectives of a list may lie across each other.
        whole = not call.waits or (call.at_once and kind == "message")
        name = call.call if whole else f"start {call.call}"
        end = over if whole else left
        yield {
            **at, "ph": "X", "name": name, "cat": kind, "ts": began, "dur": max(0.0, end - began),
            "args": _facts(call),
        }  # fmt: skip
        last = (began, end)
        if not whole:
            for since, now in call.waits:
                last = ((since + part.shift_s) * 1e6, (now + part.shift_s) * 1e6)
                yield {
                    **at, "ph": "X", "name": f"wait for {call.call}", "cat": kind, "ts": last[0],
                    "dur": max(0.0, last[1] - last[0]), "args": {"site": call.site},
                }  # fmt: skip
            # From start to the end of the wait, whatever the program does in between.
            self._spans += 1
            span = {**at, "name": f"{call.call} {call.lane}", "cat": "under way", "id": self._spans}
            yield {**span, "ph": "b", "ts": began, "args": _facts(call)}
            yield {**span, "ph": "e", "ts": over}
        for sends, peer, tag, number in call.messages:
            if peer is not None:
                ends = (part.rank, peer) if sends else (peer, part.rank)
                # A message leaves where its call begins, and has come where the last wait ends.
                moment = began if sends else max(last[0], last[1] - _NS)
                key = (call.group, *ends, tag, number)
                yield from self._flow(key, (part.rank, tid, moment, sends))

    def _flow(self, key: _Key, end: tuple[int, int, float, bool]) -> Iterator[Event]:
        """Both ends of a message, as soon as both are known: viewers want pairs."""
        other = self._open.pop(key, None)
        if other is None or other[3] == end[3]:
            self._open[key] = end
            return
        self._flows += 1
        for pid, tid, moment, sends in (end, other):
            event = {"pid": pid, "tid": tid, "ts": moment, "id": self._flows, "cat": "message"}
            event |= {"name": "message", "ph": "s"} if sends else {"name": "message", "ph": "f", "bp": "e"}
            yield event


def _named(part: Part, lanes: dict[str, int]) -> Iterator[Event]:
    """What viewers show beside the lanes, and in which order."""
    about = {"process_name": {"name": part.name}, "process_sort_index": {"sort_index": part.rank}}
    for name, args in about.items():
        yield {"ph": "M", "pid": part.rank, "tid": 0, "name": name, "args": args}
    for lane, tid in lanes.items():
        at = {"ph": "M", "pid": part.rank, "tid": tid}
        yield {**at, "name": "thread_name", "args": {"name": lane}}
        yield {**at, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _facts(call: Call) -> dict[str, Any]:
    """What is shown of an event that somebody points at."""
    found: dict[str, Any] = {"site": call.site}
    if call.group:
        found |= {"group": call.group, "bytes": call.nbytes}
    if call.number:
        found["number"] = call.number
    if call.shape is not None:
        found |= {"shape": list(call.shape), "dtype": call.dtype}
    for sends, peer, tag, number in call.messages:
        text = f"rank {'?' if peer is None else peer}, message {number} with tag {tag}"
        found.setdefault("to" if sends else "from", []).append(text)
    return found
