"""What torch's CUDA allocator reserves for the storages of a program."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final, final

# Constants of torch's c10/core/AllocatorConfig.h, in bytes: the unit of blocks, the largest block of the small pool, and the
# steps in which the pools grow.
_UNIT: Final = 512
_SMALL: Final = 1 << 20
_GROWS: Final = {True: 2 << 20, False: 20 << 20}


@final
class Arena:
    """The caching allocator with expandable segments (`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`), on one stream.

    reserved: the bytes taken from the device. They never shrink: freed blocks are kept for later ones.
    """

    def __init__(self) -> None:
        self._pools = {small: _Pool(step) for small, step in _GROWS.items()}
        self._blocks: dict[int, tuple[_Pool, int, int]] = {}

    @property
    def reserved(self) -> int:
        """See `Arena`."""
        return sum(pool.top for pool in self._pools.values())

    def take(self, key: int, nbytes: int) -> None:
        """Allocate a block for a storage. key: identifies it."""
        if nbytes:
            size = -(-nbytes // _UNIT) * _UNIT
            pool = self._pools[size <= _SMALL]
            self._blocks[key] = pool, pool.take(size), size

    def give(self, key: int) -> None:
        """Free the block of a storage, if it has one."""
        if key in self._blocks:
            pool, start, size = self._blocks.pop(key)
            pool.give(start, size)


@final
class _Pool:
    """Addresses 0 to top, of which some blocks are free. A block takes the smallest free one that is large enough, and
    its rest stays free. Only if there is none, the pool grows by multiples of `step`.
    """

    def __init__(self, step: int) -> None:
        self.top = 0
        self._step = step
        self._by_size: list[tuple[int, int]] = []
        self._size_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}

    def take(self, size: int) -> int:
        """Return the start of a new block."""
        place = bisect_left(self._by_size, (size, -1))
        # The last block can grow, so it is used only if no other is large enough.
        fits = (start for free, start in self._by_size[place : place + 2] if start + free != self.top)
        start = next(fits, None)
        if start is None:
            start = self._start_before.get(self.top, self.top)
            self.top += max(0, -(-(start + size - self.top) // self._step)) * self._step
        end = start + (self._remove(start) if start in self._size_at else 0)
        end = self.top if end < start + size else end
        if end > start + size:
            self._add(start + size, end - start - size)
        return start

    def give(self, start: int, size: int) -> None:
        """Free a block, and join it with free neighbors."""
        if start + size in self._size_at:
            size += self._remove(start + size)
        if (before := self._start_before.get(start)) is not None:
            start, size = before, size + self._remove(before)
        self._add(start, size)

    def _add(self, start: int, size: int) -> None:
        insort(self._by_size, (size, start))
        self._size_at[start], self._start_before[start + size] = size, start

    def _remove(self, start: int) -> int:
        size = self._size_at.pop(start)
        del self._start_before[start + size], self._by_size[bisect_left(self._by_size, (size, start))]
        return size
