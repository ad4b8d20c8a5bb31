"""Bytes through a torch process group: Gloo, NCCL, or any registered backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from meshcomm.transport.base import Transport, Work, as_bytes
from meshcomm.transport.gloo_waits import by_nearness, end_waits, hang_up
from meshcomm.transport.torch_private import (
    AllgatherOptions,
    AllToAllOptions,
    gloo_address,
    single_names,
    source_rank,
)

_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}

# What every backend moves as it is. Everything else travels as bytes, which is exact for any dtype.
_MOVED = frozenset(
    (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    )
)


@final
class ProcessGroupTransport(Transport):
    """Calls the process group's own methods, with option objects made once.

    This skips what `torch.distributed.all_reduce` and its siblings do before the same call
    (argument checks, group look-ups, global-rank translation): the communicator has done it.
    """

    def __init__(self, group: dist.ProcessGroup, backend: str, device: torch.device, owned: bool) -> None:
        self.group = group
        self.name = backend
        self.group_name = str(group.group_name)
        self.size = group.size()
        self.coord = group.rank()
        self.device = device
        self.any_source = backend in ("gloo", "mpi")
        self._owned = owned
        self.together = "nccl" in backend and device.type == "cuda"
        names = single_names()
        self._all_gather_single: Callable[..., Work] = getattr(group, names.all_gather)
        self._reduce_scatter_single: Callable[..., Work] = getattr(group, names.reduce_scatter)
        self._all_to_all_single: Callable[..., Work] = getattr(group, names.all_to_all)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Gloo carries host memory, whatever the mesh's device is."""
        return tuple(dict.fromkeys((self.device.type, "cpu"))) if self.name == "gloo" else (self.device.type,)

    def all_reduce(self, x: Tensor, op: str, blocking: bool) -> Work:
        return self.group.allreduce(
            [x if x.is_floating_point() else _added(x)], _options(AllreduceOptions, blocking, op)
        )

    def all_reduce_call(
        self, op: str, blocking: bool = True
    ) -> tuple[Callable[[list[Tensor], Any], Work | None], Any]:
        return self.group.allreduce, _options(AllreduceOptions, blocking, op)

    def message_call(
        self, direction: Literal["send", "recv"], dtype: torch.dtype
    ) -> Callable[[list[Tensor], int, int], Work] | None:
        if dtype not in _MOVED:
            return None
        return self.group.send if direction == "send" else self.group.recv

    def straight(
        self, call: str, dtype: torch.dtype, *, op: str | None = None, root: int | None = None
    ) -> tuple[Callable[..., Work | None], Any] | None:
        if dtype not in _MOVED:
            return None
        if call == "broadcast":
            return self.group.broadcast, _options(BroadcastOptions, True, root=root)
        if call == "reduce":
            return self.group.reduce, _options(ReduceOptions, True, op, root=root)
        if call == "all_gather":
            return self._all_gather_single, _options(AllgatherOptions, True)
        if call == "reduce_scatter":
            return self._reduce_scatter_single, _options(ReduceScatterOptions, True, op)
        if call == "all_to_all":
            return self._all_to_all_single, _options(AllToAllOptions, True)
        return None

    def reduce(self, x: Tensor, dst: int, op: str, blocking: bool) -> Work:
        return self.group.reduce([_added(x)], _options(ReduceOptions, blocking, op, root=dst))

    def broadcast(self, x: Tensor, src: int, blocking: bool) -> Work:
        return self.group.broadcast([_moved(x)], _options(BroadcastOptions, blocking, root=src))

    def all_gather(self, out: Tensor, x: Tensor, blocking: bool) -> Work:
        return self._all_gather_single(_moved(out), _moved(x), _options(AllgatherOptions, blocking))

    def gather(self, out: Tensor | None, x: Tensor, dst: int, blocking: bool) -> Work:
        outs = [] if out is None else [[_moved(part) for part in out]]
        return self.group.gather(outs, [_moved(x)], _options(GatherOptions, blocking, root=dst))

    def scatter(self, out: Tensor, x: Tensor | None, src: int, blocking: bool) -> Work:
        parts = [] if x is None else [[_moved(part) for part in x]]
        return self.group.scatter([_moved(out)], parts, _options(ScatterOptions, blocking, root=src))

    def reduce_scatter(self, out: Tensor, x: Tensor, op: str, blocking: bool) -> Work:
        return self._reduce_scatter_single(
            _added(out), _added(x), _options(ReduceScatterOptions, blocking, op)
        )

    def all_to_all(self, out: Tensor, x: Tensor, blocking: bool) -> Work:
        return self._all_to_all_single(_moved(out), _moved(x), [], [], _options(AllToAllOptions, blocking))

    def all_to_all_uneven(
        self, out: Tensor, x: Tensor, out_lengths: list[int], x_lengths: list[int], blocking: bool
    ) -> Work:
        options = _options(AllToAllOptions, blocking)
        into, source = _moved(out), _moved(x)
        # Lengths are counted in what is moved: bytes where the dtype travels as bytes.
        unit = x.element_size() if source.dtype != x.dtype else 1
        return self._all_to_all_single(
            into, source, [n * unit for n in out_lengths], [n * unit for n in x_lengths], options
        )

    def barrier(self, blocking: bool) -> Work:
        return self.group.barrier(_options(BarrierOptions, blocking, device=self.device))

    def send(self, x: Tensor, dst: int, tag: int) -> Work:
        return self.group.send([_bytes(x)], dst, tag)

    def recv(self, x: Tensor, src: int, tag: int) -> Work:
        return self.group.recv([_bytes(x)], src, tag)

    def recv_any(self, x: Tensor, tag: int) -> Work:
        # Gloo refuses this receive, and no other, where nothing is to come (torch 2.13): an empty message, which
        # is announced and answered like any, fits into more room too.
        room = _bytes(x) if x.numel() else torch.empty(1, dtype=torch.uint8, device=x.device)
        return self.group.recv_anysource([room], tag)

    def source_of(self, work: Work) -> int:
        return source_rank(work)

    def exchange(
        self, sends: Sequence[tuple[Tensor, int, int]], recvs: Sequence[tuple[Tensor, int, int]]
    ) -> Sequence[Work]:
        if not self.together:
            started = [self.recv(x, src, tag) for x, src, tag in recvs]
            return [*started, *(self.send(x, dst, tag) for x, dst, tag in sends)]
        # NCCL runs the calls of one group as one kernel; apart they could wait for each other.
        self.group._start_coalescing(self.device)
        for x, src, tag in recvs:
            self.recv(x, src, tag)
        for x, dst, tag in sends:
            self.send(x, dst, tag)
        return [self.group._end_coalescing(self.device)]

    def break_off(self, peers: Sequence[int] | None, connected: bool, over: Callable[[], bool]) -> None:
        if self.name != "gloo":
            return
        near = by_nearness(self.coord, self.size)
        own = gloo_address(self.group, self.coord)
        if own is None:
            return
        end_waits(own, near if peers is None else peers, over)
        if connected and not over():
            hang_up(own, lambda: [at for peer in near if (at := gloo_address(self.group, peer)) is not None])

    def close(self) -> None:
        if self._owned and dist.is_initialized():
            dist.destroy_process_group(self.group)


def _bytes(x: Tensor) -> Tensor:
    """The same memory, in a dtype that can be moved; its shape does not matter to a message."""
    return x if x.dtype in _MOVED else _moved(x)


def _moved(x: Tensor) -> Tensor:
    """The same memory, flat, in a dtype that can be moved."""
    flat = x.view(-1)
    return flat if x.dtype in _MOVED else as_bytes(flat)


def _added(x: Tensor) -> Tensor:
    """The same memory, flat, in a dtype that can be added: complex numbers add as pairs, bools as bytes."""
    flat = x.view(-1)
    if x.dtype.is_complex:
        return torch.view_as_real(flat).view(-1)
    return flat.view(torch.uint8) if x.dtype == torch.bool else flat


@cache
def _options(
    kind: Any,
    blocking: bool,
    op: str | None = None,
    root: int | None = None,
    device: torch.device | None = None,
) -> Any:
    """An option object, made once and never changed."""
    options = kind()
    options.asyncOp = not blocking
    if op is not None:
        options.reduceOp = _OPS[op]
    if root is not None:
        options.rootRank = root
    if device is not None:
        options.device = device
    return options
