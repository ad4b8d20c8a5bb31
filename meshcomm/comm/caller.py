"""What issues calls along one dim: it starts errors about them, and explains calls that fail."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from meshcomm.collectives import Call
from meshcomm.errors import MeshcommError
from meshcomm.transport.base import P2P, Transport, Work
from meshcomm.watching.recorder import FlightRecorder


class Caller:
    """Issues calls along the dim `name`, provides the beginning of their error messages, and explains failed calls.

    who: this rank and its coords, for errors, as in `rank 5 (pp=1 dp=0 tp=1)`.
    """

    def __init__(self, name: str, transport: Transport, who: str, recorder: FlightRecorder) -> None:
        self.name, self.who = name, who
        self.transport, self.recorder = transport, recorder
        self.size, self.coord = transport.size, transport.coord
        # The device types of tensors that calls take.
        self.kinds = transport.kinds

    def where(self, call: str) -> str:
        """Return the beginning of an error about a call."""
        return f'{call} along "{self.name}" on {self.who}'

    def failed(self, call: str, error: BaseException) -> MeshcommError:
        """Return the error for a call that the backend gave up on."""
        return self.recorder.inquire(self.recorder, self.where(call), error)

    def confirm(self, call: str, error: BaseException | None = None) -> None:
        """Raise RankLost from `error` if ranks have been lost. Called when the host has waited, or has read a value.

        If calls are queued, a call that is abandoned because of a lost rank ends without an error, with an undefined result.
        """
        recorder = self.recorder
        if recorder.ordered and (lost := recorder.lost(self.where(call), False, error is None)) is not None:
            raise lost from error

    def start(self, call: Call | list[P2P]) -> Sequence[Work]:
        """Make the backend start a collective, or the messages that take its place. Return its Work objects, or none if it has
        already completed.
        """
        works: Sequence[Work]
        if isinstance(call, list):
            works = self.transport.start_p2p(call)
        else:
            divides = call.row.in_place and call.x is not None and call.x.is_inference()
            # Gloo divides in place by an operator, which refuses an inference tensor outside of inference mode.
            with torch.inference_mode() if divides else nullcontext():
                work = self.transport.start(call)
            if self.recorder.ordered:
                self.recorder.queued(work)
            works = () if work is None else (work,)
        self.recorder.issued(works)
        return works

    def run(self, call: Call | list[P2P]) -> None:
        """Start a call and wait for it. In a frame of its own, so that a stored error does not keep its Works alive."""
        for work in self.start(call):
            work.wait()

    def has_completed(self, work: Work) -> bool:
        """Return whether one of the group's Work objects has completed; see `Transport.has_completed`."""
        return self.transport.has_completed(work)

    def wait_within(self, work: Work, timeout_s: float, last: bool) -> None:
        """Wait at most `timeout_s` seconds for one of the group's Work objects; see `Transport.wait_within`."""
        self.transport.wait_within(work, timeout_s, last)
