"""Calls that have passed every check once and need no preparation: made again without asking again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sys import _getframe as frame_at
from time import perf_counter as clock
from typing import Any, Protocol, TypeAlias, final

import torch
from torch import Tensor

from meshcomm.comm.handle import Handle
from meshcomm.comm.ledger import Later, Total, total_of
from meshcomm.comm.recorder import KEPT, Recorder
from meshcomm.comm.site import is_ours, place_of_call
from meshcomm.errors import CommunicationError
from meshcomm.transport.profile import profiling

# The transport's call, its last argument, where the call is counted, and remembered.
Ready: TypeAlias = tuple[Callable[..., Any], Any, Total, Recorder]
Found: TypeAlias = tuple[Callable[..., Any], Any]


class Caller(Protocol):
    """A communicator: opens the text of an error about a call, and makes that of one the backend gave up on."""

    def where(self, call: str) -> str: ...

    def failed(self, call: str, error: BaseException) -> CommunicationError: ...


@final
class Straight:
    """The prepared calls of one communicator, by what they are and by dtype.

    Most of what a checked call costs is asking: is it a tensor, of which kind, does it need gradients, does
    it divide, what will the line be called if it fails. Of a call that was made before with the same
    operation and dtype only what may differ is asked again, and the rest is the backend's own call.

    ready: by the call's name and what else it is prepared for. all_reduces: of the usual all_reduce, by op alone.
    """

    # Nothing that leads back to the communicator: it and its group have to go with their last reference.
    __slots__ = ("_name", "_recorder", "all_reduces", "ready")

    def __init__(self, name: str, recorder: Recorder) -> None:
        self._name = name
        self._recorder = recorder
        self.ready: dict[tuple[object, ...], dict[torch.dtype, Ready]] = {}
        # What a user gives as op must not find another call.
        self.all_reduces: dict[str, dict[torch.dtype, Ready]] = {}
        recorder.quick += [self.ready, self.all_reduces]

    def keep(self, key: tuple[str, *tuple[object, ...]], dtype: torch.dtype, found: Found | None) -> None:
        """Make `key` calls of dense tensors of `dtype` by `found` from now on; None changes nothing."""
        if found is not None:
            self.ready.setdefault(key, {})[dtype] = self._counted(key[0], found)

    def keep_all_reduce(self, op: str, dtype: torch.dtype, found: Found) -> None:
        """`keep`, for blocking all_reduces."""
        self.all_reduces.setdefault(op, {})[dtype] = self._counted("all_reduce", found)

    def _counted(self, call: str, found: Found) -> Ready:
        return (*found, total_of(self._recorder.totals, self._name, call), self._recorder)

    def find(self, key: tuple[str, *tuple[object, ...]], x: Tensor) -> Ready | None:
        """What `keep` was given, where `x` is a tensor that it will do for."""
        try:
            ready = self.ready[key][x.dtype]
            if (
                type(x) is Tensor
                and not x.requires_grad
                and x.is_contiguous()
                and not x.is_neg()
                and not profiling()
            ):
                return ready
        except (KeyError, AttributeError, TypeError, RuntimeError):
            # Not prepared, or no tensor, or one of another kind: whoever checks will say what it is.
            pass
        return None

    def go(self, by: Caller, ready: Ready, nbytes: int, x: Tensor, *given: object) -> None:
        """Make the call, remembered and counted as Recorder.start and .end do it."""
        start, options, total, recorder = ready
        frame: Any = frame_at(3)
        while is_ours(frame.f_code.co_filename) and frame.f_back is not None:
            frame = frame.f_back
        recorder.started = number = recorder.started + 1
        place = number % KEPT
        recorder.under_way = x
        began = clock()
        recorder.ring[place] = (total, nbytes, frame.f_code, frame.f_lasti, began)
        try:
            work = start(*given, options)
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise by.failed(total.call, error) from error
        recorder.left[place] = left = clock()
        recorder.under_way = None
        total.calls += 1
        total.nbytes += nbytes
        total.seconds += left - began

    def start(self, by: Caller, ready: Ready, nbytes: int, x: Tensor, *given: object) -> Handle[Tensor]:
        """Start the call, whose result is `x`, remembered as Recorder.start and .later do it."""
        start, options, total, recorder = ready
        place = place_of_call(4)
        recorder.started = number = recorder.started + 1
        recorder.under_way = x
        began = clock()
        recorder.ring[number % KEPT] = (total, nbytes, *place, began)
        try:
            work = start(*given, options)
        except RuntimeError as error:
            raise by.failed(total.call, error) from error
        recorder.left[number % KEPT] = left = clock()
        recorder.under_way = None
        call = total.call
        return Handle(
            (work,),
            lambda: x,
            lambda: by.where(call),
            fail=lambda error: by.failed(call, error),
            later=Later(total, nbytes, began, left),
            place=place,
        )


def fits(out: Tensor, shape: Sequence[int], like: Tensor) -> bool:
    """Whether bytes can be received into `out` as it is: dense, of this shape, and else like `like`."""
    return (
        type(out) is Tensor
        and out.shape == shape
        and out.dtype is like.dtype
        # Of two kinds of device that have no number one is refused by the backend.
        and out.get_device() == like.get_device()
        and not out.requires_grad
        and out.is_contiguous()
        and not out.is_neg()
    )


def along_first(sizes: Sequence[int], first: int) -> tuple[int, ...]:
    """`sizes` with another first one."""
    return (first,) if len(sizes) == 1 else (first, *sizes[1:])
