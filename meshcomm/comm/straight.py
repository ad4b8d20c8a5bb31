"""Calls that have passed every check once and need no preparation: made again without asking again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sys import _getframe as frame_at
from time import perf_counter as clock
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor

from meshcomm.comm.handle import Caller, Handle
from meshcomm.comm.ledger import Later, Total, total_of
from meshcomm.comm.recorder import KEPT, Recorder
from meshcomm.comm.site import is_ours
from meshcomm.transport.profile import profiling

# The transport's call, its last argument, where the call is counted, and remembered, and for which device.
Ready: TypeAlias = tuple[Callable[..., Any], Any, Total, Recorder, torch.device]
Found: TypeAlias = tuple[Callable[..., Any], Any]

STRIDED: Final = torch.strided


@final
class Straight:
    """The prepared calls of one communicator, by what they are and by dtype.

    Most of what a checked call costs is asking: is it a tensor, of which kind, does it need gradients, does
    it divide, what will the line be called if it fails. Of a call that was made before with the same
    operation and dtype only what may differ is asked again, and the rest is the backend's own call.

    ready: by the call's name and what else it is prepared for; for messages see comm/straight_messages.py.
    all_reduces: of blocking ones, by op alone. later: of those that are only started.
    """

    # Nothing that leads back to the communicator: it and its group have to go with their last reference.
    __slots__ = ("_name", "_recorder", "all_reduces", "later", "ready")

    def __init__(self, name: str, recorder: Recorder) -> None:
        self._name = name
        self._recorder = recorder
        self.ready: dict[tuple[object, ...], dict[torch.dtype, Ready]] = {}
        # What a user gives as op must not find another call.
        self.all_reduces: dict[str, dict[torch.dtype, Ready]] = {}
        self.later: dict[str, dict[torch.dtype, Ready]] = {}
        recorder.quick += [self.ready, self.all_reduces, self.later]

    def keep(self, key: tuple[str, *tuple[object, ...]], x: Tensor, found: Found | None) -> None:
        """Make `key` calls of tensors like `x`, which is dense, by `found` from now on; None changes nothing."""
        if found is not None:
            self.ready.setdefault(key, {})[x.dtype] = self._counted(key[0], x, found)

    def keep_all_reduce(self, op: str, x: Tensor, found: Found, later: Found) -> None:
        """`keep`, for all_reduces."""
        self.all_reduces.setdefault(op, {})[x.dtype] = self._counted("all_reduce", x, found)
        self.later.setdefault(op, {})[x.dtype] = self._counted("all_reduce", x, later)

    def _counted(self, call: str, x: Tensor, found: Found) -> Ready:
        return (*found, total_of(self._recorder.totals, self._name, call), self._recorder, x.device)

    def find(self, key: tuple[str, *tuple[object, ...]], x: Tensor) -> Ready | None:
        """What `keep` was given, where `x` is a tensor that it will do for.

        What is asked of `x` is asked in Reductions.all_reduce and in `fits` too: a tensor whose memory
        holds its values and that nobody watches.
        """
        try:
            ready = self.ready[key][x.dtype]
            if (
                type(x) is Tensor
                and x.device == ready[4]
                and x.layout is STRIDED
                and not x.is_nested
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
        start, options, total, recorder, _ = ready
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
        start, options, total, recorder, _ = ready
        frame: Any = frame_at(3)
        while is_ours(frame.f_code.co_filename) and frame.f_back is not None:
            frame = frame.f_back
        code, instruction = place = frame.f_code, frame.f_lasti
        recorder.started = number = recorder.started + 1
        recorder.under_way = x
        began = clock()
        recorder.ring[number % KEPT] = (total, nbytes, code, instruction, began)
        try:
            work = start(*given, options)
        except RuntimeError as error:
            raise by.failed(total.call, error) from error
        recorder.left[number % KEPT] = left = clock()
        recorder.under_way = None
        later = Later(total, nbytes, began, left)
        return Handle((work,), by, total.call, None, x, later, None, place)


def fits(out: Tensor, shape: Sequence[int], like: Tensor, ready: Ready) -> bool:
    """Whether bytes can be received into `out` as it is: dense, of this shape, else like what is `ready`."""
    return (
        type(out) is Tensor
        and out.dtype is like.dtype
        and out.device == ready[4]
        and out.layout is STRIDED
        and not out.is_nested
        and out.shape == shape
        and not out.requires_grad
        and out.is_contiguous()
        and not out.is_neg()
    )


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether a write to one may be seen in the other."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def along_first(sizes: Sequence[int], first: int) -> tuple[int, ...]:
    """`sizes` with another first one."""
    return (first,) if len(sizes) == 1 else (first, *sizes[1:])
