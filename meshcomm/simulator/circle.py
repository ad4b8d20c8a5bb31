"""Who waits for whom in a circle?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def find_circle(waits: Mapping[int, Sequence[int]]) -> list[int]:
    """Ranks that wait each for the next and the last for the first; [] where there are none.

    waits: rank -> the ranks that it waits for. Among the circles through the lowest rank of one, a
    shortest. Time grows with the number of waits.
    """
    found = _any_circle(waits)
    if not found:
        return []
    start = min(found)
    # Breadth first: the first way back is a shortest one.
    before: dict[int, int] = {}
    front = [start]
    while front:
        following = []
        for rank in front:
            for other in waits.get(rank, ()):
                if other == start:
                    path = [rank]
                    while path[-1] != start:
                        path.append(before[path[-1]])
                    return path[::-1]
                if other not in before and other in waits:
                    before[other] = rank
                    following.append(other)
        front = following
    return found


def _any_circle(waits: Mapping[int, Sequence[int]]) -> list[int]:
    finished: set[int] = set()
    for root in sorted(waits):
        path: list[int] = []
        on_path: dict[int, int] = {}
        stack = [(root, iter(waits[root]))] if root not in finished else []
        if stack:
            path, on_path = [root], {root: 0}
        while stack:
            rank, others = stack[-1]
            for other in others:
                if other in on_path:
                    return path[on_path[other] :]
                if other in waits and other not in finished:
                    on_path[other] = len(path)
                    path.append(other)
                    stack.append((other, iter(waits[other])))
                    break
            else:
                finished.add(rank)
                on_path.pop(rank)
                path.pop()
                stack.pop()
    return []
