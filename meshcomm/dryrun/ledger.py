"""How many bytes do the tensors of this process hold, now and at the peak, and what are they for?"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias, final
from unittest.mock import patch

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

from meshcomm.comm.callsite import line_of
from meshcomm.transport.torch_private import (
    DispatchMode,
    backward_number,
    explicit_kernel,
    fake_mode,
    flops_of,
    leaves_of,
    parts_of_dtensor,
    wraps_tensors,
)

Part: TypeAlias = Literal["weights", "gradients", "optimizer", "activations", "gathered", "rest"]
PARTS: Final[tuple[Part, ...]] = ("weights", "gradients", "optimizer", "activations", "gathered", "rest")
"""What memory is for. weights: parameters and buffers, as far as this rank keeps them. gradients: also those that FSDP has
not summed over ranks yet. activations: what forward passes make, also when they are run again in a backward pass.
gathered: other ranks' parts of the weights. rest: buffers of calls, temporary memory of backward passes and of the optimizer."""

# Of operators that are made of others, calls on groups among them.
_COMPOSED: Final = ("meshcomm", "meshcomm_recompute")
_SKIPPED: Final = (str(Path(torch.__file__).parent), __file__)


@final
class _Held:
    """Memory of one storage. part: None until somebody says it. since: the clock when it was made."""

    __slots__ = ("forward", "nbytes", "part", "since", "watch")

    def __init__(self, nbytes: int, part: Part | None, forward: bool, since: int, watch: Any) -> None:
        self.nbytes, self.part, self.forward, self.since, self.watch = nbytes, part, forward, since, watch

    @property
    def known(self) -> Part:
        return self.part or ("activations" if self.forward else "rest")


class Peak(NamedTuple):
    """The moment at which most was held. parts: bytes. during: the pass or other stretch. at: file:line. operator: its name."""

    nbytes: int
    parts: dict[Part, int]
    during: str
    at: str
    operator: str


@final
class Ledger(DispatchMode):  # type: ignore[misc]
    """While it is entered, follows the memory of every tensor that an operator makes, real ones and fake ones.

    Bytes of storages, each counted once, from the operator that makes it until nobody holds it. What kernels use
    inside themselves is not seen, nor what an allocator keeps besides. flops: computed since the start or `restart`.

    stretch: says what the program is doing, in words, and whether that is a forward pass.
    """

    def __init__(self, stretch: Callable[[], tuple[str, bool]]) -> None:
        super().__init__()
        self.live = 0
        self._stretch = stretch
        self._held: dict[int, _Held] = {}
        self._clock = 0
        self._fake: Any = None
        self._formulas: dict[Any, Callable[..., int] | None] = {}
        self.restart()

    def restart(self) -> None:
        """Look for the peak from now on."""
        self._peak, self._peak_clock = self.live, self._clock
        self.flops = 0
        # What was there at the peak and is not any more.
        self._gone: list[_Held] = []
        self._where: tuple[str, Any, str] = (self._stretch()[0], None, "")

    def call_it(self, part: Part, tensors: Iterable[Any]) -> None:
        """Say what the memory of `tensors` is for; of DTensors what this rank holds."""
        for tensor in tensors:
            # Without an operator: a view of what FSDP has let go of would bring a fake tensor's memory back.
            mine = parts_of_dtensor(tensor)[0] if isinstance(tensor, DTensor) else tensor
            held = self._held.get(mine.untyped_storage()._cdata)
            if held is not None:
                held.part = part

    def now(self) -> dict[Part, int]:
        """Bytes held now."""
        return self._sums(self._held.values())

    def peak(self) -> Peak:
        """The largest sum since the start or `restart`, by what is known by now of the memory that was there."""
        there = [each for each in self._held.values() if each.since <= self._peak_clock]
        during, frame, operator = self._where
        at = "" if frame is None else line_of(*frame)
        return Peak(self._peak, self._sums([*there, *self._gone]), during, at, operator)

    def __enter__(self) -> Ledger:
        self._fake = fake_mode()
        resize, ledger = UntypedStorage.resize_, self

        def resized(storage: UntypedStorage, size: int) -> Any:
            # FSDP lets go of what it has gathered by this, past all operators.
            found = resize(storage, size)
            held = ledger._held.get(storage._cdata)
            if held is not None and held.nbytes != storage.nbytes():
                ledger._clock += 1
                ledger._let_go(held)
                held = _Held(storage.nbytes(), held.part, held.forward, ledger._clock, held.watch)
                ledger._held[storage._cdata] = held
                ledger._grow(held.nbytes, "resize_")
            return found

        self._patch = patch.object(UntypedStorage, "resize_", resized)
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See TorchDispatchMode."""
        if types and wraps_tensors(types):
            # DTensor and its like call the operators of what this rank holds, which come here.
            return NotImplemented
        if func.namespace in _COMPOSED:
            # Whatever they are made of is seen, and made where a tensor without values would only get a shape.
            DispatchMode.__enter__(self)
            try:
                return explicit_kernel(func, *args, **(kwargs or {}))
            finally:
                DispatchMode.__exit__(self, None, None, None)
        found = func(*args, **(kwargs or {}))
        if fake_mode() is not self._fake:
            # DTensor finds shapes by trying operators on tensors without memory.
            return found
        self._clock += 1
        formula = self._formulas[func] if func in self._formulas else self._formula(func)
        if formula is not None:
            self.flops += int(formula(*args, **(kwargs or {}), out_val=found))
        name = str(func)
        if name.startswith("fsdp."):
            self._copies(args)
        for each in (found,) if isinstance(found, Tensor) else leaves_of(found):
            if isinstance(each, Tensor):
                self._see(each, name)
        return found

    def _formula(self, func: Any) -> Callable[..., int] | None:
        found = self._formulas[func] = flops_of(func)
        return found

    def _see(self, tensor: Tensor, operator: str) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        held = self._held.get(key)
        if held is not None:
            if held.nbytes != nbytes:
                # Tensor.resize_ and its like: not seen otherwise.
                self._let_go(held)
                self._held[key] = _Held(nbytes, held.part, held.forward, self._clock, held.watch)
                self._grow(nbytes, operator)
            return
        if tensor.device.type == "meta":
            return
        forward = self._stretch()[1] if backward_number() < 0 else torch.is_grad_enabled()
        watch = weakref.ref(storage, partial(_ended, weakref.ref(self), key))
        self._held[key] = _Held(nbytes, None, forward, self._clock, watch)
        self._grow(nbytes, operator)

    def _grow(self, nbytes: int, operator: str) -> None:
        self.live += nbytes
        if self.live > self._peak:
            self._peak, self._peak_clock = self.live, self._clock
            self._gone.clear()
            frame = sys._getframe(2)
            while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED):
                frame = frame.f_back
            self._where = self._stretch()[0], (frame.f_code, frame.f_lasti), operator

    def _let_go(self, held: _Held) -> None:
        self.live -= held.nbytes
        if held.nbytes and held.since <= self._peak_clock:
            self._gone.append(held)

    def _end(self, key: int) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self._let_go(held)

    def _copies(self, args: Any) -> None:
        """What FSDP moves weights and gradients through."""
        for each in leaves_of(args):
            if isinstance(each, Tensor):
                held = self._held.get(each.untyped_storage()._cdata)
                if held is not None and held.part is None:
                    held.part = "rest"

    def _sums(self, those: Iterable[_Held]) -> dict[Part, int]:
        found: Counter[Part] = Counter()
        for each in those:
            found[each.known] += each.nbytes
        return {part: found[part] for part in PARTS}


def _ended(ledger: weakref.ref[Ledger], key: int, _: object) -> None:
    if (found := ledger()) is not None:
        found._end(key)
