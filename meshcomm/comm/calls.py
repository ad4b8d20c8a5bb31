"""What do all calls along a dim have in common: checks at the door, the record, the comparison, the wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter as clock
from typing import Self, TypeVar

import torch
from torch import Tensor

from meshcomm.comm.checks import check_divisible, check_in_place, check_tensor, check_written, normal_axis
from meshcomm.comm.handle import Handle, failure
from meshcomm.comm.ledger import total_of
from meshcomm.comm.messages import Messages
from meshcomm.comm.recorder import Recorder
from meshcomm.comm.shapes import split
from meshcomm.comm.straight import Straight
from meshcomm.comm.validation import CallCheck
from meshcomm.errors import MeshcommError, ShapeError
from meshcomm.transport import Transport, Work
from meshcomm.transport.profile import labelled, profiling
from meshcomm.transport.support import name_of

T = TypeVar("T")


class Calls:
    """One group as its collectives see it; see Communicator, which has them.

    Args:
        name: the dim or dims, as errors show them.
        transport: the group.
        who: this rank with its coords, for errors, as in `rank 5 (pp=1 dp=0 tp=1)`.
        calls: compares the first calls on this group between its ranks.
        recorder: remembers the calls on this group, and knows whom to ask when one fails.
    """

    __slots__ = (
        "_calls",
        "_kinds",
        "_later",
        "_ready",
        "_straight",
        "coord",
        "messages",
        "name",
        "recorder",
        "size",
        "transport",
        "who",
    )

    def __init__(
        self,
        name: str,
        transport: Transport,
        who: str,
        calls: CallCheck | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.name = name
        self.recorder = recorder or Recorder(name, [], lambda _, where, error: failure(where, error))
        # None once there is nothing left to compare: what is off costs nothing.
        self._calls = calls
        self.transport = transport
        self.size = transport.size
        self._kinds = transport.kinds
        self.coord = transport.coord
        self.who = who
        self._straight = Straight(name, self.recorder)
        self.messages = Messages(name, transport, who, self.recorder, self._straight)
        self._ready = self._straight.all_reduces
        self._later = self._straight.later

    @property
    def _settled(self) -> bool:
        """Whether calls are no longer compared, and nobody asks for each of them."""
        return self._calls is None and self.recorder.spans is None

    def _door(self, x: Tensor, call: str, functional: str) -> None:
        check_tensor(x, self._kinds, lambda: self.where(call))
        check_in_place(x, lambda: self.where(call), functional)

    def where(self, call: str) -> str:
        return f'{call} along "{self.name}" on {self.who}'

    def failed(self, call: str, error: BaseException) -> MeshcommError:
        """The error for a call that the backend gave up on."""
        found = self.recorder.inquire(self.recorder, self.where(call), error)
        self.recorder.end()
        return found

    def _begin(
        self, call: str, x: Tensor | None = None, *, moves: Tensor | None = None, **facts: object
    ) -> None:
        """Remember the call, and tell the other ranks of it while calls are still compared.

        moves: what moves, where x only stands for what is compared.
        """
        self.recorder.start(self.name, call, x if moves is None else moves, 3)
        if self._calls is None:
            return
        if not self._calls.active:
            self._calls = None
            return
        if x is not None:
            facts = {"shape": list(x.shape), "dtype": name_of(x.dtype), **facts}
        try:
            self._calls.compare(self.name, call, facts)
        except MeshcommError:
            self.recorder.refuse()
            self.recorder.end()
            raise
        except RuntimeError as error:
            raise self.failed(call, error) from error

    def _parts(self, x: Tensor, axis: int, call: str) -> Tensor:
        """`x` as (size, ...), the slices of `axis` in front, contiguous."""
        axis = normal_axis(x, axis, lambda: self.where(call))
        check_divisible(x, axis, self.size, lambda: self.where(call), lambda: self.who)
        return split(x, axis, self.size)

    def result_for(
        self, out: Tensor | None, shape: Sequence[int], dtype: torch.dtype, like: Tensor, call: str
    ) -> Tensor:
        """`out` where it fits, else new memory where there is none."""
        if out is None:
            return like.new_empty(tuple(shape), dtype=dtype)
        self.writes(out, call)
        if tuple(out.shape) != tuple(shape) or out.dtype != dtype or out.device != like.device:
            raise ShapeError(
                f"{self.where(call)}: out does not fit the result",
                given=f"out of shape {tuple(out.shape)}, {out.dtype}, {out.device}",
                expected=f"shape {tuple(shape)}, {dtype}, {like.device}",
                hint=f"out=x.new_empty({tuple(shape)}), or no out",
            )
        return out

    def misfit(self, out: Tensor, shape: Sequence[int], like: Tensor, call: str) -> MeshcommError | None:
        """Why a result of this shape cannot be put into `out`; None where it can."""
        try:
            self.result_for(out, shape, like.dtype, like, call)
        except MeshcommError as error:
            return error
        return None

    def writes(self, out: Tensor, call: str) -> None:
        """Refuse an `out` that nothing can be received into, of whatever shape."""
        check_tensor(out, self._kinds, lambda: f"{self.where(call)}: out")
        check_in_place(out, lambda: self.where(call), call)
        check_written(out, lambda: f"{self.where(call)}: out")

    def run(
        self, call: str, start: Callable[[bool], Work], finish: Callable[[], T], async_op: bool
    ) -> T | Handle[T]:
        try:
            if profiling():
                with labelled(f"meshcomm::{call} {self.name}{self.recorder.plan}"):
                    work = start(not async_op)
                    if not async_op and work is not None:
                        work.wait()
            else:
                work = start(not async_op)
                if not async_op and work is not None:
                    work.wait()
        except RuntimeError as error:
            raise self.failed(call, error) from error
        if async_op:
            return Handle((work,), self, call, finish, later=self.recorder.later())
        self.recorder.end()
        return finish()

    @contextmanager
    def named(self, call: str, group: bool = True) -> Iterator[tuple[Self, Callable[[int], None]]]:
        """Make one call of several: it is recorded and counted as `call`, its parts are not.

        Yields what makes the parts, a communicator whose calls are not compared and may have the library's own
        tags, and a function that is told how many bytes the call moves.
        group: whether every rank of the group makes the call, so that it has a number among the group's calls.
        """
        recorder = self.recorder
        total = total_of(recorder.totals, self.name, call)
        where, began, moved = self.where(call), clock(), [0]
        parts = Recorder(
            recorder.label, recorder.ranks, lambda _, __, error: recorder.inquire(recorder, where, error)
        )
        parts.messages = recorder.messages
        parts.under_way = True
        if group:
            recorder.start(self.name, call, None, 3)
        try:
            yield (
                type(self)(self.name, self.transport, self.who, None, parts),
                recorder.is_of if group else moved.append,
            )
        finally:
            if group:
                recorder.end()
            else:
                total.calls += 1
                total.nbytes += moved[-1]
                total.seconds += clock() - began
