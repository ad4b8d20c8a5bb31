"""`mesh.debug.trace(...)`: records the calls of every rank inside a block in one file, in Chrome's "Trace Event Format"."""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from os import PathLike
from pathlib import Path
from time import perf_counter as clock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

from meshcomm.errors import StoreError, UnsupportedOp
from meshcomm.mesh.all_ranks import of_every_rank
from meshcomm.watching.spans import Span, Spans, host, stretch

if TYPE_CHECKING:
    from meshcomm.mesh.mesh import Mesh

# Size limit for all ranks together. One rank's part takes about 20 bytes per call.
_MAX_BYTES: Final = 1 << 40

Event: TypeAlias = dict[str, Any]


@final
class Trace:
    """A block that records every call of this rank on the mesh; see `Debug.trace`.

    path: path of the file.
    dropped: number of this rank's calls that exceed the limit and are not recorded. Available after the block.
    """

    def __init__(self, mesh: Mesh, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self.dropped = 0
        self._mesh = mesh
        self._spans = Spans()
        self._opened = 0.0

    def __enter__(self) -> Trace:
        if self._mesh.debug.metrics.spans is not None:
            raise UnsupportedOp(
                f"another trace is active on {self._mesh.label}",
                given=f"mesh.debug.trace({str(self.path)!r}) inside its with block",
                expected="one trace of a mesh at a time",
                hint="end the outer block first",
            )
        self._opened = self._spans.step_began = clock()
        self._mesh.debug.metrics.trace_into(self._spans)
        return self

    def stretch(self, name: str, lane: str = "program") -> AbstractContextManager[None]:
        """Show a code block as `name` in a lane of the trace, as in `with trace.stretch("data"):`."""
        return stretch(self._spans, lane, name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        mesh, closed = self._mesh, clock()
        mesh.debug.metrics.trace_into(None)
        self.dropped = self._spans.dropped
        for span in self._spans.found:
            span.left = closed if span.left is None else span.left
        if error is not None:
            # The other ranks may never arrive, so write only this rank's calls and do not hide the error.
            path = self.path.with_suffix(f".rank{mesh.rank}{self.path.suffix}")
            with suppress(OSError):
                write(path, [self._part(-self._opened)], {"meshcomm": dict(mesh.dims), "alone": True})
            return
        # Ranks on one host share a monotonic clock. Across hosts, compare the wall clocks.
        to_wall_clock = time.time() - clock()
        rows = of_every_rank(mesh, (mesh.rank, host(), to_wall_clock, self._opened, self.dropped))
        several = len({at for _, at, *_ in rows}) > 1
        origin = min(opened + to_wall * several for _, _, to_wall, opened, _ in rows)
        dropped = {str(rank): dropped for rank, *_, dropped in rows if dropped}
        writing = self._writing(to_wall_clock * several - origin, dropped)
        problem = ""
        try:
            writing()
        except OSError as failed:
            problem = str(failed)
        if problem := "".join(of_every_rank(mesh, problem)):
            raise StoreError(
                f"the trace {self.path} could not be written",
                given=problem,
                expected="a writable path on the first rank's host",
                hint='mesh.debug.trace("trace.json")',
            )

    def _part(self, shift_s: float) -> bytes:
        mesh = self._mesh
        lanes = [family.name for family in mesh.plan.families]
        events = events_of(
            mesh.rank, mesh.label, lanes, self._spans.found, mesh.debug.metrics.groups, shift_s
        )
        return zlib.compress(
            ",\n".join(json.dumps(event, separators=(",", ":")) for event in events).encode(), 1
        )

    def _writing(self, shift_s: float, dropped: Mapping[str, int]) -> Callable[[], None]:
        """Gather all parts on the first rank in coord order. On that rank, return a function that writes them."""
        parts = [self._part(shift_s)]
        for dim in [dim for dim, size in self._mesh.dims.items() if size > 1][::-1]:
            gathered = self._mesh.objects.gather(dim, parts, 0, max_bytes=_MAX_BYTES)
            if gathered is None:
                return lambda: None
            parts = [part for of_rank in gathered for part in of_rank]
        return partial(write, self.path, parts, {"meshcomm": dict(self._mesh.dims), "dropped": dropped})


def write(path: Path, parts: Sequence[bytes], facts: Mapping[str, Any]) -> None:
    """Atomically write one file with all ranks' parts. `facts` is the metadata of the whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with half.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            for number, part in enumerate(parts):
                file.write(",\n" * bool(number) + zlib.decompress(part).decode())
            file.write(f'\n], "otherData": {json.dumps(facts)}}}\n')
        half.replace(path)
    finally:
        with suppress(OSError):
            half.unlink(missing_ok=True)


def events_of(
    rank: int,
    label: str,
    lanes: Sequence[str],
    spans: Sequence[Span],
    groups: Mapping[str, Sequence[int]],
    shift_s: float,
) -> Iterator[Event]:
    """Yield the events of one rank, whose spans must all be closed.

    lanes: dims in the plan's order.
    groups: global ranks by label.
    shift_s: seconds added to all times.
    """
    # Stretches of the program come first, then dims in the plan's order, then any other lanes.
    used = dict.fromkeys(span.lane for span in spans)
    first = [span.lane for span in spans if not span.group]
    tids = {
        lane: tid
        for tid, lane in enumerate(dict.fromkeys([*first, *filter(used.__contains__, lanes), *used]))
    }
    names = [("process", 0, label, rank), *(("thread", tid, lane, tid) for lane, tid in tids.items())]
    for kind, tid, name, order in names:
        about = {"ph": "M", "pid": rank, "tid": tid}
        yield {**about, "name": f"{kind}_name", "args": {"name": name}}
        yield {**about, "name": f"{kind}_sort_index", "args": {"sort_index": order}}
    for number, span in enumerate(spans):
        for event in _slices(span, groups.get(span.group, ()), number, shift_s):
            yield {"pid": rank, "tid": tids[span.lane], **event}


def _slices(span: Span, ranks: Sequence[int], number: int, shift_s: float) -> Iterator[Event]:
    """Yield one slice for a blocking call. For an async call, yield its start, its waits, and a bar from start to end."""
    facts: dict[str, Any] = {"callsite": span.site}
    if span.group:
        facts |= {"group": span.group, "bytes": span.nbytes}
    if span.number:
        facts["number"] = span.number
    if span.shape is not None:
        facts |= {"shape": list(span.shape), "dtype": span.dtype}
    for way, peer, tag, count in span.parts:
        text = f"rank {'?' if peer is None else ranks[peer]}, message {count} with tag {tag}"
        facts.setdefault("to" if way == "send" else "from", []).append(text)
    kind = "program" if not span.group else "message" if span.parts else "collective"
    assert span.left is not None
    over = max([span.left, *(end for _, end in span.waits)])
    # The messages of one call run one after another. The collectives of a list may overlap.
    whole = not span.waits or (span.at_once and bool(span.parts))
    slices = [(span.call, span.began, over, facts)]
    if not whole:
        waits = [(f"wait for {span.call}", *wait, {"callsite": span.site}) for wait in span.waits]
        slices = [(f"start {span.call}", span.began, span.left, facts), *waits]
    for name, began, end, args in slices:
        times = {"ts": (began + shift_s) * 1e6, "dur": max(0.0, (end - began) * 1e6)}
        yield {"ph": "X", "name": name, "cat": kind, **times, "args": args}
    if not whole:
        bar = {"name": f"{span.call} {span.lane}", "cat": "under way", "id": number}
        yield {**bar, "ph": "b", "ts": (span.began + shift_s) * 1e6, "args": facts}
        yield {**bar, "ph": "e", "ts": (over + shift_s) * 1e6}
