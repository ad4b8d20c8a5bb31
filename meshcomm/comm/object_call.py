"""One call that moves objects: what the ranks agree on before any bytes move, and the bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter as clock
from typing import Any, Final, NamedTuple, NoReturn, final

import torch
import torch.distributed as dist
from torch import Tensor

from meshcomm.comm.checks import check_coord, check_peer
from meshcomm.comm.communicator import Communicator
from meshcomm.comm.message_check import Direction
from meshcomm.comm.plain import HEADER_BYTES, VERSION, Message, decode, encode
from meshcomm.errors import LayoutError, ObjectError
from meshcomm.layout.sizes import fold
from meshcomm.transport import Work
from meshcomm.transport.profile import labelled

# Above every tag that tensors are given, so that an object and a tensor never meet.
_TAG: Final = 1 << 30
_MAGIC: Final = 0x4D434F42 << 8 | VERSION
_CALLS: Final = ("broadcast", "all_gather", "gather", "scatter", "send")
_ROOTS: Final = {"broadcast": "src", "gather": "dst", "scatter": "src"}


class _Row(NamedTuple):
    """What each rank says before any bytes move. Travels as int64."""

    magic: int
    call: int  # index in _CALLS
    root: int  # coord, or -1
    failed: int  # 1: what this rank has cannot be sent, and `size` is the length of its reason
    size: int  # bytes of its (largest) object; 0: it sends nothing
    target: int  # scatter: the coord that the largest object is for
    cap: int  # its max_bytes
    pickle: int


class _Reason(NamedTuple):
    """Why a rank has nothing that can be sent."""

    given: str
    expected: str | None
    hint: str | None


@final
class ObjectCall:
    """One call along one communicator: what is agreed, and the bytes.

    root: the coord that the call names: src, dst, or the peer. -1 where it names none.
    """

    def __init__(
        self,
        comm: Communicator,
        call: str,
        root: int,
        pickle: bool,
        max_bytes: int,
        tag: int,
        device: torch.device,
    ) -> None:
        self.size = comm.size
        self.coord = comm.coord
        self.carrier = carrier_of(comm.transport.name, device)
        self.reason = _Reason("", None, None)
        self._cause: Exception | None = None
        self._transport = comm.transport
        self._recorder = comm.recorder
        self._name = comm.name
        self._where = f'{call} of an object along "{comm.name}" on {comm.who}'
        self._label = f"meshcomm::{call} of an object {comm.name}{comm.recorder.plan}"
        self._call = call
        self._root = root
        self._pickle = pickle
        self._cap = max_bytes
        if call in ("send", "recv"):
            check_peer(root, self.coord, self.size, "dst" if call == "send" else "src", lambda: self._where)
        elif call in _ROOTS:
            check_coord(root, self.size, _ROOTS[call], lambda: self._where)
        limits = (("max_bytes", max_bytes, HEADER_BYTES, 1 << 62), ("tag", tag, 0, _TAG - 1))
        for name, value, least, most in limits:
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise LayoutError(
                    f"{self._where}: {name}={value!r}",
                    given=f"{name}={value!r}",
                    expected=f"a whole number from {least} to {most}",
                    hint=f"leave {name} out",
                )
        self._tag = _TAG + tag

    # -- before the bytes -----------------------------------------------------------------------

    def prepare(self, make: Callable[[], Sequence[Any]]) -> list[Message] | None:
        """This rank's objects as messages; None where it has none, or none that can be sent."""
        which = ""
        messages = []
        try:
            for place, obj in enumerate(make()):
                which = f"for coord {place}: " if self._call == "scatter" else ""
                messages.append(encode(obj, self._pickle))
        except ObjectError as error:
            self._cause = error
            self.reason = _Reason(which + error.what, error.expected, error.hint)
            return None
        except Exception as error:  # the others must hear of it, whatever it is
            self._cause = error
            self.reason = _Reason(f"{which}{type(error).__name__}: {error}", "an object to read", None)
            return None
        return messages or None

    def row(self, messages: list[Message] | None) -> _Row:
        """What this rank says about itself."""
        failed = self._cause is not None
        sizes = [message.nbytes for message in messages or ()]
        size = int(self.reason_bytes().numel()) if failed else max(sizes, default=0)
        return _Row(
            magic=_MAGIC,
            call=_CALLS.index("send" if self._call == "recv" else self._call),
            root=self._root if self._call in _ROOTS else -1,
            failed=int(failed),
            size=size,
            target=sizes.index(size) if sizes and self._call == "scatter" else -1,
            cap=self._cap,
            pickle=int(bool(self._pickle)),
        )

    def agree(self, messages: list[Message] | None) -> list[_Row]:
        """Every rank's row, when all can go on. Raises ObjectError on every rank otherwise."""
        # A call of the whole group counts as one, whatever it takes.
        self._recorder.start(self._name, f"objects.{self._call}", None, 3)
        mine = self.packed(self.row(messages))
        table = mine.new_empty((self.size, mine.numel()))
        self._run(lambda: [self._transport.all_gather(table, mine, True)])
        rows = [_Row(*numbers) for numbers in table.tolist()]
        try:
            self._same_call(dict(enumerate(rows)))
        except ObjectError:
            self._recorder.refuse()
            raise
        failed = [coord for coord, row in enumerate(rows) if row.failed]
        if failed:
            length = max(rows[coord].size for coord in failed)
            padded = self.blank(length)
            if self._cause is not None:
                own = self.reason_bytes()
                padded[: own.numel()] = own
            texts = padded.new_empty((self.size, length))
            self._run(lambda: [self._transport.all_gather(texts, padded, True)])
            self.stop_unsendable([(coord, _reason(texts[coord, : rows[coord].size])) for coord in failed])
        self._within_cap(dict(enumerate(rows)))
        # Of a scatter the source's largest part is known, and all as of that size.
        sizes = [row.size for row in rows]
        self._recorder.is_of(sum(sizes) * (self.size if self._call == "scatter" else 1))
        return rows

    def offer(self, messages: list[Message] | None, dst: int) -> None:
        """The sender's half of `agree` between two ranks."""
        row = self.row(messages)
        self.send(self.packed(row), dst, header=True)
        if self._cause is not None:
            self.send(self.reason_bytes(), dst, header=True)
            self.stop_unsendable([(self.coord, self.reason)])
        answer = _Row(*self.recv(self.blank(len(row), torch.int64), dst, header=True).tolist())
        self._compare({self.coord: row, dst: answer})

    def answer(self, src: int) -> int:
        """The receiver's half; returns the bytes to come."""
        row = self.row(None)
        offer = _Row(*self.recv(self.blank(len(row), torch.int64), src, header=True).tolist())
        if offer.magic == _MAGIC and offer.failed:
            reason = _reason(self.recv(self.blank(offer.size), src, header=True))
            self.stop_unsendable([(src, reason)])
        self.send(self.packed(row), src, header=True)
        self._compare({self.coord: row, src: offer})
        return offer.size

    def _compare(self, rows: dict[int, _Row]) -> None:
        self._same_call(rows)
        self._within_cap(rows)

    def stop_unsendable(self, reasons: list[tuple[int, _Reason]]) -> NoReturn:
        """Raise for objects that could not be encoded."""
        coords = [coord for coord, _ in reasons]
        _, first = reasons[0]
        raise ObjectError(
            f"{self._where}: what {_coords(coords)} {_has(coords)} cannot be sent",
            given="\n".join(f"coord {coord}: {reason.given}" for coord, reason in reasons),
            expected=first.expected,
            hint=first.hint,
        ) from self._cause

    def _same_call(self, rows: dict[int, _Row]) -> None:
        if any(row.magic != _MAGIC for row in rows.values()):
            strange = [coord for coord, row in rows.items() if row.magic != _MAGIC]
            raise ObjectError(
                f"{self._where}: what came from {_coords(strange)} is no object",
                given="bytes of another call, or of another version of meshcomm",
                expected="the same call on every rank",
                hint="look at the order of calls on these ranks",
            )
        calls: dict[str, list[int]] = {}
        pickles: dict[bool, list[int]] = {}
        for coord, row in rows.items():
            name = _CALLS[row.call] if 0 <= row.call < len(_CALLS) else f"call {row.call}"
            text = f"{name}, {_ROOTS[name]}={row.root}" if name in _ROOTS else name
            calls.setdefault(text, []).append(coord)
            pickles.setdefault(bool(row.pickle), []).append(coord)
        if len(calls) > 1:
            raise ObjectError(
                f"{self._where}: the ranks made different calls",
                given="; ".join(f"{_coords(coords)}: {text}" for text, coords in calls.items()),
                expected="the same call with the same root on every rank",
                hint="look at the order of calls on these ranks",
            )
        if len(pickles) > 1:
            raise ObjectError(
                f"{self._where}: the ranks disagree on pickle",
                given="; ".join(f"{_coords(pickles[asked])}: pickle={asked}" for asked in (True, False)),
                expected="the same on every rank; a pickle can run any code on its receivers",
                hint="pickle=True on every rank where every sender is trusted, or on none",
            )

    def _within_cap(self, rows: dict[int, _Row]) -> None:
        cap = min(row.cap for row in rows.values())
        over = {coord: row for coord, row in rows.items() if row.size > cap}
        if not over:
            return
        lines = []
        for coord, row in over.items():
            which = f"coord {coord}" if row.target < 0 else f"coord {coord}, for coord {row.target}"
            lines.append(f"{which}: {row.size:,} bytes")
        lowest = [coord for coord, row in rows.items() if row.cap == cap]
        raise ObjectError(
            f"{self._where}: what {_coords(list(over))} {_has(list(over))} is over the size cap",
            given="\n".join(lines),
            expected=f"at most {cap:,} bytes each, the max_bytes of {_coords(lowest)}",
            hint="a larger max_bytes on every rank; or send large tensors as tensors",
        )

    # -- bytes ----------------------------------------------------------------------------------

    def blank(self, length: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Memory to receive into."""
        return torch.empty(length, dtype=dtype, device=self.carrier)

    def packed(self, row: _Row) -> Tensor:
        """The row as int64."""
        return torch.tensor(row, dtype=torch.int64, device=self.carrier)

    def reason_bytes(self) -> Tensor:
        """This rank's reason, for the others."""
        short = tuple(None if text is None else text[:2000] for text in self.reason)
        return encode(short).tensor(self.carrier)

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """`x` of coord src."""
        self._run(lambda: [self._transport.broadcast(x, src, True)])
        return x

    def all_gather(self, message: Message, sizes: list[int]) -> list[Tensor]:
        """Every rank's message, in coord order."""
        longest = max(sizes)
        if longest * self.size > max(2 * sum(sizes), 1 << 16):
            # Padding all to the longest would move and hold more than twice of what there is.
            parts = [
                message.tensor(self.carrier) if coord == self.coord else self.blank(size)
                for coord, size in enumerate(sizes)
            ]
            return [self.broadcast(part, coord) for coord, part in enumerate(parts)]
        mine = message.tensor(self.carrier, longest)
        table = mine.new_empty((self.size, longest))
        self._run(lambda: [self._transport.all_gather(table, mine, True)])
        return [table[coord, :size] for coord, size in enumerate(sizes)]

    def exchange(self, sends: list[tuple[Tensor, int]], recvs: list[tuple[Tensor, int]]) -> None:
        """A set of messages inside a call of the whole group."""
        if sends or recvs:
            self._run(
                lambda: self._transport.exchange(
                    [(x, coord, self._tag) for x, coord in sends],
                    [(x, coord, self._tag) for x, coord in recvs],
                )
            )

    def send(self, x: Tensor, dst: int, header: bool = False) -> None:
        """One message between two ranks; header: not the object itself, so that it counts with it."""
        self._message("send", x, dst, lambda: self._transport.send(x, dst, self._tag), header)

    def recv(self, x: Tensor, src: int, header: bool = False) -> Tensor:
        """One message between two ranks; returns x."""
        self._message("recv", x, src, lambda: self._transport.recv(x, src, self._tag), header)
        return x

    def _message(
        self, direction: Direction, x: Tensor, peer: int, start: Callable[[], Work], header: bool
    ) -> None:
        log = self._recorder.messages
        try:
            log.waiting = message = log.begin(
                self._name,
                f"objects.{direction}",
                [(direction, peer, self._tag, x)],
                calls=0 if header else 1,
                nbytes=0 if header else None,
            )
            with labelled(self._label):
                work = start()
                later = log.left(message, f"objects.{self._call}")
                later.at_once()
                since = clock()
                work.wait()
                later.waited(since)
        except RuntimeError as error:
            raise self._recorder.inquire(self._recorder, self._where, error) from error
        finally:
            log.waiting = None

    def _run(self, start: Callable[[], Sequence[Work | None]]) -> None:
        self._recorder.resume()
        try:
            with labelled(self._label):
                for work in start():
                    if work is not None:  # a backend that has already waited may return nothing
                        work.wait()
        except RuntimeError as error:
            raise self._recorder.inquire(self._recorder, self._where, error) from error
        finally:
            self._recorder.end()


def carrier_of(backend: str, device: torch.device) -> torch.device:
    """Where the bytes travel: in host memory where the backend can, so that no accelerator is touched."""
    for part in backend.split(","):
        of, _, name = part.rpartition(":")
        capable = dist.Backend.backend_capability.get(name, ())
        if of == "cpu" or (not of and "cpu" in capable) or name == "solo":
            return torch.device("cpu")
    return device


def _reason(data: Tensor) -> _Reason:
    return _Reason(*decode(data, torch.device("cpu")))


def _coords(coords: list[int]) -> str:
    return f"coord {coords[0]}" if len(coords) == 1 else f"coords {fold(coords)}"


def _has(coords: list[int]) -> str:
    return "has" if len(coords) == 1 else "have"
