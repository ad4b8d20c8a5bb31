"""The bytes that this process's tensors hold, now and at the peak, by purpose."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, Literal, NamedTuple, Protocol, Self, TypeAlias, final, get_args
from unittest.mock import patch

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

from meshcomm.dryrun.arena import Arena
from meshcomm.parallel.torch_private import parts_of_dtensor
from meshcomm.train.torch_private import backward_number
from meshcomm.transport.torch_private import DispatchMode, storage_id
from meshcomm.watching.callsite import is_ours, line_of

MemoryPart: TypeAlias = Literal["weights", "gradients", "optimizer", "activations", "gathered", "rest"]
PARTS: Final[tuple[MemoryPart, ...]] = get_args(MemoryPart)
"""The purposes of memory. weights: this rank's parameters and buffers.
gradients: this rank's gradients, including those that FSDP has not yet reduced.
activations: tensors created in forward passes, including recomputed ones. gathered: weights that FSDP has unsharded.
rest: communication buffers, and temporary memory of backward passes and of the optimizer."""

# The namespaces of composite operators, which include calls on groups.
COMPOSED: Final = ("meshcomm", "meshcomm_recompute")
# The files that call a rank's program.
_RUNNERS: Final = tuple(str(Path(__file__).with_name(name)) for name in ("rank.py", "script.py"))


@final
class _Held:
    """One storage's memory. part: its purpose, or None until that is known. since: the clock's value at its creation."""

    __slots__ = ("forward", "nbytes", "part", "since", "watch")

    def __init__(self, nbytes: int, part: MemoryPart | None, forward: bool, since: int, watch: Any) -> None:
        self.nbytes, self.part, self.forward, self.since, self.watch = nbytes, part, forward, since, watch

    @property
    def known(self) -> MemoryPart:
        return self.part or ("activations" if self.forward else "rest")


class Maker(NamedTuple):
    """What creates memory. line: of user code, if any."""

    operator: str
    line: tuple[CodeType, int] | None


class Tape(Protocol):
    """What is told of changes of memory. key: identifies a storage."""

    def made(self, key: int, nbytes: int, forward: bool, by: Maker) -> None: ...
    def resized(self, key: int, before: int, after: int, by: Maker) -> None: ...
    def named(self, key: int, part: MemoryPart) -> None: ...
    def freed(self, key: int) -> None: ...


class Peak(NamedTuple):
    """The moment of peak memory. parts: bytes by purpose. during: the pass or other phase. at: the line of user code as
    file:line, if any. operator: the name of the operator that reached the peak.
    """

    nbytes: int
    parts: dict[MemoryPart, int]
    during: str
    at: str
    operator: str


@final
class Ledger:
    """A context manager that tracks the memory of every reported storage until it is freed.

    Each storage's bytes are counted once. Memory used inside kernels is not counted. arena: what torch's allocator reserves.
    flops, moved: FLOPs since the start or the last `restart`, and bytes that operators without FLOPs have read and written. stepping: whether an optimizer step is running.

    Args:
        stretch: returns the current phase of the program as text, and whether it is a forward pass.
        hollow: whether storages have an address but no memory. torch cannot resize such storages, so the ledger records
            the new size instead.
    """

    def __init__(self, stretch: Callable[[], tuple[str, bool]], *, hollow: bool = False) -> None:
        self.live = 0
        self.stepping = False
        self._stretch = stretch
        self._hollow = hollow
        self._held: dict[int, _Held] = {}
        self._clock = 0
        self.arena = Arena()
        # Told what happens while a pass is recorded.
        self.tape: Tape | None = None
        self.restart()

    def restart(self) -> None:
        """Discard the peak so far, and start measuring it again."""
        self._peak, self._peak_clock = self.live, self._clock
        self.flops = self.moved = 0
        # Memory that was held at the peak and has been freed since then.
        self._gone: list[_Held] = []
        self._where: tuple[str, Any, str] = (self._stretch()[0], None, "")

    def call_it(self, part: MemoryPart, tensors: Iterable[Any]) -> None:
        """Set the purpose of the memory of `tensors`. A DTensor's memory is that of its local tensor."""
        for tensor in tensors:
            # Use no operator, because taking a view of memory that FSDP has freed would allocate it again.
            mine = parts_of_dtensor(tensor)[0] if isinstance(tensor, DTensor) else tensor
            if (key := storage_id(mine)) in self._held:
                self.name(key, part)

    def now(self) -> dict[MemoryPart, int]:
        """Return the bytes that are currently held, by purpose."""
        return self._sums(self._holdings())

    def peak(self) -> Peak:
        """Return the peak since the start or the last `restart`, split by the purposes that are known by now."""
        holdings = [holding for holding in self._holdings() if holding.since <= self._peak_clock]
        during, line, operator = self._where
        where = "" if line is None else line_of(*line)
        return Peak(self._peak, self._sums([*holdings, *self._gone]), during, where, operator)

    def __enter__(self) -> Ledger:
        resize, size, ledger = UntypedStorage.resize_, UntypedStorage.nbytes, self

        def resized(storage: UntypedStorage, size: int) -> Any:
            # FSDP frees gathered weights by resizing their storages, which bypasses all operators.
            held = ledger._held.get(storage_id(storage))
            if not ledger._hollow or held is None:
                resize(storage, size)
            if held is not None and held.nbytes != size:
                ledger._clock += 1
                ledger._becomes(storage_id(storage), held, size, "resize_")
            return storage

        def sized(storage: UntypedStorage) -> int:
            held = ledger._held.get(storage_id(storage))
            return size(storage) if held is None else held.nbytes

        self._patches = ExitStack()
        self._patches.enter_context(patch.object(UntypedStorage, "resize_", resized))
        if self._hollow:
            # UntypedStorage.size calls nbytes, so this patches both.
            self._patches.enter_context(patch.object(UntypedStorage, "nbytes", sized))
        return self

    def __exit__(self, *error: Any) -> None:
        self._patches.close()

    def made(self, storage: UntypedStorage, nbytes: int, operator: str, by: Maker | None = None) -> int:
        """Record that an operator has created or resized a storage, or returned a known one. Return the storage's key.

        by: the operator and the line of user code, if known.
        """
        key = storage_id(storage)
        held = self._held.get(key)
        if held is not None:
            if held.nbytes != nbytes:
                self._clock += 1
                self._becomes(key, held, nbytes, operator)
            return key
        forward = self._stretch()[1] if backward_number() < 0 else torch.is_grad_enabled()
        watch = weakref.ref(storage, partial(_ended, weakref.ref(self), key))
        self._hold(key, nbytes, forward, watch, by, operator)
        return key

    def made_again(self, key: int, nbytes: int, forward: bool, by: Maker) -> None:
        """Record memory of a replayed pass. key: a number that no storage has."""
        self._hold(key, nbytes, forward, None, by, by.operator)

    def _hold(
        self, key: int, nbytes: int, forward: bool, watch: Any, by: Maker | None, operator: str
    ) -> None:
        self._clock += 1
        self._held[key] = _Held(nbytes, None, forward, self._clock, watch)
        self.arena.take(key, nbytes)
        if self.tape is not None:
            by = by or Maker(operator, _users_line(sys._getframe(2)))
            self.tape.made(key, nbytes, forward, by)
        self._grow(nbytes, operator, by)

    def resized_again(self, key: int, nbytes: int, by: Maker) -> None:
        """Record that a replayed pass resizes a storage."""
        self._clock += 1
        self._becomes(key, self._held[key], nbytes, by.operator, by)

    def size(self, key: int) -> int:
        """Return the bytes that are held under a key, or -1 if none are."""
        held = self._held.get(key)
        return -1 if held is None else held.nbytes

    def name(self, key: int, part: MemoryPart) -> None:
        """Set the purpose of memory by its key."""
        held = self._held[key]
        if self.tape is not None and held.part != part:
            self.tape.named(key, part)
        held.part = part

    def copied(self, tensors: Iterable[Any]) -> None:
        """Mark the buffers through which FSDP copies weights and gradients."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                held = self._held.get(key := storage_id(tensor))
                if held is not None and held.part is None:
                    self.name(key, "rest")

    def _becomes(self, key: int, held: _Held, nbytes: int, operator: str, by: Maker | None = None) -> None:
        if self.tape is not None:
            by = by or Maker(operator, _users_line(sys._getframe(2)))
            self.tape.resized(key, held.nbytes, nbytes, by)
        self._let_go(held)
        self.arena.give(key)
        self.arena.take(key, nbytes)
        self._held[key] = _Held(nbytes, held.part, held.forward, self._clock, held.watch)
        self._grow(nbytes, operator, by)

    def _grow(self, nbytes: int, operator: str, by: Maker | None) -> None:
        self.live += nbytes
        if self.live > self._peak:
            self._peak, self._peak_clock = self.live, self._clock
            self._gone.clear()
            line = _users_line(sys._getframe(3)) if by is None else by.line
            self._where = self._stretch()[0], line, operator

    def _let_go(self, held: _Held) -> None:
        self.live -= held.nbytes
        if held.nbytes and held.since <= self._peak_clock:
            self._gone.append(held)

    def end(self, key: int) -> None:
        """Record that memory was freed."""
        held = self._held.pop(key, None)
        if held is not None:
            if self.tape is not None:
                self.tape.freed(key)
            self.arena.give(key)
            self._let_go(held)

    def _holdings(self) -> list[_Held]:
        # A copy, because a collection of garbage may end some of them meanwhile.
        return [*self._held.values()]

    def _sums(self, those: Iterable[_Held]) -> dict[MemoryPart, int]:
        nbytes_of: Counter[MemoryPart] = Counter()
        for holding in those:
            nbytes_of[holding.known] += holding.nbytes
        return {part: nbytes_of[part] for part in PARTS}


class LedgerMode(DispatchMode):  # type: ignore[misc]
    """A dispatch mode that sees every operator while it is active. Entering it also enters its ledger."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def __enter__(self) -> Self:
        self._ledger.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._ledger.__exit__(*error)

    def inside(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a composite operator so that this mode sees the operators inside it."""
        DispatchMode.__enter__(self)
        try:
            return function(*args, **kwargs)
        finally:
            DispatchMode.__exit__(self, None, None, None)


def _users_line(frame: FrameType) -> tuple[CodeType, int] | None:
    """Return the line of the innermost frame of user code, or None if there is none, as when a config runs the training."""
    while is_ours(file := frame.f_code.co_filename):
        if file in _RUNNERS or frame.f_back is None:
            return None
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


def _ended(ledger: weakref.ref[Ledger], key: int, _: object) -> None:
    if (current := ledger()) is not None:
        current.end(key)
