"""Python objects along dims: what the ranks agree on first, then bytes; plain data unless pickle is asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, NoReturn, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from meshcomm.comm.checks import OWN_TAGS, check_coord, check_tag
from meshcomm.comm.codec import HEADER_BYTES, decode, encode
from meshcomm.comm.communicator import Communicator
from meshcomm.comm.directory import Directory
from meshcomm.errors import LayoutError, MeshcommError, ObjectError
from meshcomm.layout import Dims
from meshcomm.layout.sizes import fold

MAX_BYTES: Final = 64 << 20

_MAGIC: Final = 0x4D434F43
_CALLS: Final = ("broadcast", "all_gather", "gather", "scatter", "send", "recv")
_ROOTS: Final = {"broadcast": "src", "gather": "dst", "scatter": "src", "send": "dst", "recv": "src"}
_LONGEST_REASON: Final = 1 << 16


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


@final
class Objects:
    """`mesh.objects`: broadcast, all_gather, gather, scatter, send and recv of Python objects along dims.

    What crosses: None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set,
    frozenset, torch.Size, torch.dtype, NumPy arrays and scalars, and tensors. It arrives as new
    memory on every rank, the sender included; tensors arrive dense on the receiver's mesh device,
    without gradient. An object that occurs twice is one object again. No code from the message runs.

    With `pickle=True`, on every rank of the call, anything that pickle takes crosses, and code from
    the message runs on the receivers: only where every sender is trusted.

    max_bytes: the most that one object may take when encoded; the smallest of the group holds.

    Where one rank's object cannot be sent, is over the cap, or ranks disagree on the call or on
    `pickle`, every rank of the group raises the same ObjectError before the bytes move, and the
    group stays usable. Peers and roots are coords.
    """

    def __init__(self, directory: Directory, device: torch.device) -> None:
        self._at = directory
        self._device = device
        # What this rank has sent to itself, by dims and tag.
        self._own: dict[tuple[str, int], deque[Tensor]] = {}

    def broadcast(
        self, dims: Dims, obj: Any, src: int, *, pickle: bool = False, max_bytes: int = MAX_BYTES
    ) -> Any:
        """The object of coord `src`; what the others give is not looked at.

        Called by: every rank along `dims`, in the same program order.
        Raises:    ObjectError, on every rank along `dims`; LayoutError for a src that is no coord.
        """
        call = _Call(self._at.along(dims), "broadcast", src, pickle, max_bytes, self._device)
        with call.comm.named("objects.broadcast") as (comm, moves):
            mine, rows = call.agree(comm, lambda: [obj] if comm.coord == src else [], moves)
            data = _settled(comm.broadcast(mine[0] if mine else call.blank(rows[src].size), src))
        return call.decoded(data)

    def all_gather(
        self, dims: Dims, obj: Any, *, pickle: bool = False, max_bytes: int = MAX_BYTES
    ) -> list[Any]:
        """Every rank's object, in coord order. Sizes may differ.

        Called by: every rank along `dims`, in the same program order.
        Raises:    ObjectError, on every rank along `dims`.
        """
        call = _Call(self._at.along(dims), "all_gather", -1, pickle, max_bytes, self._device)
        with call.comm.named("objects.all_gather") as (comm, moves):
            mine, rows = call.agree(comm, lambda: [obj], moves)
            parts = _gathered(comm, mine[0], [row.size for row in rows])
        return [call.decoded(part) for part in parts]

    def gather(
        self, dims: Dims, obj: Any, dst: int, *, pickle: bool = False, max_bytes: int = MAX_BYTES
    ) -> list[Any] | None:
        """Every rank's object, in coord order, on coord `dst`; None on the others.

        Called by: every rank along `dims`, in the same program order.
        Raises:    ObjectError, on every rank along `dims`; LayoutError for a dst that is no coord.
        """
        call = _Call(self._at.along(dims), "gather", dst, pickle, max_bytes, self._device)
        with call.comm.named("objects.gather") as (comm, moves):
            mine, rows = call.agree(comm, lambda: [obj], moves)
            parts = _gathered(comm, mine[0], [row.size for row in rows], dst)
        return [call.decoded(part) for part in parts] if comm.coord == dst else None

    def scatter(
        self,
        dims: Dims,
        objs: Sequence[Any] | None,
        src: int,
        *,
        pickle: bool = False,
        max_bytes: int = MAX_BYTES,
    ) -> Any:
        """Object number c of coord `src`'s list for coord c; what the others give is not looked at.

        Called by: every rank along `dims`, in the same program order.
        Raises:    ObjectError, on every rank along `dims`, also where the list has another length
                   than the dims; LayoutError for a src that is no coord.
        """
        call = _Call(self._at.along(dims), "scatter", src, pickle, max_bytes, self._device)
        with call.comm.named("objects.scatter") as (comm, moves):
            mine, _ = call.agree(comm, lambda: _one_each(objs, comm.size) if comm.coord == src else [], moves)
            splits = [message.numel() for message in mine] or [0] * comm.size
            own = _settled(comm.all_to_all(torch.cat(mine) if mine else call.blank(0), splits=splits))
        return call.decoded(own)

    def send(
        self,
        dims: Dims,
        obj: Any,
        dst: int,
        tag: int = 0,
        *,
        pickle: bool = False,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """Send `obj` to coord `dst`, which calls `recv`; returns when it is being received.

        To this rank itself, it is kept until `recv`. Two ranks that both send to each other first raise.

        tag:    only objects with equal tags meet (Gloo; NCCL matches by order). Tensors and objects
                never meet on Gloo.
        Raises: ObjectError, on both ranks; LayoutError for a dst that is no coord.
        """
        call = _Call(self._at.along(dims), "send", dst, pickle, max_bytes, self._device, tag)
        mine, error = call.encoded(lambda: [obj])
        row = call.row(mine, error)
        if dst == call.comm.coord:
            if error is not None:
                raise call.unsendable({dst: _reason(error)}) from error
            call.within_cap({dst: row})
            self._own.setdefault((call.comm.name, tag), deque()).append(mine[0])
            return
        with call.comm.named("objects.send", group=False) as (comm, moves):
            # Only started: where the other rank sends too, each row is the other one's answer.
            told = comm.messages.isend(call.packed(row), dst, OWN_TAGS + tag)
            if error is not None:
                told.wait()
                comm.messages.send(call.carried(_reason(error)), dst, OWN_TAGS + tag)
                raise call.unsendable({comm.coord: _reason(error)}) from error
            answer = comm.messages.recv(call.blank(row), dst, OWN_TAGS + tag)
            told.wait()
            call.compare({comm.coord: row, dst: _Row(*answer.tolist())})
            moves(row.size)
            comm.messages.send(mine[0], dst, OWN_TAGS + tag)

    def recv(
        self, dims: Dims, src: int, tag: int = 0, *, pickle: bool = False, max_bytes: int = MAX_BYTES
    ) -> Any:
        """The object that coord `src` sends; from this rank itself, the first that it has sent.

        Raises: ObjectError, on both ranks; LayoutError for a src that is no coord.
        """
        if src is None:
            raise LayoutError(
                f'objects.recv along "{dims}": src=None is not a coord',
                given="src=None",
                expected="a coord along the dim",
                hint="obj, src = mesh.objects.recv_any(dims), for whoever sends first",
            )
        return self._receive(dims, src, tag, pickle, max_bytes)[0]

    def recv_any(
        self, dims: Dims, tag: int = 0, *, pickle: bool = False, max_bytes: int = MAX_BYTES
    ) -> tuple[Any, int]:
        """The object of whichever coord sends first, and that coord. Gloo only.

        What this rank has sent to itself comes first.
        Raises: ObjectError, on both ranks; UnsupportedOp where the backend cannot.
        """
        return self._receive(dims, None, tag, pickle, max_bytes)

    def _receive(
        self, dims: Dims, src: int | None, tag: int, pickle: bool, max_bytes: int
    ) -> tuple[Any, int]:
        root = -1 if src is None else src
        call = _Call(self._at.along(dims), "recv", root, pickle, max_bytes, self._device, tag)
        coord, kept = call.comm.coord, self._own.get((call.comm.name, tag))
        if kept and src in (None, coord):
            call.within_cap({coord: call.row(list(kept)[:1], None)})
            return call.decoded(kept.popleft()), coord
        if src == coord:
            raise ObjectError(
                f"{call.where}: this rank has sent nothing to itself",
                given=f"src={src}, own coord {coord}, tag={tag}",
                expected="an objects.send to the own coord before",
                hint="send first, or receive from another coord",
            )
        row = call.row([], None)
        with call.comm.named("objects.recv", group=False) as (comm, moves):
            if src is None:
                told, src = comm.messages.recv_any(call.blank(row), OWN_TAGS + tag)
            else:
                told = comm.messages.recv(call.blank(row), src, OWN_TAGS + tag)
            offer = _Row(*told.tolist())
            call.genuine({src: offer})
            if offer.failed:
                reason = comm.messages.recv(call.blank(offer.size), src, OWN_TAGS + tag)
                raise call.unsendable({src: decode(reason, torch.device("cpu"))})
            comm.messages.send(call.packed(row), src, OWN_TAGS + tag)
            call.compare({comm.coord: row, src: offer})
            moves(offer.size)
            data = comm.messages.recv(call.blank(offer.size), src, OWN_TAGS + tag)
        return call.decoded(data), src


@final
class _Call:
    """One call along one communicator: its arguments, checked, and what the ranks have to agree on.

    root: the coord that the call names: src, dst, or the peer. -1 where it names none.
    """

    def __init__(
        self,
        comm: Communicator,
        call: str,
        root: int,
        pickle: bool,
        max_bytes: int,
        device: torch.device,
        tag: int = 0,
    ) -> None:
        self.comm = comm
        self.where = comm.where(f"objects.{call}")
        self._call, self._root, self._pickle, self._cap = call, root, pickle, max_bytes
        self._device = device
        # In host memory where the backend can, so that no accelerator is touched.
        self._carrier = torch.device("cpu") if "cpu" in comm.transport.kinds else device
        if call in _ROOTS and root != -1:
            check_coord(root, comm.size, _ROOTS[call], lambda: self.where)
        check_tag(tag, lambda: self.where)
        if type(max_bytes) is not int or not HEADER_BYTES <= max_bytes <= 1 << 62:
            raise LayoutError(
                f"{self.where}: max_bytes={max_bytes!r}",
                given=f"max_bytes={max_bytes!r}",
                expected=f"a whole number from {HEADER_BYTES} to {1 << 62}",
                hint="leave max_bytes out",
            )

    # -- tensors --------------------------------------------------------------------------------

    def blank(self, like: int | _Row) -> Tensor:
        """Memory to receive so many bytes into, or a row."""
        if isinstance(like, _Row):
            return torch.empty(len(like), dtype=torch.int64, device=self._carrier)
        return torch.empty(like, dtype=torch.uint8, device=self._carrier)

    def packed(self, row: _Row) -> Tensor:
        """The row as int64."""
        return torch.tensor(row, dtype=torch.int64, device=self._carrier)

    def carried(self, x: object) -> Tensor:
        """`x` as bytes on the device where they travel."""
        return encode(x).to(self._carrier)

    def decoded(self, data: Tensor) -> Any:
        """The object of the bytes that came."""
        return decode(data, self._device, self._pickle)

    # -- before the bytes -----------------------------------------------------------------------

    def encoded(self, make: Callable[[], Sequence[Any]]) -> tuple[list[Tensor], Exception | None]:
        """This rank's objects as bytes, or why they cannot be."""
        which = ""
        messages = []
        try:
            for place, obj in enumerate(make()):
                which = f"for coord {place}: " if self._call == "scatter" else ""
                messages.append(encode(obj, self._pickle).to(self._carrier))
        except Exception as error:  # the others must hear of it, whatever it is
            if isinstance(error, ObjectError):
                error.what = which + error.what
            return [], error
        return messages, None

    def row(self, messages: list[Tensor], error: Exception | None) -> _Row:
        """What this rank says about itself."""
        sizes = [message.numel() for message in messages]
        size = max(sizes, default=0) if error is None else self.carried(_reason(error)).numel()
        return _Row(
            magic=_MAGIC,
            call=_CALLS.index(self._call),
            root=self._root if self._call not in ("send", "recv") else -1,
            failed=int(error is not None),
            size=size,
            target=sizes.index(size) if sizes and self._call == "scatter" else -1,
            cap=self._cap,
            pickle=int(bool(self._pickle)),
        )

    def agree(
        self, comm: Communicator, make: Callable[[], Sequence[Any]], moves: Callable[[int], None]
    ) -> tuple[list[Tensor], list[_Row]]:
        """This rank's objects as bytes, and every rank's row. Raises ObjectError on every rank otherwise."""
        mine, error = self.encoded(make)
        row = self.row(mine, error)
        table = _settled(comm.all_gather(self.packed(row).view(1, -1)))
        rows = {coord: _Row(*numbers) for coord, numbers in enumerate(table.tolist())}
        try:
            self.genuine(rows)
            self.same_call(rows)
        except ObjectError:
            self.comm.recorder.refuse()
            raise
        failed = [coord for coord in rows if rows[coord].failed]
        if failed:
            own = self.blank(0) if error is None else self.carried(_reason(error))
            texts = _gathered(comm, own, [rows[coord].size if coord in failed else 0 for coord in rows])
            cpu = torch.device("cpu")
            raise self.unsendable({coord: decode(texts[coord], cpu) for coord in failed}) from error
        self.within_cap(rows)
        # Of a scatter the source's largest part is known, and all as of that size.
        moves(sum(row.size for row in rows.values()) * (comm.size if self._call == "scatter" else 1))
        return mine, list(rows.values())

    def compare(self, rows: dict[int, _Row]) -> None:
        """What the sender and the receiver of one object have to agree on. Raises ObjectError on both."""
        self.genuine(rows)
        if len({row.call for row in rows.values()}) == 1:
            self._differ({_CALLS[row.call]: sorted(rows) for row in rows.values()}, "a recv for each send")
        self._same_pickle(rows)
        self.within_cap(rows)

    def unsendable(self, reasons: dict[int, Sequence[Any]]) -> ObjectError:
        """The error for objects that could not be encoded, from each rank's (what, expected, hint)."""
        coords = list(reasons)
        _, expected, hint = reasons[coords[0]]
        return ObjectError(
            f"{self.where}: what {_coords(coords)} {_has(coords)} cannot be sent",
            given="\n".join(f"coord {coord}: {reasons[coord][0]}" for coord in coords),
            expected=expected,
            hint=hint,
        )

    def genuine(self, rows: dict[int, _Row]) -> None:
        """Refuse rows that no call of an object has written."""
        strange = [
            coord
            for coord, row in rows.items()
            if row.magic != _MAGIC
            or not 0 <= row.call < len(_CALLS)
            or not 0 <= row.size <= (_LONGEST_REASON if row.failed else 1 << 62)
        ]
        if strange:
            raise ObjectError(
                f"{self.where}: what came from {_coords(strange)} is no object",
                given="bytes of another call, or of another version of meshcomm",
                expected="the same call on every rank",
                hint="look at the order of calls on these ranks",
            )

    def same_call(self, rows: dict[int, _Row]) -> None:
        """Refuse calls of different kinds, or roots, or that differ in pickle."""
        calls: dict[str, list[int]] = {}
        for coord, row in rows.items():
            name = _CALLS[row.call]
            calls.setdefault(f"{name}, {_ROOTS[name]}={row.root}" if name in _ROOTS else name, []).append(
                coord
            )
        if len(calls) > 1:
            self._differ(calls, "the same call with the same root on every rank")
        self._same_pickle(rows)

    def _differ(self, calls: dict[str, list[int]], expected: str) -> NoReturn:
        raise ObjectError(
            f"{self.where}: the ranks made different calls",
            given="; ".join(f"{_coords(coords)}: {text}" for text, coords in calls.items()),
            expected=expected,
            hint="look at the order of calls on these ranks",
        )

    def _same_pickle(self, rows: dict[int, _Row]) -> None:
        asked = [coord for coord, row in rows.items() if row.pickle]
        if 0 < len(asked) < len(rows):
            others = [coord for coord in rows if coord not in asked]
            raise ObjectError(
                f"{self.where}: the ranks disagree on pickle",
                given=f"{_coords(asked)}: pickle=True; {_coords(others)}: pickle=False",
                expected="the same on every rank; a pickle can run any code on its receivers",
                hint="pickle=True on every rank where every sender is trusted, or on none",
            )

    def within_cap(self, rows: dict[int, _Row]) -> None:
        """Refuse an object that is over the smallest cap."""
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
            f"{self.where}: what {_coords(list(over))} {_has(list(over))} is over the size cap",
            given="\n".join(lines),
            expected=f"at most {cap:,} bytes each, the max_bytes of {_coords(lowest)}",
            hint="a larger max_bytes on every rank; or send large tensors as tensors",
        )


def _gathered(comm: Communicator, mine: Tensor, sizes: list[int], dst: int | None = None) -> list[Tensor]:
    """Every rank's bytes in coord order: on coord dst, where there is one, and none on the others."""
    longest = max(sizes)
    # Padding all to the longest must not move and hold more than twice of what there is.
    even = longest * comm.size <= max(2 * sum(sizes), 1 << 16)
    x = pad(mine, (0, longest - mine.numel())) if even else mine
    found = comm.all_gather(x, uneven=not even) if dst is None else comm.gather(x, dst, uneven=not even)
    if found is None:
        return []
    parts = _settled(found).split([longest] * comm.size if even else sizes)
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]


def _settled(result: object) -> Tensor:
    assert isinstance(result, Tensor)
    return result


def _reason(error: Exception) -> tuple[str, str | None, str | None]:
    """Why something cannot be sent, as short as the others have to hear it."""
    if isinstance(error, MeshcommError):
        return error.what[:2000], error.expected, error.hint
    return f"{type(error).__name__}: {error}"[:2000], "an object to read", None


def _one_each(objs: Any, size: int) -> Sequence[Any]:
    if not isinstance(objs, Sequence) or isinstance(objs, (str, bytes)):
        raise ObjectError(
            f"objs is of type {type(objs).__name__}",
            expected=f"a list of {size} objects, one for each coord",
            hint="None on the other ranks only",
        )
    if len(objs) != size:
        raise ObjectError(
            f"objs has {len(objs)} elements",
            expected=f"{size}, one for each coord",
            hint="None for a coord that gets nothing",
        )
    return objs


def _coords(coords: list[int]) -> str:
    return f"coord {coords[0]}" if len(coords) == 1 else f"coords {fold(coords)}"


def _has(coords: list[int]) -> str:
    return "has" if len(coords) == 1 else "have"
