"""The interface between collectives and the transports that move their bytes, and the transport for a single rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, final

import torch
from torch import Tensor

from meshcomm.collectives import Call, Collective
from meshcomm.transport.support import backend_on

Direction: TypeAlias = Literal["send", "recv"]


class Work(Protocol):
    """An operation in flight. torch's own Work objects have this interface."""

    def wait(self, timeout: timedelta = ...) -> bool: ...

    def is_completed(self) -> bool: ...


class P2P(NamedTuple):
    """One end of a message. `peer` is a coord, or None to receive from whichever rank sends first."""

    direction: Direction
    x: Tensor
    peer: int | None
    tag: int


class Prepared(NamedTuple):
    """A prepared call for collectives of one kind: `start(*row.arguments(...), options)` returns its Work."""

    start: Callable[..., Work | None]
    options: Any


class Transport(ABC):
    """Moves contiguous tensors between the ranks of one group. Ranks are coords, 0 to size - 1.

    A transport neither checks nor reshapes tensors, because the communicator has already done so for all transports. A
    transport carries only the dtypes in `shapes.CARRIED`. Other dtypes are sent as bytes.
    """

    name: str
    size: int
    coord: int
    device: torch.device
    group_name: str
    any_source: bool
    # The device types of tensors that the group can carry, and that its messages can carry.
    kinds: tuple[str, ...]
    message_kinds: tuple[str, ...]
    # Whether calls return once they are queued and run in queue order, as in NCCL.
    ordered: bool = False
    # Whether the transport itself compares calls: each is announced to it.
    compares_calls: bool = False
    # Whether calls without a wait are reported at the end of a run, so that their handles need not report them.
    tells_unwaited: bool = False

    @property
    def timeout_s(self) -> float:
        """Seconds after which the backend itself ends a call; 0.0 if unknown."""
        return 0.0

    def announce_call(self, name: str, call: str, facts: dict[str, Any]) -> None:
        """Announce this rank's next call along the dim `name` to a transport that compares calls itself."""
        raise AssertionError("this transport compares no calls")

    @abstractmethod
    def start(self, call: Call) -> Work | None:
        """Start a collective. Return None if it has already completed."""

    @abstractmethod
    def start_p2p(self, batch: Sequence[P2P], single: bool = False) -> Sequence[Work]:
        """Start all messages as one operation, receives first. Return one Work per message, or one for all.

        single: whether the batch is one send or receive, which involves only two ranks. NCCL uses a communicator per
        pair of ranks for single messages, and the group's communicator otherwise. Both ends must pass the same value.
        """

    @abstractmethod
    def source_of(self, work: Work) -> int:
        """Return the source coord of a completed receive from any source."""

    @abstractmethod
    def close(self) -> None:
        """Release the group. Called once by every rank of the group, in reverse plan order."""

    def abort(self) -> None:
        """Drop calls that other ranks may never make, so that `close` does not wait for them."""
        return

    def has_completed(self, work: Work) -> bool:
        """Return whether `work` has completed. After this, wait for it by `wait_within`."""
        return work.is_completed()

    def dropped(self, works: Sequence[Work], memory: object) -> None:
        """Take the Works of a call that the program has dropped before its end, and what holds the call's memory."""
        return

    def wait_within(self, work: Work, timeout_s: float, last: bool) -> None:
        """Wait for `work` up to a time limit. Raises TimeoutError if it is still under way then, and may be waited for again.

        last: whether no wait follows, so that the backend may end the call, with a RuntimeError.
        """
        work.wait(timedelta(seconds=timeout_s))

    def prepare(self, row: Collective, op: str | None, root: int, blocking: bool) -> Prepared | None:
        """Return a `start` for many calls of one kind, with options created once, or None if there is no shortcut."""
        return None


@final
class SoloTransport(Transport):
    """A group of one rank. The communicator handles messages from the rank to itself.

    backend: the plan's backend for groups of this dim, so that a group of one rank refuses the same operations.
    """

    size = 1
    coord = 0
    any_source = True
    group_name = ""

    def __init__(self, device: torch.device, backend: str) -> None:
        self.name = backend_on(backend, device)
        self.device = device
        self.kinds = self.message_kinds = (device.type,)

    def start(self, call: Call) -> Work | None:
        if call.out is not None and call.x is not None:
            call.out.view(-1).copy_(call.x.view(-1))
        return None

    def start_p2p(self, batch: Sequence[P2P], single: bool = False) -> Sequence[Work]:
        raise AssertionError("a rank's messages to itself do not reach its transport")

    def source_of(self, work: Work) -> int:
        return 0

    def close(self) -> None:
        return None

    def prepare(self, row: Collective, op: str | None, root: int, blocking: bool) -> Prepared | None:
        moves = not row.in_place
        return None if moves else Prepared(lambda *given: None, None)
