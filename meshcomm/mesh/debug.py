"""`mesh.debug`: what to use while one looks for a slow rank, a hang or a wrong value."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, final

from meshcomm.comm.checks import seconds_of
from meshcomm.errors import StoreError, UnsupportedOp
from meshcomm.layout import Dims
from meshcomm.mesh.barriers import calls_of, monitored_barrier
from meshcomm.mesh.runtime import Metrics
from meshcomm.rendezvous.store import prefixed
from meshcomm.transport.torch_private import outside_graphs
from meshcomm.watching.callsite import users_frame

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
            from meshcomm.mesh.debugger import stop_at

            stop_at(frame, state.label, meet)
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
                prefixed(f"mesh/barrier/{key}/{state.barriers[key]}", state.held.store),
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

        mesh, of_rank = self._mesh, self._mesh.stats()
        records = of_every_rank(mesh, (mesh.rank, of_rank.seconds, of_rank.sums))
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

    @contextmanager
    def without_calls(self) -> Iterator[None]:
        """In this context, calls on this rank raise MeshClosed, because other ranks do not make them."""
        state = self._mesh._state
        state.usable()
        self._mesh._at.clear()
        state.closed = True
        try:
            yield
        finally:
            state.closed = False
