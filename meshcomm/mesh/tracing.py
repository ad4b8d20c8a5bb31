"""`mesh.trace(...)`: what every rank did inside a block, brought together in one file."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from os import PathLike
from pathlib import Path
from time import perf_counter as clock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from meshcomm.comm.lateness import host
from meshcomm.comm.spans import Span, Spans
from meshcomm.errors import MeshcommError, StoreError, UnsupportedOp
from meshcomm.mesh.chrome import Part, TraceFile
from meshcomm.mesh.store import MeshStore

if TYPE_CHECKING:
    from meshcomm.mesh.accounts import Accounts

_PER_CHUNK: Final = 5000  # calls
_PINGS: Final = 5
# Beside the mesh's timeout, for each rank whose turn comes before.
_EACH_S: Final = 0.2


class _Head(NamedTuple):
    """What a rank says first. host: equal for ranks that share a clock; opened: by its own clock."""

    host: int
    opened: float
    calls: int
    dropped: int


@final
class Trace:
    """A block in which every call of this rank along the mesh is kept; see `Mesh.trace`.

    path: of the file. dropped: calls of this rank that were too many to keep; known after the block.
    """

    def __init__(self, mesh: Accounts, path: str | PathLike[str], store: MeshStore) -> None:
        self.path = Path(path)
        self.dropped = 0
        self._mesh = mesh
        self._store = store
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
        return self._spans.stretch(lane, name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        closed = clock()
        self._mesh.trace_into(None)
        self.dropped = self._spans.dropped
        groups = self._mesh.groups_by_label
        mine = _Plain(self._spans.found, closed, groups)
        if error is not None:
            # The others may never come: what this rank did stands alone.
            self._alone(mine)
            return
        ranks = [int(rank) for rank in self._mesh.layout.ranks.flatten()]
        head = _Head(host(), self._opened, len(mine.spans), self.dropped)
        if self._mesh.rank == ranks[0]:
            self._write(ranks, head, mine)
        else:
            self._tell(ranks, head, mine)

    # -- a rank that does not write ---------------------------------------------------------------

    def _tell(self, ranks: list[int], head: _Head, mine: _Plain) -> None:
        rank, place = self._mesh.rank, ranks.index(self._mesh.rank)
        within_s = self._store.timeout + _EACH_S * len(ranks)
        self._store.set(f"head/{rank}", json.dumps(head))
        for number in range(json.loads(self._store.get(f"pings/{rank}", within_s))):
            sent = clock()
            self._store.set(f"ping/{rank}/{number}", "")
            told = float(self._store.get(f"pong/{rank}/{number}", within_s))
            self._store.set(f"took/{rank}/{number}", json.dumps([sent, told, clock()]))
        # One after the other, so that the store holds the calls of one rank at most.
        problem = self._store.get(f"turn/{rank}", within_s + _EACH_S * place).decode()
        if problem:
            raise _unwritten(self.path, problem)
        for number, chunk in enumerate(mine.chunks()):
            self._store.set(f"part/{rank}/{number}", chunk)
        problem = self._store.get("done", within_s).decode()
        if problem:
            raise _unwritten(self.path, problem)

    # -- the rank that writes -----------------------------------------------------------------------

    def _write(self, ranks: list[int], head: _Head, mine: _Plain) -> None:
        within_s = self._store.timeout
        heads = {ranks[0]: head}
        for rank in ranks[1:]:
            heads[rank] = _Head(*json.loads(self._store.get(f"head/{rank}", within_s)))
        ahead, errors = {ranks[0]: 0.0}, {}
        for rank in ranks[1:]:
            far = heads[rank].host != head.host
            self._store.set(f"pings/{rank}", json.dumps(_PINGS if far else 0))
            ahead[rank], error_s = self._ahead(rank, within_s) if far else (0.0, 0.0)
            if far:
                errors[str(rank)] = error_s
        origin = min(heads[rank].opened + ahead[rank] for rank in ranks)
        problem = ""
        try:
            with TraceFile(self.path) as file:
                for rank in ranks:
                    file.add(self._part(rank, ahead[rank] - origin, self._calls(rank, mine, heads[rank])))
                file.finish(
                    {
                        "meshcomm": dict(self._mesh.dims),
                        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                        "dropped": {str(r): heads[r].dropped for r in ranks if heads[r].dropped},
                        "clock_error_s": errors,
                    }
                )
        except OSError as error:
            problem = str(error)
            for rank in ranks[1:]:
                self._store.set(f"turn/{rank}", problem)
        self._store.set("done", problem)
        if problem:
            raise _unwritten(self.path, problem)

    def _calls(self, rank: int, mine: _Plain, head: _Head) -> list[list[Any]]:
        if rank == self._mesh.rank:
            return mine.all()
        self._store.set(f"turn/{rank}", "")
        found: list[list[Any]] = []
        for number in range(-(-head.calls // _PER_CHUNK)):
            key = f"part/{rank}/{number}"
            found += json.loads(zlib.decompress(self._store.get(key)))
            self._store.delete_key(key)
        return found

    def _ahead(self, rank: int, within_s: float) -> tuple[float, float]:
        """Seconds to add to that rank's clock for this one's, and how far that may be off."""
        found = []
        for number in range(_PINGS):
            self._store.get(f"ping/{rank}/{number}", within_s)
            self._store.set(f"pong/{rank}/{number}", repr(clock()))
            sent, told, back = json.loads(self._store.get(f"took/{rank}/{number}", within_s))
            found.append(((back - sent) / 2, told - (sent + back) / 2))
        # The quickest way there and back leaves least in doubt: Cristian 1989.
        error_s, ahead = min(found)
        return ahead, error_s

    def _part(self, rank: int, shift_s: float, calls: list[list[Any]]) -> Part:
        layout = self._mesh.layout
        coords = " ".join(f"{dim}={coord}" for dim, coord in layout.coords(rank).items())
        lanes = [family.name for family in self._mesh.plan.families]
        return Part(rank, f"rank {rank} ({coords})", lanes, shift_s, calls)

    def _alone(self, mine: _Plain) -> None:
        path = self.path.with_suffix(f".rank{self._mesh.rank}{self.path.suffix}")
        try:
            with TraceFile(path) as file:
                file.add(self._part(self._mesh.rank, -self._opened, mine.all()))
                file.finish({"meshcomm": dict(self._mesh.dims), "alone": True})
        except OSError:
            # The error that ended the block must not be hidden.
            return


class _Plain(NamedTuple):
    """Spans that become plain data when they are asked for, as there may be many."""

    spans: list[Span]
    closed: float
    groups: Mapping[str, list[int]]

    def all(self) -> list[list[Any]]:
        return [_plain(span, self.closed, self.groups) for span in self.spans]

    def chunks(self) -> Iterator[bytes]:
        for first in range(0, len(self.spans), _PER_CHUNK):
            part = self.spans[first : first + _PER_CHUNK]
            plain = [_plain(span, self.closed, self.groups) for span in part]
            yield zlib.compress(json.dumps(plain).encode(), 1)


def _plain(span: Span, closed: float, groups: Mapping[str, list[int]]) -> list[Any]:
    """As JSON can hold it, in the order of meshcomm.mesh.chrome.Call."""
    left = closed if span.left is None else span.left
    shape = None if span.shape is None else list(span.shape)
    ranks = groups.get(span.group, [])
    messages = [
        [way == "send", None if peer is None else ranks[peer], tag, number]
        for way, peer, tag, number in span.parts
    ]
    waits = [list(wait) for wait in span.waits]
    head = [span.group, span.lane, span.call, span.number, span.site, span.began, left]
    return [*head, span.nbytes, shape, span.dtype, waits, span.at_once, messages]


def _unwritten(path: Path, problem: str) -> MeshcommError:
    return StoreError(
        f"the trace {path} could not be written",
        given=problem,
        expected="a path on the first rank's host that can be written",
        hint='mesh.trace("trace.json")',
    )
