"""torch process groups of simulated ranks, so that DTensor, FSDP, DDP and torch's pipelines run on them unchanged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor
from torch.futures import Future

from meshcomm.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    Call,
    Collective,
    Reduce,
)
from meshcomm.errors import UnsupportedOp
from meshcomm.layout.sizes import fold
from meshcomm.simulator.gloo_order import reduced, reduced_apart
from meshcomm.simulator.python_group import Method, PythonGroup
from meshcomm.simulator.refusals import check_shapes, check_tensors
from meshcomm.simulator.scheduler import Actor
from meshcomm.simulator.start_order import Start, StartOrder
from meshcomm.simulator.torch_private import name_group, reduction_of
from meshcomm.simulator.transport import SimulatedGroup, SimulatedWork, Told, here
from meshcomm.transport import ProcessGroupTransport, Work
from meshcomm.transport.base import P2P, Transport
from meshcomm.transport.torch_private import Work as TorchWork
from meshcomm.watching.facts import OWN

_CPU: Final = torch.device("cpu")
# A tensor, or a list of tensors that a call treats as one.
_Data: TypeAlias = "Tensor | list[Tensor] | None"
# The calls that read and write the memory of tensors. The others copy tensors that are not contiguous.
_RAW: Final = (ALL_REDUCE, REDUCE, BROADCAST, SCATTER)


class StartedWork(TorchWork):  # type: ignore[misc]
    """The Work of a call that torch has made. tensors: its results. kept: contains the Works that were not waited for."""

    def __init__(self, works: Sequence[SimulatedWork], tensors: list[Tensor], kept: set[StartedWork]) -> None:
        super().__init__()
        self.works, self._tensors, self._kept = works, tensors, kept
        # torch may keep only the C++ part of a Work, which cannot wait.
        kept.add(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self.works:
            work.wait()
        self._kept.discard(self)
        return True

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        done = all(work.is_completed() for work in self.works)
        if done:
            self._kept.discard(self)
        return done

    is_success = is_completed

    def exception(self) -> None:
        return None

    def result(self) -> list[Tensor]:
        return self._tensors

    def get_future(self) -> Future[Any]:
        """Return a completed future. C++ blocks its thread in a future's wait, so no other rank could run in the meantime."""
        self.wait()
        future: Future[Any] = Future()
        future.set_result(self._tensors)
        return future

    def _source_rank(self) -> int:
        return self.works[0].source


@final
class SimulatedProcessGroup(PythonGroup):
    """One rank's part of a group. Every call is compared with the other ranks' calls.

    start_order: the order of starts on all NCCL groups. timeout: not used, but reported. create: creates this rank's part of
    another group; see `torch_private.Create`.
    """

    supports_splitting = True

    def __init__(
        self,
        actor: Actor,
        group: SimulatedGroup,
        start_order: StartOrder,
        timeout: timedelta,
        create: Callable[[str, tuple[int, ...], timedelta, str], SimulatedProcessGroup],
    ) -> None:
        self.members = group
        self.coord = group.ranks.index(actor.rank)
        # DDP would ask a group named after a backend of torch for that backend's C++ object.
        super().__init__(self.coord, len(group.ranks), timeout, "simulated")
        self._actor = group.actors[self.coord] = actor
        self._start_order, self._create = start_order, create
        # The number of messages started so far, by sender and receiver.
        self._sent: Counter[tuple[int, int]] = Counter()
        # The messages since `_start_coalescing`, each with its Work; and the Works of collectives.
        self._together: list[tuple[P2P, StartedWork]] | None = None
        self._also: list[SimulatedWork] = []
        self._kept: set[StartedWork] = set()
        # What the mesh says about the next call.
        self.announced: Told | None = None
        self.serve({_CPU.type: "gloo"}, None)

    def serve(self, backends: Mapping[str, str], store: Any) -> None:
        """Act as a group with this backend on each type of device: refuse the operations that it lacks, and check the order of
        calls as it needs it.
        """
        self.backends, self._store = dict(backends), store
        self.backend = backends.get(_CPU.type) or next(iter(backends.values()))
        self.ordered = "nccl" in self.backend
        # torch's batch_isend_irecv then starts all messages as one call.
        self.supports_coalescing = self.ordered

    @property
    def _device_types(self) -> list[torch.device]:
        # The tensors of a group that is only for other devices are on the CPU too.
        return [torch.device(kind) for kind in self.backends] if _CPU.type in self.backends else [_CPU]

    def get_group_store(self) -> Any:
        return self._store

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> SimulatedProcessGroup | None:
        """Return this rank's part of a new group of the given coords, or None if it is not among them."""
        if self.coord not in ranks:
            return None
        described = group_desc or f"{self.group_desc}:split"
        of_world = tuple(self.members.ranks[coord] for coord in ranks)
        part = self._create(group_name or "", of_world, timeout or self.options._timeout, described)
        kept = {
            kind: name for kind, name in self.backends.items() if torch.device(kind) in (device_types or [])
        }
        part.serve(kept or self.backends, self._store)
        name_group(part, group_name or "", described)
        part.meet()
        return part

    def meet(self) -> None:
        """Wait for the other members, where the backend connects them when the group is created. NCCL connects them later."""
        if "gloo" in self.backend:
            self.members.meet(self.coord)

    def shutdown(self) -> None:
        self._kept.clear()

    abort = shutdown

    # -- collectives ------------------------------------------------------------------------------------

    def start(self, call: Call, reduce: Reduce = reduced) -> SimulatedWork:
        """Start a collective on contiguous tensors. reduce: how it reduces."""
        group, actor, row = self.members, self._actor, call.row
        group.scheduler.operates(actor)
        told, self.announced = self.announced, None
        self.number += 1
        if self.ordered:
            name = row.name if told is None else told[1]
            what = f"{name}, call {self.number} on {group.label} at {here()}"
            start, one = Start(actor.rank, actor.name, what), [(id(group), self.number)]
            for order in (self._start_order, group.order):
                if (error := order.start(one, len(group.ranks), start)) is not None:
                    group.scheduler.fail(error)
        return group.start(self.coord, call, told, reduce)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> StartedWork:
        blocking = not getattr(opts, "asyncOp", True)
        call = Call(BARRIER, blocking=blocking)
        return self.hooked("BARRIER", [], [], -1, blocking, lambda: self._started([self.start(call)], []))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        if _CPU.type not in self.backends:
            raise ValueError("monitored_barrier requires a group with a CPU-capable backend (e.g. GLOO).")
        self.barrier(SimpleNamespace(asyncOp=False)).wait()

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> StartedWork:
        if self.ordered:
            raise RuntimeError(f"{self.backend} does not support allgather_coalesced")
        # torch passes the results by rank, then by input.
        by_input = [list(each) for each in zip(*outputs, strict=True)]
        method, options = Method(ALL_GATHER, ALL_GATHER.hooks[2], 1), opts or SimpleNamespace(asyncOp=True)
        return self.collective("allgather_coalesced", method, (by_input, list(inputs)), options)

    def collective(self, name: str, method: Method, arguments: tuple[Any, ...], options: Any) -> StartedWork:
        row = method.row
        blocking, where = not options.asyncOp, f"{row.name} on {self.members.label}"
        root = getattr(options, "rootRank", -1)
        if row.root is not None:
            self._check_rank(root)
        op, factor = reduction_of(options) if row.reduces else (None, None)
        padded: tuple[Any, ...] = *arguments, None, None
        first, second, *splits = padded
        if row.in_place:
            # Gloo reduces tensors that are passed together as one, of which the order of additions depends.
            pairs: list[tuple[_Data, _Data]] = [
                (x, None) for x in (first if self.ordered or len(first) == 1 else [first])
            ]
        elif isinstance(first, Tensor) or row is ALL_TO_ALL:
            pairs = [(second, first)]
        else:
            # Ranks without input, or without a result, pass an empty list.
            pairs = list(zip_longest(second, first))
        inputs = [x for pair in pairs for x in _tensors(pair[0])]
        outputs = [x for pair in pairs for x in _tensors(pair[1])]
        check_tensors(self.backend, row, op, inputs, outputs, where)
        for x, out in pairs if self.backend == "gloo" else ():
            if x is not None and out is not None:
                check_shapes(row, x, out, self.coord, self.size(), where)

        def start() -> StartedWork:
            works = [self._one(row, x, out, splits, op, factor, root, blocking) for x, out in pairs]
            return self._started(works, outputs or inputs)

        return self.hooked(method.hook, inputs, outputs, root, blocking, start)

    def _one(
        self,
        row: Collective,
        data: _Data,
        result: _Data,
        splits: Sequence[Any],
        op: str | None,
        factor: Any,
        root: int,
        blocking: bool,
    ) -> SimulatedWork:
        """Start one collective. data, result: its input and its output; an in-place collective writes to `data`."""
        if row in _RAW:
            data, result = self._memory(row, data), self._memory(row, result)
        x = _flat(data)
        out: Any = result if _is_flat(result) else _room(result)
        lengths: Any = ()
        if row is ALL_TO_ALL:
            lengths = self._lengths(data, result, splits)
        elif row is REDUCE_SCATTER and isinstance(data, list) and len({part.numel() for part in data}) > 1:
            lengths = [out.numel()] * self.size(), [part.numel() for part in data]
        elif x is not None and out is not None:
            whole, part = (out, x) if row.joins else (x, out)
            if whole.numel() != part.numel() * self.size():
                raise ValueError(
                    f"{row.name}: {whole.numel()} elements are not {self.size()} times {part.numel()} elements"
                )
        if factor is not None and x is not None:
            x, op = x * factor, "sum"
        apart = row.splits and isinstance(data, list)
        reduce = partial(reduced_apart, lengths[1] if lengths else None) if apart else reduced
        call = Call(row, x, out, op, root, lengths, blocking)
        work = self.start(call, reduce)
        target, source = (data, x) if row.in_place else (result, out)
        if target is not None and source is not target and (row.root != "dst" or root == self.coord):
            work.then(lambda: _unpack(source, _tensors(target)))
        return work

    def _memory(self, row: Collective, data: _Data) -> Any:
        """Return the memory of tensors as flat tensors: Gloo and NCCL ignore the order of a dense tensor's axes."""
        if isinstance(data, list):
            return [self._memory(row, x) for x in data]
        if data is None or data.layout is not torch.strided or data.is_contiguous():
            return data
        if not torch.ops.aten.is_non_overlapping_and_dense(data):
            raise UnsupportedOp(
                f"{self._actor.name}: {row.name} on {self.members.label} of a tensor whose memory has gaps or overlaps",
                given=f"shape {tuple(data.shape)}, strides {data.stride()}",
                expected="a dense tensor: Gloo reads and writes the memory after the first element, whatever the strides are",
                hint="x.contiguous(), and copy the result back",
            )
        return data.detach().as_strided((data.numel(),), (1,))

    def _lengths(self, data: Any, result: Any, splits: Sequence[Any]) -> tuple[list[int], list[int]]:
        """Return the numbers of elements that each rank sends to this one, and that this rank sends to each."""
        if isinstance(data, list):
            if len(result) != self.size() or len(data) != self.size():
                raise ValueError(
                    f"{len(data)} input and {len(result)} output tensors for {self.size()} ranks"
                )
            return [x.numel() for x in result], [x.numel() for x in data]
        if not (data.is_contiguous() and result.is_contiguous()):
            raise ValueError("Tensors must be contiguous")
        lengths = []
        for x, rows in zip((result, data), splits, strict=False):
            if not rows and x.size(0) % self.size():
                raise ValueError("Tensor's dim 0 does not divide equally across group size")
            if rows and (len(rows) != self.size() or sum(rows) != x.size(0)):
                raise ValueError(
                    f"split sizes {list(rows)} do not divide {x.size(0)} rows among {self.size()} ranks"
                )
            row = x[0].numel() if x.size(0) else 0
            lengths.append([n * row for n in rows or [x.size(0) // self.size()] * self.size()])
        return lengths[0], lengths[1]

    # -- messages ---------------------------------------------------------------------------------------

    def start_messages(self, batch: Sequence[P2P], single: bool) -> list[SimulatedWork]:
        """Start messages as one operation. single: see Transport.start_p2p."""
        site, scheduler, group = here(), self.members.scheduler, self.members
        if self.ordered:
            calls = []
            for direction, _, peer, _ in batch:
                assert peer is not None
                ends = (self.coord, peer) if direction == "send" else (peer, self.coord)
                self._sent[ends] += 1
                calls.append((*ends, self._sent[ends]))
            start = Start(self._actor.rank, self._actor.name, f"{site.call} on {group.label} at {site}")
            if (error := group.order.start(calls, 2, start)) is not None:
                scheduler.fail(error)
        works = []
        for message in batch:
            scheduler.operates(self._actor)
            scheduler.maybe_pause(self._actor)
            works.append(group.start_message(self.coord, message, site, single and self.ordered))
        return works

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> StartedWork:
        return self._message(P2P("send", _alone(tensors), peer, tag))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> StartedWork:
        return self._message(P2P("recv", _alone(tensors), peer, tag))

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> StartedWork:
        if self.ordered:
            raise RuntimeError(f"{self.backend} does not support recvAnysource")
        return self._message(P2P("recv", _alone(tensors), None, tag))

    def _check_rank(self, rank: int) -> None:
        if rank not in range(self.size()):
            raise RuntimeError(
                f"rank {rank} is not in {self.members.label}, which has ranks 0 to {self.size() - 1}"
            )

    def _message(self, message: P2P) -> StartedWork:
        sends, x, peer, _ = message
        if peer is not None:
            self._check_rank(peer)
        tensors = ([x], []) if sends == "send" else ([], [x])
        return self.hooked(
            sends.upper(),
            *tensors,
            -1 if peer is None else peer,
            False,
            lambda: self._posted(message),
        )

    def _posted(self, message: P2P) -> StartedWork:
        if self._together is None:
            return self._started(self.start_messages([message], True), [message.x])
        # torch waits for the Work of the batch.
        work = StartedWork((), [message.x], set())
        self._together.append((message, work))
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        if not self.ordered:
            raise RuntimeError(f"Backend {self.backend} does not implement startCoalescing")
        self._together = []

    def _end_coalescing(self, device: torch.device) -> StartedWork:
        batch, self._together = self._together or [], None
        also, self._also = self._also, []
        works = self.start_messages([message for message, _ in batch], False) if batch else []
        for (_, started), work in zip(batch, works, strict=True):
            started.works = [work]
        return self._started([*also, *works], [message.x for message, _ in batch])

    def _started(self, works: Sequence[SimulatedWork], tensors: list[Tensor]) -> StartedWork:
        for work in works:
            work.belongs_to_torch()
        if self._together is not None:
            self._also += works
        return StartedWork(works, tensors, self._kept)


def label_of(described: str, ranks: Sequence[int]) -> str:
    """Return how errors name a group that torch describes as `described`."""
    if described == "default_pg":
        return "default group"
    if described in ("", "undefined"):
        return f"group of ranks {fold(ranks)}"
    return f"{described.removeprefix('mesh_')} of ranks {fold(ranks)}"


def _alone(tensors: list[Tensor]) -> Tensor:
    (x,) = tensors
    if not x.is_contiguous():
        raise ValueError("Tensors must be contiguous")
    return x.view(-1)


def _tensors(data: _Data) -> list[Tensor]:
    if data is None:
        return []
    return [data] if isinstance(data, Tensor) else list(data)


def _is_flat(data: Any) -> bool:
    return data is None or (isinstance(data, Tensor) and (data.is_sparse or data.is_contiguous()))


def _flat(data: _Data) -> Tensor | None:
    """Return the values of `data` as one contiguous tensor: `data` itself if it is one."""
    if data is None or isinstance(data, Tensor):
        return data if _is_flat(data) else data.contiguous()  # type: ignore[union-attr]
    return torch.cat([x.reshape(-1) for x in data])


def _room(data: Any) -> Tensor:
    tensors = _tensors(data)
    return tensors[0].new_empty(sum(x.numel() for x in tensors))


def _unpack(source: Any, targets: Sequence[Tensor]) -> None:
    parts = source.view(-1).split([x.numel() for x in targets])
    for target, part in zip(targets, parts, strict=True):
        target.copy_(part.view(target.shape))


@final
class SimulatorTransport(ProcessGroupTransport):
    """The calls of a mesh on a simulated group."""

    tells_unwaited = compares_calls = True
    timeout_s = 0.0
    wait_within = Transport.wait_within
    group: SimulatedProcessGroup

    def announce_call(self, name: str, call: str, facts: dict[str, Any]) -> None:
        if call == ALL_TO_ALL.name:
            # The sizes themselves are compared.
            facts = {fact: value for fact, value in facts.items() if fact not in OWN and fact != "elements"}
        self.group.announced = name, call, facts

    def start(self, call: Call) -> SimulatedWork:
        return self.group.start(call)

    def prepare(self, row: Collective, op: str | None, root: int, blocking: bool) -> None:  # type: ignore[override]
        return None

    def start_p2p(self, batch: Sequence[P2P], single: bool = False) -> Sequence[SimulatedWork]:
        if self.group.announced is not None:
            # A collective that runs over messages: no other call of its ranks would be compared with it.
            self.start(Call(BARRIER)).wait()
        return self.group.start_messages(batch, single)

    def source_of(self, work: Work) -> int:
        assert isinstance(work, SimulatedWork)
        return work.source

    def abort(self) -> None:
        return
