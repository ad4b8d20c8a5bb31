"""Calls that were checked before and need no preparation: made again without asking again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from meshcomm.collectives import Collective
from meshcomm.comm.counters import CallCounter, counter_of
from meshcomm.comm.flight_recorder import FlightRecorder
from meshcomm.transport.torch_private import forward_mode, profiling, transforming

# The collective's name, then all that its options depend on.
Key: TypeAlias = tuple[object, ...]

STRIDED: Final = torch.strided


class Ready(NamedTuple):
    """One kind of call for one dtype: the backend's method, its options, where calls are counted, on which device."""

    start: Callable[..., Any]
    options: Any
    row: Collective
    counter: CallCounter
    device: torch.device


def usable(x: Any, device: torch.device) -> bool:
    """Whether a backend can be given `x` as it is: its memory holds its values, and nobody else watches it.

    Every fast path asks this, and only this, of each of its tensors: those of a call that was checked before may
    differ in nothing else.
    """
    return (
        type(x) is Tensor
        and x.device == device
        and x.layout is STRIDED
        and not x.is_nested
        and not x.requires_grad
        and x.is_contiguous()
        and not x.is_neg()
        and forward_mode._current_level < 0
        and not transforming()
        and not profiling()
    )


def fits(out: Tensor, shape: Sequence[int], like: Tensor, device: torch.device) -> bool:
    """Whether a result of this shape can be received into `out` as it is."""
    return usable(out, device) and out.dtype is like.dtype and out.shape == shape


@final
class FastPath:
    """The prepared calls of one communicator, by what they are and by dtype."""

    # Nothing that leads back to the communicator: it and its group have to go with their last reference.
    __slots__ = ("_name", "_recorder", "ready")

    def __init__(self, name: str, recorder: FlightRecorder) -> None:
        self._name = name
        self._recorder = recorder
        self.ready: dict[Key, dict[torch.dtype, Ready]] = {}
        recorder.quick.append(self.ready)

    def keep(self, key: Key, x: Tensor, row: Collective, prepared: tuple[Any, Any] | None) -> None:
        """Make `key` calls of tensors like `x`, which is dense, by `prepared` from now on; None changes nothing."""
        if prepared is not None:
            counter = counter_of(self._recorder.counters, self._name, row.name)
            self.ready.setdefault(key, {})[x.dtype] = Ready(*prepared, row, counter, x.device)

    def find(self, key: Key, x: Any) -> Ready | None:
        """What `keep` was given, where `x` is a tensor that it will do for."""
        try:
            ready = self.ready[key][x.dtype]
            return ready if usable(x, ready.device) else None
        except (KeyError, AttributeError, TypeError, RuntimeError):
            # Not prepared, or no tensor, or one of another kind: whoever checks will say what it is.
            return None


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether a write to one may be seen in the other."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
