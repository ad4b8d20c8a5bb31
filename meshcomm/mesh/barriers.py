"""Barriers of a live mesh, the first use of every group, and one rank in the debugger while the others wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, overload

import torch.distributed as dist

from meshcomm.comm import CommunicatorCache, Handle
from meshcomm.comm.callsite import users_frame
from meshcomm.comm.checks import seconds_of
from meshcomm.comm.flight_recorder import FlightRecorder
from meshcomm.errors import BarrierTimeout, UnsupportedOp
from meshcomm.layout import Dims, Plan
from meshcomm.layout.sizes import fold
from meshcomm.mesh.runtime import Watching
from meshcomm.mesh.topology_queries import TopologyQueries
from meshcomm.mesh.torch_store import GRACE_S, kind_of, prefixed, wait_for, within
from meshcomm.transport.torch_private import outside_graphs


@outside_graphs
class Barriers(TopologyQueries):
    """Barriers, the first use of each group, and a rank in the debugger. `Mesh` has them."""

    plan: Plan
    _at: CommunicatorCache
    _store: dist.Store
    _watch: Watching | None
    _recorders: dict[int, FlightRecorder]

    def __init__(self) -> None:
        self._barriers: dict[str, int] = {}
        self._breakpoints: dict[tuple[str, int], int] = {}
        # What `warm_up` returned last; empty where nobody has called it.
        self.warm_up_s: Mapping[str, float] = {}

    @overload
    def barrier(
        self, dims: Dims | None = ..., *, timeout_s: float | None = ..., async_op: Literal[False] = ...
    ) -> None: ...
    @overload
    def barrier(self, dims: Dims, *, timeout_s: None = ..., async_op: Literal[True]) -> Handle[None]: ...
    @overload
    def barrier(
        self, dims: Dims | None = ..., *, timeout_s: float | None = ..., async_op: bool
    ) -> Handle[None] | None: ...
    def barrier(
        self, dims: Dims | None = None, *, timeout_s: float | None = None, async_op: bool = False
    ) -> Handle[None] | None:
        """Return when every rank along `dims` has come. None: every rank of the mesh, dim by dim.

        timeout_s: meet at the store instead of at the backend; ranks that have not come in time
                   are named by a BarrierTimeout on every rank that has, with the call that each of them
                   is in. Works under NCCL too.
        """
        if timeout_s is not None:
            self._monitored_barrier(dims, timeout_s, async_op)
            return None
        if dims is not None:
            return self._at.along(dims).barrier(async_op)
        if async_op:
            raise UnsupportedOp(
                f"barrier of all ranks on {self.label}: async_op without dims",
                given="dims=None, async_op=True",
                expected="dims, as all ranks meet dim by dim, one after the other",
                hint=f'mesh.barrier("{next(iter(self.layout.dims))}", async_op=True)',
            )
        for name in self.layout.dims:
            self._at[name].barrier()
        return None

    def warm_up(self) -> dict[str, float]:
        """Use every group once, in plan order, so that no later call pays for connecting.

        Called by: every rank of the mesh. On NCCL this also satisfies the rule that the first call
        on a group involves all of its ranks.
        Returns: seconds by name, of this rank; `warm_up_s` keeps them. `warm_up = true` in `[mesh]`
        lets `meshcomm.init` call it.
        """
        self._usable()
        seconds: dict[str, float] = {}
        for family in self.plan.families:
            if family.creates:
                start = time.perf_counter()
                self._at[family.name].barrier()
                seconds[family.name] = time.perf_counter() - start
        self.warm_up_s = seconds
        return dict(seconds)

    def breakpoint(self, *, timeout_s: float = 3600.0, skip: int = 0, **coords: int) -> None:
        """Stop one rank in Python's debugger, at the line of this call; the others wait for it.

        `mesh.breakpoint(dp=0, tp=1)`. Dims that are not named: coord 0. The rank's own stdin is asked.

        Called by:  every rank of the mesh. No group's timeout runs meanwhile: they meet at the store.
        timeout_s:  how long the others wait; then they raise BarrierTimeout.
        skip:       how many of the first calls from this line do nothing.
        Raises:     UnknownDim, LayoutError on every rank; bdb.BdbQuit on the stopped rank after `q`.
        """
        self._usable()
        at = {**dict.fromkeys(self.layout.dims, 0), **coords}
        stopped = self.layout.rank_at(**at)
        frame = users_frame()
        line = (frame.f_code.co_filename, frame.f_lineno)
        self._breakpoints[line] = number = self._breakpoints.get(line, 0) + 1
        if number <= skip:
            return
        if self.rank == stopped:
            from meshcomm.mesh.debugger import stop_at

            stop_at(frame, self.label, lambda: self._monitored_barrier(None, timeout_s, False))
        else:
            self._monitored_barrier(None, timeout_s, False)

    def _monitored_barrier(self, dims: Dims | None, timeout_s: float, async_op: bool) -> None:
        self._usable()
        if async_op:
            raise UnsupportedOp(
                f"barrier on {self.label}: async_op and timeout_s together",
                given=f"timeout_s={timeout_s}, async_op=True",
                expected="one of the two",
                hint="mesh.barrier(dims, timeout_s=...) in a thread of its own",
            )
        timeout_s = seconds_of(timeout_s, lambda: f"barrier on {self.label}")
        along = tuple(self.layout.dims) if dims is None else dims
        # The group is told apart by its first rank; the calls on it are counted.
        ranks = self.ranks(along)
        key = f"{'.'.join(self.layout.expand(along))}/{ranks[0]}"
        self._barriers[key] = number = self._barriers.get(key, 0) + 1
        monitored_barrier(
            prefixed(f"barrier/{key}/{number}", self._store),
            ranks.index(self.rank),
            ranks,
            timeout_s,
            f"barrier along {along if isinstance(along, str) else ', '.join(along)} on {self.label}",
            self._calls_of,
        )

    def _calls_of(self, missing: list[int]) -> str:
        """What ranks that did not come to a barrier do on the groups that they share with this rank, in lines."""
        if self._watch is None:
            return ""
        mine = {recorder.label: recorder.started for recorder in self._recorders.values()}
        lines = []
        for rank, status in sorted(self._watch.statuses(missing).items()):
            for group in status["groups"]:
                ours, theirs = mine.get(group["label"]), group["started"]
                if ours is not None and theirs != ours:
                    last = group["last"] or {}
                    lines.append(
                        f"rank {rank} has made {theirs} calls on {group['label']}, this rank {ours}; "
                        f"its last: {last.get('call', 'none')} at {last.get('callsite', status['main'])}"
                    )
        return "\n".join(lines[:8])


def monitored_barrier(
    store: Any,
    coord: int,
    ranks: list[int],
    timeout_s: float,
    where: str,
    calls_of: Callable[[list[int]], str] = lambda missing: "",
) -> None:
    """Return when every rank of `ranks` has come; after `timeout_s` raise, naming those that have not.

    Works on any backend, NCCL included, as it moves nothing on the device. Costs five store operations
    per rank, where all come at once. The last rank to leave deletes the keys.
    store:    a torch store with a prefix that this call alone uses, the same on every rank.
    coord:    this rank's place in `ranks`.
    calls_of: what to say of the calls of ranks that did not come, in lines.
    Raises BarrierTimeout on every rank that came, also on one that comes after the others gave up; without
    anybody missing where a TCPStore's server was cut off or stopped, and nothing is known of the others.
    """

    def meet() -> list[int] | None:
        return _meet(store, coord, len(ranks), timeout_s)

    try:
        absent = within(timeout_s + 2 * GRACE_S, meet) if kind_of(store) == "TCPStore" else meet()
    except TimeoutError:
        raise BarrierTimeout(
            f"{where}: the job's store has not answered for {timeout_s:g} s",
            given="a TCPStore whose server was cut off, is stopped or is overloaded",
            expected=f"a store that answers; nothing is known of ranks {fold(ranks)}",
            hint="look at rank 0 or the launcher, which holds the store, and at the network between",
        ) from None
    if absent is None:
        return
    missing = [ranks[place] for place in absent]
    came = [rank for rank in ranks if rank not in missing]
    calls = calls_of(missing) if missing else ""
    raise BarrierTimeout(
        f"{where}: {len(missing)} of {len(ranks)} ranks did not come within {timeout_s:g} s",
        given=f"missing: rank {fold(missing)}; came: rank {fold(came)}" + (f"\n{calls}" if calls else "")
        if missing
        else f"came: {fold(came)}; all have come by now, but some gave up before",
        expected=f"ranks {fold(ranks)}",
        hint="ranks that differ in their number of calls: mesh.step() after each step names the call that one left out"
        if calls
        else "look at what the missing ranks are doing; a longer timeout_s helps only if they are slow",
        missing=tuple(missing),
    )


def _meet(store: Any, coord: int, size: int, timeout_s: float) -> list[int] | None:
    """The places of those that have not come in time; None where all have met."""
    store.set(f"here/{coord}", "1")
    if store.add("come", 1) == size:
        # Whoever gave up has left a note; then nobody may go on as if all had met.
        store.compare_set("outcome", "", "all here")
    came_in_time = wait_for(store, ["outcome"], timeout_s)
    outcome = store.get("outcome") if came_in_time else store.compare_set("outcome", "", "gave up")
    absent = (
        None
        if outcome == b"all here"
        else [place for place in range(size) if not store.check([f"here/{place}"])]
    )
    if store.add("left", 1) == size:
        for key in (*(f"here/{place}" for place in range(size)), "come", "outcome", "left"):
            store.delete_key(key)
    return absent
