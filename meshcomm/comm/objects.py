"""Python objects along dims: sizes and readiness first, then bytes; plain data unless pickle is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

import torch
from torch import Tensor

from meshcomm.comm.directory import Directory
from meshcomm.comm.object_call import ObjectCall
from meshcomm.comm.plain import decode
from meshcomm.errors import ObjectError
from meshcomm.layout import Dims

MAX_BYTES: Final = 64 << 20


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

    def broadcast(
        self, dims: Dims, obj: Any, src: int, *, pickle: bool = False, max_bytes: int = MAX_BYTES
    ) -> Any:
        """The object of coord `src`; what the others give is not looked at.

        Called by: every rank along `dims`, in the same program order.
        Raises:    ObjectError, on every rank along `dims`; LayoutError for a src that is no coord.
        """
        call = self._call(dims, "broadcast", src, pickle, max_bytes)
        mine = call.prepare(lambda: [obj] if call.coord == src else [])
        rows = call.agree(mine)
        data = call.blank(rows[src].size) if mine is None else mine[0].tensor(call.carrier)
        return self._decoded(call.broadcast(data, src), pickle)

    def all_gather(
        self, dims: Dims, obj: Any, *, pickle: bool = False, max_bytes: int = MAX_BYTES
    ) -> list[Any]:
        """Every rank's object, in coord order. Sizes may differ.

        Called by: every rank along `dims`, in the same program order.
        Raises:    ObjectError, on every rank along `dims`.
        """
        call = self._call(dims, "all_gather", -1, pickle, max_bytes)
        mine = call.prepare(lambda: [obj])
        sizes = [row.size for row in call.agree(mine)]
        assert mine is not None
        return [self._decoded(data, pickle) for data in call.all_gather(mine[0], sizes)]

    def gather(
        self, dims: Dims, obj: Any, dst: int, *, pickle: bool = False, max_bytes: int = MAX_BYTES
    ) -> list[Any] | None:
        """Every rank's object, in coord order, on coord `dst`; None on the others.

        Called by: every rank along `dims`, in the same program order.
        Raises:    ObjectError, on every rank along `dims`; LayoutError for a dst that is no coord.
        """
        call = self._call(dims, "gather", dst, pickle, max_bytes)
        mine = call.prepare(lambda: [obj])
        sizes = [row.size for row in call.agree(mine)]
        assert mine is not None
        own = mine[0].tensor(call.carrier)
        if call.coord != dst:
            call.exchange([(own, dst)], [])
            return None
        parts = [own if coord == dst else call.blank(size) for coord, size in enumerate(sizes)]
        call.exchange([], [(part, coord) for coord, part in enumerate(parts) if coord != dst])
        return [self._decoded(part, pickle) for part in parts]

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
        call = self._call(dims, "scatter", src, pickle, max_bytes)
        mine = call.prepare(lambda: _one_each(objs, call.size) if call.coord == src else [])
        call.agree(mine)
        lengths = torch.zeros(call.size, dtype=torch.int64, device=call.carrier)
        if mine is not None:
            lengths.copy_(torch.tensor([message.nbytes for message in mine], device="cpu"))
        size = int(call.broadcast(lengths, src)[call.coord])
        if mine is None:
            own = call.blank(size)
            call.exchange([], [(own, src)])
        else:
            own = mine[src].tensor(call.carrier)
            others = [coord for coord in range(call.size) if coord != src]
            call.exchange([(mine[coord].tensor(call.carrier), coord) for coord in others], [])
        return self._decoded(own, pickle)

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
        """Send `obj` to coord `dst`, which calls `recv`; returns when it has been received.

        Two ranks that both send first wait for each other, as with any blocking send.
        tag:    only objects with equal tags meet (Gloo; NCCL matches by order). Tensors and objects
                never meet on Gloo.
        Raises: ObjectError, on both ranks; LayoutError for a dst that is no coord, or is this rank.
        """
        call = self._call(dims, "send", dst, pickle, max_bytes, tag)
        mine = call.prepare(lambda: [obj])
        call.offer(mine, dst)
        assert mine is not None
        call.send(mine[0].tensor(call.carrier), dst)

    def recv(
        self, dims: Dims, src: int, tag: int = 0, *, pickle: bool = False, max_bytes: int = MAX_BYTES
    ) -> Any:
        """The object that coord `src` sends.

        Raises: ObjectError, on both ranks; LayoutError for a src that is no coord, or is this rank.
        """
        call = self._call(dims, "recv", src, pickle, max_bytes, tag)
        size = call.answer(src)
        return self._decoded(call.recv(call.blank(size), src), pickle)

    def _call(
        self, dims: Dims, name: str, root: int, pickle: bool, max_bytes: int, tag: int = 0
    ) -> ObjectCall:
        return ObjectCall(self._at.along(dims), name, root, pickle, max_bytes, tag, self._device)

    def _decoded(self, data: Tensor, pickle: bool) -> Any:
        return decode(data, self._device, pickle)


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
