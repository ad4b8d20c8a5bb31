"""What a mesh knows of its calls over time: steps, sums, stragglers, traces."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from os import PathLike
from typing import TYPE_CHECKING

import torch

from meshcomm.comm import CommunicatorCache
from meshcomm.comm.callsite import callsite
from meshcomm.comm.flight_recorder import FlightRecorder
from meshcomm.comm.objects import Objects
from meshcomm.comm.spans import Spans
from meshcomm.errors import UnsupportedOp
from meshcomm.layout import Dims, Plan
from meshcomm.layout.sizes import whole
from meshcomm.mesh.runtime import Watching
from meshcomm.mesh.topology_queries import TopologyQueries
from meshcomm.transport.torch_private import outside_graphs

if TYPE_CHECKING:
    from meshcomm.config import TopologyConfig
    from meshcomm.mesh.compare_ranks import StatsOfAll, Stragglers
    from meshcomm.mesh.stats import Stats
    from meshcomm.mesh.tracing import Trace


@outside_graphs
class Metrics(TopologyQueries):
    """The part of `Mesh` that tells of its calls over time."""

    plan: Plan
    _topology: Callable[[], TopologyConfig]
    objects: Objects
    device: torch.device
    _at: CommunicatorCache
    _watch: Watching | None

    def __init__(self) -> None:
        # By the group's transport: names that share a group share its record.
        self._recorders: dict[int, FlightRecorder] = {}
        self._opened = time.perf_counter()
        # Steps that are over, and what the program called the last one.
        self._steps = self._numbered = 0
        # What takes every call, while a trace is taken.
        self.spans: Spans | None = None

    def stragglers(self) -> Stragglers:
        """Who comes last to the calls that the ranks make together, by dim.

        Looks at the last 256 collectives on each group, at when each rank began them. Under NCCL that
        is when the host enqueued the call. Messages are not counted.

        Called by: every rank of the mesh. Returns: this rank's groups, and by dim the latest rank of
        the whole mesh; prints as a table.
        """
        from meshcomm.mesh.compare_ranks import stragglers

        self._usable()
        named: dict[str, FlightRecorder] = {}
        for family in self.plan.families:
            recorder = self._at[family.name].recorder
            if family.size > 1 and recorder not in named.values():
                named[family.name] = recorder
        dims = [dim for dim, size in self.layout.dims.items() if size > 1]
        return stragglers(named, dims, self.objects.all_gather)

    def step(self, number: int | None = None, *, apart: Sequence[Dims] = ()) -> int:
        """One step of the program is over: by now each rank of a group has begun the same collectives on it.

        Sends nothing and takes microseconds. Beside the program, ranks compare what they called in which
        step: a call, or a whole step, that one of them left out among equal ones or made once too often shows nowhere
        else. A whole step is found by its number.
        docs/guide/hangs.md says what is compared and how soon.

        Called by: every rank of the mesh, at the same point of the program.
        number:    what the program calls the step, equal on all ranks; None: one more than the last, from 1.
        apart:     names whose groups other threads of this rank call on at a pace of their own: not compared.
        Returns:   the number.
        Raises:    CallMismatchError on every rank of a group whose ranks differ in this step or one
                   before, as soon as that is known; calls that fail meanwhile and `close` raise it too.
        """
        self._usable()
        if number is None:
            number = self._numbered + 1
        else:
            number = whole(number, "step")
        excluded = {id(self._at[dims].recorder) for dims in apart}
        self._steps += 1
        self._numbered = number
        here = callsite(1)
        for recorder in self._recorders.values():
            recorder.note(self._steps, number, id(recorder) in excluded, here)
        if self.spans is not None:
            self.spans.step(number)
        if self._watch is not None:
            self._watch.noted(self._steps)
        return number

    def stats(self) -> Stats:
        """Calls, bytes and seconds of this rank since the mesh was opened, by dim and call.

        Counted always: collectives, messages and objects along dims of size 2 or more that are made
        through the mesh; from torch 2.14 on also what torch does by itself on `group` or `device_mesh`,
        FSDP and pipelining among it, as `all_gather (torch)` without its time. Where [topology] says how fast the links are, with what the model predicts. Prints as a
        table; `after.since(before)` is what came between two of them. Asks no other rank.

        Seconds are those that the program was blocked in calls. On devices other than cpu, and on groups of NCCL, a
        call returns when it is enqueued, so they are None there, and "-" in the table.
        """
        self._usable()
        from meshcomm.mesh.stats import stats
        from meshcomm.predict.machine import machine

        timed = self.device.type == "cpu"
        counters = [(each.counters, timed and not each.ordered) for each in self._recorders.values()]
        seconds = time.perf_counter() - self._opened
        return stats(self.label, seconds, counters, self.plan, machine(self._topology()))

    def stats_of_all_ranks(self) -> StatsOfAll:
        """As `stats`, summed up over all ranks, with the fastest and the slowest of them.

        Called by: every rank of the mesh, in the same program order.
        """
        from meshcomm.mesh.compare_ranks import records_of_all, stats_of_all

        own = self.stats()
        record = self.rank, own.seconds, own.sums
        records = records_of_all(self.objects.all_gather, self.layout.dims, record)
        return stats_of_all(records, [family.name for family in self.plan.families])

    def trace(self, path: str | PathLike[str]) -> Trace:
        """`with mesh.trace("trace.json"):` keeps every call of the block and makes one file of all ranks.

        The file is for Perfetto or chrome://tracing: a lane for each rank and dim, arrows from senders to
        receivers. After the block the first rank of the mesh has written it, and all ranks go on; 200,000
        calls of a rank are kept at most. Where the block raises, each rank that left it so writes a file
        of its own, trace.rank3.json. Calls cost some microseconds more inside.

        Called by: every rank of the mesh, for the same part of the program.
        Raises:    UnsupportedOp inside another trace, or in the simulator, whose ranks take turns; after the block
                   StoreError where the file cannot be written, CommunicationError for ranks that do not come.
        """
        self._usable()
        if self._watch is not None and not self._watch.timed:
            raise UnsupportedOp(
                f"no trace of simulated ranks, asked for on {self.label}",
                given="mesh.trace in the simulator, whose ranks run one at a time",
                expected="processes, whose times mean something",
                hint="meshcomm run CONFIG script.py; mesh.stats() counts in the simulator too",
            )
        from meshcomm.mesh.tracing import Trace

        return Trace(self, path)

    def trace_into(self, spans: Spans | None) -> None:
        """For Trace: tell `spans` of every call from now on; None: nobody."""
        self.spans = spans
        for recorder in self._recorders.values():
            recorder.trace(spans)

    @property
    def groups_by_label(self) -> dict[str, list[int]]:
        """The global ranks of this rank's groups, by label as errors show it."""
        return {recorder.label: recorder.ranks for recorder in self._recorders.values()}
