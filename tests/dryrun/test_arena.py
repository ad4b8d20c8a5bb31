"""What torch's allocator reserves, by hand and beside plain loops over all addresses."""

from __future__ import annotations

import random

import pytest

from meshcomm.dryrun.arena import Arena

MiB = 1 << 20


def test_pools_grow_in_steps_and_reuse_what_was_freed() -> None:
    arena = Arena()
    arena.take(1, 100)
    assert arena.reserved == 2 * MiB
    arena.take(2, 10 * MiB)
    arena.take(3, 10 * MiB)
    assert arena.reserved == (2 + 20) * MiB
    arena.give(2)
    # It does not fit into the gap of 10 MiB, which a smaller one then shares.
    arena.take(4, 11 * MiB)
    assert arena.reserved == (2 + 40) * MiB
    arena.take(5, 6 * MiB)
    arena.take(6, 4 * MiB)
    assert arena.reserved == (2 + 40) * MiB
    # The last free block grows: 9 MiB are left of it.
    arena.take(7, 29 * MiB)
    assert arena.reserved == (2 + 60) * MiB
    for key in range(1, 8):
        arena.give(key)
    arena.give(9)
    arena.take(8, 60 * MiB)
    assert arena.reserved == (2 + 60) * MiB


class Plain:
    """One pool in units of a step, as a list of which address is whose."""

    def __init__(self, step: int) -> None:
        self.step, self.of = step, list[int]()

    def gaps(self) -> list[tuple[int, int]]:
        found, start = [], None
        for place, owner in enumerate([*self.of, 1]):
            if not owner and start is None:
                start = place
            if owner and start is not None:
                found.append((place - start, start))
                start = None
        return found

    def take(self, key: int, size: int) -> None:
        gaps = sorted(self.gaps())
        last = [gap for gap in gaps if sum(gap) == len(self.of)]
        fits = [gap for gap in gaps if gap[0] >= size and gap not in last] or [
            gap for gap in last if gap[0] >= size
        ]
        start = fits[0][1] if fits else last[0][1] if last else len(self.of)
        while len(self.of) < start + size:
            self.of += [0] * self.step
        self.of[start : start + size] = [key] * size

    def give(self, key: int) -> None:
        self.of = [0 if owner == key else owner for owner in self.of]


@pytest.mark.parametrize("seed", range(3))
def test_blocks_lie_where_plain_loops_put_them(seed: int) -> None:
    draw, arena, plain, held = random.Random(seed), Arena(), Plain(40), set[int]()
    for key in range(1, 400):
        if held and draw.random() < 0.45:
            freed = draw.choice(sorted(held))
            held.remove(freed)
            arena.give(freed)
            plain.give(freed)
        size = draw.choice([3, 5, 8, 20, 50])
        # Half a MiB for each address of the plain pool.
        arena.take(key, size * MiB // 2)
        plain.take(key, size)
        held.add(key)
        assert arena.reserved == len(plain.of) * MiB // 2
