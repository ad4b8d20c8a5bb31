"""`mesh.debug`: what to use while one looks for a slow rank, a hang or a wrong value."""

from __future__ import annotations

import os
import pdb
import sys
from bdb import BdbQuit
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from os import PathLike
from types import FrameType
from typing import IO, TYPE_CHECKING, final

from meshcomm.comm.callsite import users_frame
from meshcomm.comm.checks import seconds_of
from meshcomm.errors import StoreError, UnsupportedOp
from meshcomm.layout import Dims
from meshcomm.mesh.barriers import calls_of, monitored_barrier
from meshcomm.mesh.runtime import Metrics
from meshcomm.mesh.store import prefixed
from meshcomm.transport.torch_private import outside_graphs

if TYPE_CHECKING:
    from meshcomm.mesh.all_ranks import StatsOfAll, Stragglers
    from meshcomm.mesh.mesh import Mesh
    from meshcomm.mesh.tracing import Trace


@final
@outside_graphs
class Debug:
    """Tools that show what the ranks of a mesh do."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def breakpoint(self, *, timeout_s: float = 3600.0, skip: int = 0, **coords: int) -> None:
        """Stop one rank in the Python debugger at the line of this call, while the other ranks wait.

        In `mesh.debug.breakpoint(dp=0, tp=1)`, unnamed dims default to coord 0. The debugger reads from the
        stdin of the stopped rank.

        Called by:  every rank of the mesh. The ranks wait on the store, so no group timeout applies.
        timeout_s:  how long the other ranks wait before they raise BarrierTimeout.
        skip:       number of calls at this line to ignore before stopping.
        Raises:     UnknownDim, LayoutError on every rank; bdb.BdbQuit on the stopped rank after `q`.
        """
        state = self._mesh._state
        state.usable()
        stopped = state.layout.get_rank(**{**dict.fromkeys(state.layout.dims, 0), **coords})
        frame = users_frame()
        line = (frame.f_code.co_filename, frame.f_lineno)
        state.breakpoints[line] += 1
        if state.breakpoints[line] <= skip:
            return
        meet = partial(self.monitored_barrier, timeout_s=timeout_s)
        if state.rank == stopped:
            _stop_at(frame, state.label, meet)
        else:
            meet()

    def monitored_barrier(self, dims: Dims | None = None, *, timeout_s: float) -> None:
        """Block until every rank along `dims` has arrived, or until the timeout.

        The ranks synchronize through the store instead of the backend, so this also works with NCCL.

        dims:      the dims to synchronize along. If None, all ranks of the mesh synchronize.
        Called by: every rank along `dims`, in the same program order.
        Raises:    BarrierTimeout on every rank that has arrived, with the missing ranks and the call that each of them is
                   executing.
        """
        state = self._mesh._state
        state.usable()
        timeout_s = seconds_of(timeout_s, lambda: f"barrier on {state.label}")
        along = tuple(state.layout.dims) if dims is None else dims
        # The first rank identifies the group. Barriers are numbered per group.
        ranks = self._mesh.ranks(along)
        key = f"{'.'.join(state.layout.expand(along))}/{ranks[0]}"
        state.barriers[key] += 1
        try:
            monitored_barrier(
                prefixed(f"mesh/barrier/{key}/{state.barriers[key]}", state.runtime.store),
                ranks.index(state.rank),
                ranks,
                timeout_s,
                f"barrier along {along if isinstance(along, str) else ', '.join(along)} on {state.label}",
                partial(calls_of, state.watch, state.metrics.recorders),
            )
        except (RuntimeError, StoreError) as error:
            if (lost := state.lost(error)) is not None:
                raise lost from error
            raise

    def stragglers(self) -> Stragglers:
        """Return, for each dim, which ranks were late to start the last 256 collectives of their group.

        The result prints as a table. Under NCCL, a call starts when the host enqueues it.

        Called by: every rank of the mesh.
        """
        from meshcomm.mesh.all_ranks import stragglers

        mesh = self._mesh
        mesh._state.usable()
        names = [family.name for family in mesh.plan.families if family.size > 1]
        # Names of the same group share one recorder. Keep only the first name.
        first = {id(mesh._at[name].recorder): name for name in reversed(names)}
        named = {name: mesh._at[name].recorder for name in names if name in first.values()}
        return stragglers(mesh, named)

    def global_stats(self) -> StatsOfAll:
        """Return `mesh.stats()` summed over all ranks, with the fastest and the slowest rank.

        Called by: every rank of the mesh, in the same program order.
        """
        from meshcomm.mesh.all_ranks import of_every_rank, stats_of_all

        mesh, own = self._mesh, self._mesh.stats()
        records = of_every_rank(mesh, (mesh.rank, own.seconds, own.sums))
        return stats_of_all(records, [family.name for family in mesh.plan.families])

    def trace(self, path: str | PathLike[str]) -> Trace:
        """Record every call in a `with mesh.debug.trace("trace.json"):` block in one file for all ranks.

        The trace keeps up to 200,000 calls per rank. Open the file in Perfetto or chrome://tracing, which show a
        process for each rank and a track for each dim. The first rank of the mesh writes the file. If the block
        raises, each rank that raised writes its own calls: rank 3 writes trace.rank3.json.

        Called by: every rank of the mesh, around the same part of the program.
        Raises:    UnsupportedOp inside another trace, and in the simulator, whose ranks run one at a time.
                   After the block: TrainingError if the file cannot be written, CommunicationError if some
                   ranks do not arrive.
        """
        state = self._mesh._state
        state.usable()
        if state.watch is not None and not state.watch.timed:
            raise UnsupportedOp(
                f"no trace of simulated ranks, requested on {state.label}",
                given="mesh.debug.trace in the simulator, whose ranks run one at a time",
                expected="processes, whose times are meaningful",
                hint="meshcomm run CONFIG script.py; mesh.stats() works in the simulator too",
            )
        from meshcomm.mesh.tracing import Trace

        return Trace(self._mesh, path)

    # -- for the package's own code ----------------------------------------------------------------

    @property
    def metrics(self) -> Metrics:
        """The records of this rank's calls, which a trace or a count reads."""
        return self._mesh._state.metrics

    def without_calls(self) -> AbstractContextManager[None]:
        """In this context, calls on this rank raise MeshClosed, because other ranks do not make them."""
        return self._mesh._state.without_calls()


def _stop_at(frame: FrameType, label: str, meet: Callable[[], None]) -> None:
    """Open the debugger at `frame`. Afterwards, release the waiting ranks and continue.

    meet: called once, after any command except quit. After `n`, `s` or another stepping command, the debugger
        stops again at the frame's next line, while the other ranks continue and wait in their next call.
    Raises BdbQuit after `q`, or if there is no input to read (no terminal, or end of file).
    """
    debugger = _Debugger(stdin=_terminal())
    debugger.message(f"{label} stopped; the others wait until it continues. c: continue, n: step, q: end")
    debugger.reset()
    debugger.interaction(frame, None)
    if debugger.quitting:
        raise BdbQuit
    meet()
    if not debugger.goes_on:
        # This must be the last call in the function, so that the next line to run in a traced frame is the user's.
        debugger.set_trace(frame)


@final
class _Debugger(pdb.Pdb):
    """A pdb that records whether the user chose to continue."""

    goes_on = False

    def set_continue(self) -> None:
        """After `c`."""
        self.goes_on = True
        super().set_continue()

    def set_stepinstr(self) -> None:
        """Called by set_trace since Python 3.13. The next instruction is still on the line of the user's call."""
        self.set_step()


def _terminal() -> IO[str] | None:
    """Return the process's original stdin if sys.stdin was replaced, as by multiprocessing, or None to use sys.stdin."""
    replaced = sys.stdin is None or getattr(sys.stdin, "name", "") == os.devnull
    return open(0, closefd=False) if replaced else None
