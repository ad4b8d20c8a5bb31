"""A test backend for CPU tensors that orders calls and runs them asynchronously like NCCL, with Gloo as the transport.

    with emulated_nccl(), meshcomm.init(dims={"dp": 4}, backend=NAME, device="cpu") as mesh: ...

It behaves like a GPU as follows (docs/design/emulated_nccl.md gives every rule and its source). A communicator is a
queue that runs its calls in order, and a call returns once it is queued. `wait` orders later work after the call without
blocking the host; reading a value blocks the host. A message completes when its peer has arrived. Messages outside a group run
one after another. A dead peer is detected only over a network. A watchdog detects a queue that makes no progress, and
terminates the process with SIGABRT. `abort` drops all calls and leaves memory in its current state.

Where a GPU would wait, the host waits at the first operator that accesses the tensor. An operator that accesses it before
the program has waited for the call raises UnorderedAccess, because this would be a race on a GPU.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import count
from operator import itemgetter
from queue import SimpleQueue
from types import FrameType, SimpleNamespace
from typing import Any, Final, NamedTuple, final
from unittest.mock import patch
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from meshcomm.comm.checks import span_of
from meshcomm.dryrun.torch_private import modes_left, schema_of
from meshcomm.parallel.torch_private import FakeTensor
from meshcomm.reductions import WIRE_OPS
from meshcomm.simulator.python_group import METHODS, Method, PythonGroup
from meshcomm.transport.connections import Connections
from meshcomm.transport.torch_changes import own_waits
from meshcomm.transport.torch_private import (
    DispatchMode,
    Work,
    bindings,
    compiled_files,
    explicit_kernel,
    has_backend,
    keep_for_good,
    leaves_of,
)

NAME: Final = "emulated_nccl"

_KINDS: Final = sorted({"BARRIER", *(method.hook for method in METHODS.values())})
_LACKING: Final = tuple(
    getattr(dist.ReduceOp, op.reduce_op) for op in WIRE_OPS.values() if "nccl" in op.lacking
)

# How many seconds torch's watchdog takes to handle a lost peer: it reads the failed call's stack, then waits for all ranks'
# dumps.
STACK_S: Final = 6.5
PEERS_DUMP_S: Final = 60.0

# Operators that do not access the memory of their arguments.
_UNTOUCHED: Final = frozenset(
    (
        "aten::empty_like", "aten::new_empty", "aten::new_empty_strided", "aten::new_zeros", "aten::new_ones",
        "aten::new_full", "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::sym_size",
        "aten::is_pinned", "aten::record_stream", "_c10d_functional::wait_tensor",
        "_c10d_functional::_wrap_tensor_autograd",
    )
)  # fmt: skip


class UnorderedAccess(AssertionError):
    """An operator accesses memory of a pending call that has not been waited for, which would be a race on a GPU."""


class HostSync(RuntimeError):
    """The host read a value during graph capture or inside `no_host_sync`."""


class _Call(NamedTuple):
    """A call to one of the group's methods. in_place: whether the call overwrites its inputs. blocking: whether the caller
    gets no Work.
    """

    kind: str
    run: Callable[[], Any]
    inputs: Sequence[Tensor] = ()
    outputs: Sequence[Tensor] = ()
    in_place: bool = False
    root: int = -1
    blocking: bool = False

    @property
    def memory(self) -> list[tuple[Tensor, bool]]:
        """The call's tensors, each with a flag for whether the call writes to it."""
        return [*((x, True) for x in self.outputs), *((x, self.in_place) for x in self.inputs)]


@final
class _Item:
    """One call in a queue. over: an event that is set once the call has run or `abort` has dropped it."""

    def __init__(
        self, queue: EmulatedNCCL, name: str, run: Callable[[], Any], tensors: Sequence[tuple[Tensor, bool]]
    ) -> None:
        self.queue = queue
        self.name = name
        self.run = run
        self.tensors = tensors
        self.memory = [(*span_of(x), written) for x, written in tensors if x.numel()]
        self.number = self.record = 0
        self.queued_at = 0.0
        self.after: list[_Item] = []
        self.over = threading.Event()
        self.waited = False

    @property
    def ordered(self) -> bool:
        """Whether the program's next operators are ordered after this call."""
        return self.waited or self.number <= self.queue.waited

    def meets(self, begin: int, end: int, writes: bool) -> bool:
        """Return whether a read or write of this memory must wait for this call."""
        return any(begin < last and first < end and (writes or wrote) for first, last, wrote in self.memory)


class EmulatedWork(Work):  # type: ignore[misc]
    """Like WorkNCCL: `wait` blocks the host only for a barrier, or if a timeout is given."""

    def __init__(self, items: Sequence[_Item], host_waits: bool = False) -> None:
        super().__init__()
        self._items = items
        self._host_waits = host_waits

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for item in self._items:
            item.queue.order(item)
        if timeout.total_seconds() > 0:
            # As with TORCH_NCCL_BLOCKING_WAIT, an expired timeout aborts the communicator.
            ends = time.monotonic() + timeout.total_seconds()
            for item in self._items:
                if not item.over.wait(max(0.0, ends - time.monotonic())):
                    item.queue.abort()
                    raise dist.DistBackendError(f"Watchdog caught collective operation timeout: {item.name}")
        elif self._host_waits:
            for item in self._items:
                _block(item)
        # As with NCCL, wait also returns True for an aborted call: its event completes, and errors are no longer checked.
        return True

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        if _emulation().graph is not None:
            raise HostSync("Work.is_completed was called during graph capture, which ends the capture")
        return all(item.over.is_set() for item in self._items)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return None

    def result(self) -> list[Tensor]:
        return [x for item in self._items for x, _ in item.tensors]

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        # As with NCCL, the future completes once the call is queued, because the current stream uses the value after the call.
        self.wait()
        future.set_result(self.result())
        return future


@final
class EmulatedNCCL(PythonGroup):
    """A communicator. Its first call connects it and waits for its peers, like NCCL without a bound device."""

    # torch's batch_isend_irecv checks this attribute, and then runs a batch as one group.
    supports_coalescing = True

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size, timeout, NAME)
        self._store, self._rank, self._size = store, rank, size
        self._meets = store.clone()
        self.aborted = threading.Event()
        self.waited = 0
        self._connected: Any = None
        self._sockets = Connections()
        self._items: SimpleQueue[_Item | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        # The part of torch's watchdog that handles network errors.
        self._watchdog: threading.Thread | None = None
        handled = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"), "TORCH_NCCL_DUMP_ON_TIMEOUT"
        self._ends_process, self._dumps = handled[0] != "0", os.environ.get(handled[1], "1") != "0"
        _emulation().queues.append(self)

    def abort(self) -> None:
        """Drop all queued and running calls, and leave memory as it is. It can be called from any thread.

        It has no effect on a communicator that is not connected yet. It returns only when no kernel is running on any
        communicator that was not aborted.
        """
        if self._connected is None or self.aborted.is_set():
            return
        self.aborted.set()
        self._items.put(None)
        for item in _emulation().pending_of(self):
            _emulation().is_over(item)
        # Closing Gloo's sockets is the only way to end a running Gloo call.
        self._sockets.cut()
        while any(not item.queue.aborted.is_set() for item in list(_emulation().pending)):
            time.sleep(0.01)

    def shutdown(self) -> None:
        """Wait without a timeout for all queued calls, as ncclCommFinalize does, and for graphs. Then close."""
        while _active and any(graph.holds(self) for graph in list(_emulation().graphs)):
            time.sleep(0.05)
        if not self.aborted.is_set():
            for item in _emulation().pending_of(self):
                _block(item)
        self._items.put(None)
        self.join()
        if self._watchdog is not None:
            self._watchdog.join()
        if self.aborted.is_set():
            # The destructor would wait forever for a call that was aborted.
            keep_for_good([self._connected])
        self._connected = None
        if self in _emulation().queues:
            _emulation().queues.remove(self)

    def join(self) -> None:
        """Wait for the thread to end. If it were inside Gloo at interpreter shutdown, the process would crash."""
        if self._thread is not None:
            self._thread.join(10.0 if self.aborted.is_set() else None)

    # -- calls ------------------------------------------------------------------------------------------

    def collective(
        self, name: str, method: Method, arguments: tuple[Any, ...], options: Any
    ) -> EmulatedWork | None:
        kind, inputs = method.hook, method.inputs
        given = arguments if options is None else (*arguments, options)
        if (op := getattr(options, "reduceOp", None)) in _LACKING:
            raise ValueError(f"Cannot use {op} with NCCL")
        outs = leaves_of(arguments[0])
        ins = leaves_of(arguments[inputs])
        root = getattr(options, "rootRank", -1)

        def run() -> None:
            self._expect(kind, [x.numel() for x in (outs if kind.startswith("ALLGATHER") else ins)], root)
            # Gloo may offer a call only under its older name (torch 2.13), or only for one tensor at a time (torch 2.11).
            for method in (name, *(other for other, row in METHODS.items() if row.hook == kind)):
                if hasattr(self._connected, method):
                    getattr(self._connected, method)(*given).wait()
                    return
            single = "_allgather_base" if kind.startswith("ALLGATHER") else "_reduce_scatter_base"
            for out, x in zip(*arguments, strict=True):
                getattr(self._connected, single)(out, x, options).wait()

        blocking = options is not None and not getattr(options, "asyncOp", True)
        in_place = not inputs and not (kind == "BROADCAST" and root == self._rank)
        return self._call(_Call(kind, run, ins, outs if inputs else (), in_place, root, blocking))

    def barrier(self, opts: Any = None) -> EmulatedWork | None:
        blocking = opts is not None and not opts.asyncOp
        return self._call(_Call("BARRIER", self._run_barrier, blocking=blocking))

    def _expect(self, kind: str, sizes: Sequence[int], root: int) -> None:
        """Raise RuntimeError if the ranks run different kernels. On GPUs, mismatched kernels would hang or move wrong data."""
        mine = torch.tensor([_KINDS.index(kind), root, sum(sizes)], dtype=torch.int64)
        if kind in ("GATHER", "SCATTER") or "ALLTOALL" in kind:
            mine[2] = 0
        everyone = [torch.empty_like(mine) for _ in range(self._size)]
        self._connected.allgather([everyone], [mine]).wait()
        if any(not torch.equal(theirs, mine) for theirs in everyone):
            raise RuntimeError("the ranks run different kernels")

    def _run_barrier(self) -> None:
        self._expect("BARRIER", [], -1)
        self._connected.allreduce([torch.zeros(1)]).wait()

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> EmulatedWork | None:
        return self._message("SEND", tensors, peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> EmulatedWork | None:
        return self._message("RECV", tensors, peer)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> EmulatedWork:
        raise RuntimeError("Backend nccl does not support recvAnysource")

    def _message(self, kind: str, tensors: list[Tensor], peer: int) -> EmulatedWork | None:
        # A message outside a group uses a separate communicator of its two ranks, so it never matches one in a group.
        tag = 0 if _emulation().depth else 2

        def start() -> SimpleNamespace:
            # NCCL has no tags, so messages between two ranks are matched in order. The size is sent first.
            size = torch.tensor([sum(x.numel() for x in tensors)])
            come = size.clone()
            first = getattr(self._connected, kind.lower())([come], peer, tag)
            if kind == "SEND":
                second = self._connected.send(tensors, peer, tag + 1)
                return SimpleNamespace(wait=lambda: (first.wait(), second.wait()))
            return SimpleNamespace(wait=partial(self._receive, first, come, size, tensors, peer, tag + 1))

        ins, outs = (tensors, ()) if kind == "SEND" else ((), tensors)
        return self._call(_Call(kind, start, ins, outs, root=peer))

    def _receive(
        self, first: Any, come: Tensor, size: Tensor, tensors: list[Tensor], peer: int, tag: int
    ) -> None:
        first.wait()
        if not torch.equal(come, size):
            raise RuntimeError("the two ends of a message have different sizes")
        self._connected.recv(tensors, peer, tag).wait()

    def _start_coalescing(self, device: torch.device) -> None:
        emulation = _emulation()
        emulation.depth += 1
        if emulation.depth == 1:
            emulation.together = []

    def _end_coalescing(self, device: torch.device) -> EmulatedWork:
        """Queue the calls since `_start_coalescing` as one kernel, whose messages do not block each other."""
        emulation = _emulation()
        emulation.depth -= 1
        items = [] if emulation.depth else emulation.together
        runs = [(item.name == "SEND", item.run) for item in items]

        def run() -> None:
            begun = [(sends, start()) for sends, start in runs]
            # Wait for receives first, because a send waits until its peer has requested the data.
            for _, work in sorted(begun, key=itemgetter(0)):
                if work is not None:  # a message
                    work.wait()

        whole = _Item(self, "COALESCED", run, [tensor for item in items for tensor in item.tensors])
        if not emulation.depth:
            self._queue(whole)
        return EmulatedWork([whole])

    def _call(self, call: _Call) -> EmulatedWork | None:
        """Queue a call or save it for `_end_coalescing`, and call the hooks like torch. Return None for a blocking call."""
        return self.hooked(
            call.kind, call.inputs, call.outputs, call.root, call.blocking, lambda: self._enter(call)
        )

    def _enter(self, call: _Call) -> EmulatedWork | None:
        if self.aborted.is_set():
            raise dist.DistBackendError(f"NCCL communicator was aborted on rank {self._rank}.")
        item = _Item(self, call.kind, call.run, call.memory)
        work = None if call.blocking else EmulatedWork([item], host_waits=call.kind == "BARRIER")
        if _emulation().depth:
            _emulation().check(item)
            _emulation().together.append(item)
        else:
            if call.kind in ("SEND", "RECV"):
                item.run = lambda: call.run().wait()
            self._queue(item)
        if call.blocking:
            self.order(item)
            if _emulation().at_once or call.kind == "BARRIER":
                _block(item)
        return work

    def order(self, item: _Item) -> None:
        """Order the program's later work after `item` and all earlier items of this queue."""
        item.waited = True
        self.waited = max(self.waited, item.number)

    def _queue(self, item: _Item) -> None:
        emulation = _emulation()
        emulation.check(item)
        self._connect()
        self.number += 1
        item.number = self.number
        if emulation.graph is not None:
            emulation.graph.items.append(item)
            return
        self.submit(item)

    def submit(self, item: _Item) -> None:
        """Add an item to the queue."""
        _compiled_code_waits()
        item.queued_at, item.record = time.monotonic(), next(_emulation().records)
        _emulation().pending.append(item)
        self._items.put(item)

    def _connect(self) -> None:
        if self._connected is not None:
            return
        # NCCL cannot distinguish dead peers from slow ones, so Gloo's timeout must not apply.
        # Wait for the peers at this point, because a large Gloo group would wait for them later, in its own thread.
        # NCCL's ranks wait for each other without the store, so the wait does not end if the store is lost.
        self._meets.set(f"connects/{self._rank}", "")
        self._meets.wait([f"connects/{rank}" for rank in range(self._size)], timedelta(days=1))
        with self._sockets.making():
            self._connected = dist.ProcessGroupGloo(self._store, self._rank, self._size, timedelta(days=1))
        self._thread = threading.Thread(target=self._work, name=f"{NAME}-{self._rank}", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        own_waits.given_up = self.aborted.is_set
        while (item := self._items.get()) is not None and not self.aborted.is_set():
            for other in item.after:
                other.over.wait()
            try:
                # A kernel does not check whether a tensor was created in inference mode.
                with torch.inference_mode():
                    item.run()
            except RuntimeError:
                # Within a host, NCCL does not detect that a peer has died or has made a different call.
                if _emulation().network and not self.aborted.is_set():
                    self._watchdog = threading.Thread(target=self._lost_peer, daemon=True)
                    self._watchdog.start()
                self.aborted.wait()
            _emulation().is_over(item)

    def _lost_peer(self) -> None:
        """Act like torch's watchdog after an ncclRemoteError."""
        ended = _emulation().ended
        if not ended.wait(STACK_S) and self._dumps:
            ended.wait(PEERS_DUMP_S)
        if self._ends_process and not ended.is_set():
            print(
                f"[Rank {self._rank}] ncclRemoteError: taking the process down", file=sys.stderr, flush=True
            )
            os.abort()


@final
class Graph:
    """The calls recorded in one capture. `replay` queues them again. Their communicators cannot close while the graph holds
    them.
    """

    def __init__(self) -> None:
        self.items: list[_Item] = []

    def holds(self, queue: EmulatedNCCL) -> bool:
        """Return whether the graph contains a call on this communicator."""
        return any(item.queue is queue for item in self.items)

    def reset(self) -> None:
        """Drop the captured calls."""
        self.items = []

    def replay(self) -> None:
        for captured in self.items:
            item = _Item(captured.queue, captured.name, captured.run, captured.tensors)
            item.waited, item.number = True, captured.number
            captured.queue.submit(item)


@final
class _Emulation(DispatchMode):  # type: ignore[misc]
    """The state that all communicators of this process share, such as pending calls, their memory, and the watchdog."""

    def __init__(self, dump_s: float, network: bool) -> None:
        super().__init__()
        self.network = network
        # The open group of calls. As in NCCL, calls on all communicators are held back until the group ends.
        self.depth, self.together = 0, list[_Item]()
        self.queues: list[EmulatedNCCL] = []
        self.pending: list[_Item] = []
        self.graph: Graph | None = None
        self.graphs: WeakSet[Graph] = WeakSet()
        self.records = count(1)
        self.strict = self.at_once = False
        self.syncs = 0
        self._dump_s = dump_s
        self.ended = threading.Event()
        self._watchdog = threading.Thread(target=self._watch, name=f"{NAME}-watchdog", daemon=True)
        self._watchdog.start()

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)  # fake tensors, with which DTensor infers shapes
        if any(kind not in (Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a subclass: its inner tensors arrive here later
        traced = modes_left() > 0
        if not traced:
            with self:  # such as reshape, which copies or does not
                if (results := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return results
        name = schema_of(func).name
        if name in ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero"):
            self.sync(name)
        if self.pending and name not in _UNTOUCHED and not func.is_view:
            for declared, argument in zip(schema_of(func).arguments, args, strict=False):
                self._touch(argument, declared.alias_info is not None and declared.alias_info.is_write, name)
            written = {
                argument.name
                for argument in schema_of(func).arguments
                if argument.alias_info and argument.alias_info.is_write
            }
            for key, argument in kwargs.items():
                self._touch(argument, key in written, name)
        if func.namespace not in ("meshcomm", "_c10d_functional"):
            return func(*args, **kwargs)
        if traced or _in_a_graph():
            # A tracer records the operator as a whole, and compiled code accesses memory without operators.
            return self._at_once(func, args, kwargs)
        if func.namespace == "meshcomm":
            with self:  # written in Python: its inner operators arrive here too
                return explicit_kernel(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _at_once(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator that communicates, and make the host wait for its calls."""
        before, self.at_once = self.at_once, True
        try:
            result = func(*args, **kwargs)
        finally:
            self.at_once = before
        for item in list(self.pending):
            if item.ordered:
                _block(item)
        return result

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compile functions as if this mode were inactive. The compiled code still runs under the mode."""
        return True

    def _touch(self, argument: Any, writes: bool, name: str) -> None:
        for x in leaves_of(argument):
            if isinstance(x, Tensor):
                self.touch(x, writes, name)

    def touch(self, x: Tensor, writes: bool, name: str) -> None:
        """Make an operator that is about to read or write `x` wait for the calls that must precede it."""
        begin, end = span_of(x) if x.numel() else (x.data_ptr(), x.data_ptr())
        for item in list(self.pending):
            if item.meets(begin, end, writes):
                if not item.ordered:
                    raise UnorderedAccess(
                        f"{name} touches memory of {item.name}, which has not been waited for"
                    )
                _block(item)

    def check(self, item: _Item) -> None:
        """Order a call that is about to be queued after the calls on other communicators that it must wait for.

        These are all calls that the program's stream has waited for, because a call runs after all earlier work on its stream.
        """
        for other in list(self.pending):
            if other.queue is item.queue:
                continue
            if other.ordered:
                item.after.append(other)
            elif any(other.meets(*own) for own in item.memory):
                raise UnorderedAccess(
                    f"{item.name} uses memory of {other.name} of another group, which has not been waited for"
                )

    def trace(self, **given: bool) -> str:
        """Return the pending calls in the format of torch's NCCL flight recorder, with the keys that meshcomm reads."""
        entries = [
            {
                "process_group": [item.queue.group_name, ""],
                "is_p2p": item.name in ("SEND", "RECV"),
                "profiling_name": f"nccl:{item.name.lower()}",
                "record_id": item.record,
                "state": "scheduled",
            }
            for item in list(self.pending)
        ]
        return json.dumps({"entries": entries})

    def sync(self, name: str) -> None:
        """Count a read of a value by the host, or raise HostSync if it is not allowed."""
        if self.graph is not None:
            raise HostSync(f"{name} during graph capture")
        if self.strict:
            raise HostSync(f"{name}: the host waits for the device")
        self.syncs += 1

    def is_over(self, item: _Item) -> None:
        """Mark `item` as over, so that nothing waits for it."""
        with suppress(ValueError):  # abort comes from another thread
            self.pending.remove(item)
        item.over.set()

    def pending_of(self, queue: EmulatedNCCL) -> list[_Item]:
        return [item for item in list(self.pending) if item.queue is queue]

    def _watch(self) -> None:
        while not self.ended.wait(0.1):
            now = time.monotonic()
            for item in list(self.pending):
                limit_s = item.queue.options._timeout.total_seconds()
                if now - item.queued_at > limit_s and not item.queue.aborted.is_set():
                    self._overdue(item, limit_s)

    def _overdue(self, item: _Item, limit_s: float) -> None:
        print(
            f"[Rank {item.queue.rank()}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum="
            f"{item.number}, OpType={item.name}, Timeout(ms)={limit_s * 1000:.0f}) ran for "
            f"{(time.monotonic() - item.queued_at) * 1000:.0f} milliseconds before timing out.",
            file=sys.stderr,
        )
        # The process stays alive while the flight recorder would be dumped.
        if self.ended.wait(self._dump_s):
            return
        if not item.over.is_set():
            print(
                f"[Rank {item.queue.rank()}] To avoid data inconsistency, we are taking the entire process down.",
                file=sys.stderr,
                flush=True,
            )
            os.abort()

    def close(self) -> None:
        self.ended.set()
        threads = [threading.Thread(target=queue.abort) for queue in self.queues]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for queue in list(self.queues):
            queue.join()
        # The thread may hold the last reference to a tensor, which Python cannot free from a thread at interpreter exit.
        self._watchdog.join()


_active: list[_Emulation] = []


def _emulation() -> _Emulation:
    if not _active:
        raise RuntimeError(f"{NAME} is used outside of `with emulated_nccl()`")
    return _active[-1]


@contextmanager
def emulated_nccl(dump_s: float = 1.0, *, network: bool = False) -> Iterator[None]:
    """Enable the backend "emulated_nccl", and order this thread's operators after its calls.

    dump_s:  the seconds between the watchdog's message and SIGABRT; torch's own watchdog takes up to 60.
    network: if True, each rank is treated as a separate host, so that a dead peer is detected.
    """
    if not has_backend(NAME):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    emulation = _Emulation(dump_s, network)
    _active.append(emulation)
    with ExitStack() as stack:
        stack.callback(_active.remove, emulation)
        stack.callback(emulation.close)
        stack.enter_context(emulation)
        stack.enter_context(patch.object(bindings, "_dump_nccl_trace_json", emulation.trace, create=True))
        for name in ("tolist", "numpy", "__array__"):
            stack.enter_context(patch.object(Tensor, name, _reads(name, getattr(Tensor, name))))
        yield


@contextmanager
def capture() -> Iterator[Graph]:
    """Capture the calls made in the block, like torch.cuda.graph. They run only when `Graph.replay` is called."""
    emulation = _emulation()
    emulation.graph = Graph()
    emulation.graphs.add(emulation.graph)
    try:
        with (
            patch.object(torch.cuda, "is_initialized", lambda: True),
            patch.object(torch.cuda, "is_current_stream_capturing", lambda: True),
        ):
            yield emulation.graph
    finally:
        emulation.graph = None


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Raise HostSync if the host reads a value in the block, like torch.cuda.set_sync_debug_mode("error")."""
    emulation = _emulation()
    emulation.strict = True
    try:
        yield
    finally:
        emulation.strict = False


def host_syncs() -> int:
    """Return how many values the host has read since `emulated_nccl` was entered."""
    return _emulation().syncs


def _create(creation: Any, options: Any = None) -> EmulatedNCCL:
    return EmulatedNCCL(creation.store, creation.group_rank, creation.group_size, creation.timeout)


def _reads(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return `method`, which reads a tensor's memory without an operator, wrapped in the checks for a host read."""

    def read(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if _active:
            _emulation().sync(name)
            _emulation().touch(x, False, name)
        return method(x, *args, **kwargs)

    return read


def _block(item: _Item) -> None:
    """Block the host until `item` is over. It waits in short intervals, so that signals are handled."""
    if _emulation().graph is not None:
        raise HostSync(f"the host waits for {item.name} during graph capture")
    while not item.over.wait(0.2):
        pass


def _in_a_graph() -> bool:
    """Return whether code compiled by torch.compile is running."""
    frame: FrameType | None = sys._getframe(2)
    files = compiled_files()
    while frame is not None:
        if frame.f_code.co_filename.startswith(files):
            return True
        frame = frame.f_back
    return False


def _compiled_code_waits() -> None:
    """Make Inductor's compiled code, which reads memory without operators, wait for the calls that must precede it."""
    inductor: Any = sys.modules.get("torch._inductor.output_code")
    if inductor is None or hasattr(inductor.CompiledFxGraph, NAME):
        return
    plain = inductor.CompiledFxGraph.__call__

    def run(self: Any, inputs: Sequence[Any]) -> Any:
        for item in list(_active[-1].pending) if _active else ():
            if item.ordered:
                _block(item)
        return plain(self, inputs)

    inductor.CompiledFxGraph.__call__ = run
    setattr(inductor.CompiledFxGraph, NAME, True)
