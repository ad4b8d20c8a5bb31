"""How do all ranks of a mesh come together: at a barrier, at each group once, where one of them is stopped?"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Literal, overload

import torch.distributed as dist

from meshcomm.comm import Directory, Handle
from meshcomm.comm.checks import seconds_of
from meshcomm.comm.site import users_frame
from meshcomm.errors import UnsupportedOp
from meshcomm.layout import Dims, Plan
from meshcomm.mesh.barrier import meet_at_store
from meshcomm.mesh.whereabouts import Whereabouts
from meshcomm.mesh.worlds import prefixed


class Meetings(Whereabouts):
    """Barriers, the first use of each group, and a rank in the debugger. `Mesh` has them."""

    plan: Plan
    _at: Directory
    _store: dist.Store

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
                   are named by a BarrierTimeout on every rank that has. Works under NCCL too.
        """
        if timeout_s is not None:
            self._roll_call(dims, timeout_s, async_op)
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

    def _roll_call(self, dims: Dims | None, timeout_s: float, async_op: bool) -> None:
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
        digits = self.layout.digits(along)
        # The group is told apart by its first rank; the calls on it are counted.
        ranks = self.ranks(along)
        key = f"{'.'.join(self.layout.expand(along))}/{ranks[0]}"
        self._barriers[key] = number = self._barriers.get(key, 0) + 1
        meet_at_store(
            prefixed(f"barrier/{key}/{number}", self._store),
            digits.coord(self.layout.position(self.rank)),
            ranks,
            timeout_s,
            f"barrier along {along if isinstance(along, str) else ', '.join(along)} on {self.label}",
        )

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

            stop_at(frame, self.label, lambda: self._roll_call(None, timeout_s, False))
        else:
            self._roll_call(None, timeout_s, False)
