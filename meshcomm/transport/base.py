"""The seam between what a collective means and what carries its bytes; nothing does for a group of one."""

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
    """Something under way. torch's own Work objects have this shape."""

    def wait(self, timeout: timedelta = ...) -> bool: ...

    def is_completed(self) -> bool: ...


class P2P(NamedTuple):
    """One end of a message. peer: a coord; None: receive from whoever sends first."""

    direction: Direction
    x: Tensor
    peer: int | None
    tag: int


class Prepared(NamedTuple):
    """What a collective of one kind comes down to: `start(*row.arguments(...), options)` returns its Work."""

    start: Callable[..., Work | None]
    options: Any


class Transport(ABC):
    """Moves contiguous tensors between the ranks of one group. Ranks are coords, 0 to size - 1.

    A transport checks nothing and reshapes nothing: the communicator above it has done so, once for every
    transport. It carries the dtypes of `shapes.CARRIED` only; others travel as bytes.
    """

    name: str
    size: int
    coord: int
    device: torch.device
    group_name: str
    any_source: bool
    # Whether calls run in the order in which they were queued, after they have returned: as on NCCL.
    ordered: bool = False
    # Whether a run of it ends by telling of calls that nobody waited for: their handles need not.
    tells_unwaited: bool = False

    @property
    def timeout_s(self) -> float:
        """Seconds after which the backend ends a call by itself; 0.0: not known."""
        return 0.0

    @property
    def kinds(self) -> tuple[str, ...]:
        """The device types of tensors that the group carries."""
        return (self.device.type,)

    @property
    def message_kinds(self) -> tuple[str, ...]:
        """The device types of tensors that messages carry."""
        return self.kinds

    def announce_call(self, name: str, call: str, facts: dict[str, Any]) -> bool:
        """Told of this rank's next call on the dim `name`; whether the transport compares calls itself."""
        return False

    @abstractmethod
    def start(self, call: Call) -> Work | None:
        """Start a collective. None: it is over."""

    @abstractmethod
    def start_p2p(self, batch: Sequence[P2P]) -> Sequence[Work]:
        """Start all messages as one operation, receives first; a Work for each, or one for all."""

    @abstractmethod
    def source_of(self, work: Work) -> int:
        """The coord that the message of a finished receive from any source came from."""

    @abstractmethod
    def close(self) -> None:
        """Give the group back. Called once, by every rank of the group, in plan order reversed."""

    def abort(self) -> None:
        """Let go of calls that others may never come to, so that `close` does not wait for them."""
        return

    def wait_within(self, work: Work, timeout_s: float) -> None:
        """Wait for `work`, but no longer. Raises RuntimeError, after which the group can still be used if its backend allows it."""
        work.wait(timedelta(seconds=timeout_s))

    def prepare(self, row: Collective, op: str | None, root: int, blocking: bool) -> Prepared | None:
        """`start` for many calls of one kind, their options made once; None where there is no shorter way."""
        return None


@final
class SoloTransport(Transport):
    """A group of one rank. Messages to itself stay in the communicator.

    backend: what the plan names for groups of this dim, so that what it refuses is refused for one rank too.
    """

    size = 1
    coord = 0
    any_source = True
    group_name = ""

    def __init__(self, device: torch.device, backend: str) -> None:
        self.name = backend_on(backend, device)
        self.device = device

    def start(self, call: Call) -> Work | None:
        if call.out is not None and call.x is not None:
            call.out.view(-1).copy_(call.x.view(-1))
        return None

    def start_p2p(self, batch: Sequence[P2P]) -> Sequence[Work]:
        raise AssertionError("a rank's messages to itself do not reach its transport")

    def source_of(self, work: Work) -> int:
        return 0

    def close(self) -> None:
        return None

    def prepare(self, row: Collective, op: str | None, root: int, blocking: bool) -> Prepared | None:
        moves = not row.in_place
        return None if moves else Prepared(lambda *given: None, None)
