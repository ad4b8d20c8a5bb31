"""Print the tables of docs/guide/costs.md: `python docs/tools/algorithms.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from meshcomm.algorithms import Cost, formulas
from meshcomm.predict.times import CHUNKS

# (ranks, bytes, chunks) -> Cost.
_COSTS: Final[Mapping[str, Callable[[int, float, int], Cost]]] = {
    **{name: formulas.ALL_REDUCE[name] for name in ("ring", "tree", "double_tree", "recursive_doubling")},
    "halving_doubling": formulas.ALL_REDUCE["halving_doubling"],
    "two_level": lambda n, size, k: formulas.two_level(n, size, 8),
}
_RANKS: Final = (8, 32, 512, 24_576)
_SIZES: Final = {"4 KiB": 4 << 10, "1 MiB": 1 << 20, "64 MiB": 64 << 20, "1 GiB": 1 << 30}
# A latency of 5 us per message, and a port of 200 Gbit/s.
_ALPHA_S: Final = 5e-6
_BETA_S: Final = 1 / 25e9
# The two times to reproduce, at this number of GPUs.
_MANY: Final = 24_576
_RING_S: Final = 180e-3
_TREE_S: Final = 1e-3


def counts() -> str:
    """A table of the steps and the busiest rank's sent data, in units of the data size, by algorithm and number of ranks."""
    head = "| | " + " | ".join(f"{n:,} ranks" for n in _RANKS) + " |"
    lines = [head, "|---" * (len(_RANKS) + 1) + "|"]
    for name, cost in _COSTS.items():
        cells = [cost(n, 1.0, 1) for n in _RANKS]
        label = "two_level, groups of 8" if name == "two_level" else name
        lines.append(
            f"| {label} | " + " | ".join(f"{c.steps:,} steps, {c.busiest_bytes:.3g} S" for c in cells) + " |"
        )
    return "\n".join(lines) + "\n"


def fastest() -> str:
    """A table of the algorithm with the lowest alpha-beta time by ranks and bytes. Trees use the best number of CHUNKS."""
    lines = ["| | " + " | ".join(_SIZES) + " |", "|---" * (len(_SIZES) + 1) + "|"]
    for n in _RANKS:
        cells = []
        for size in _SIZES.values():
            times = {name: best_seconds(name, n, size, _ALPHA_S, _BETA_S) for name in _COSTS}
            least = min(times.values())
            # Times that differ by less than 1 % count as equal in this rough model.
            names = " or ".join(name for name, time in times.items() if time <= 1.01 * least)
            cells.append(f"{names}, {_time(least)}")
        lines.append(f"| {n:,} ranks | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def many() -> str:
    """A table of all algorithms at 24,576 ranks for an empty message, with the constants that reproduce the two times."""
    constant, alpha = fitted()
    lines = [
        f"| {_MANY:,} ranks, alpha {alpha * 1e6:.2f} us | steps | steps x alpha | with {_time(constant)} for each call |",
        "|---|---|---|---|",
    ]
    for name, cost in _COSTS.items():
        steps = cost(_MANY, 0.0, 1).steps
        label = "two_level, groups of 8" if name == "two_level" else name
        lines.append(f"| {label} | {steps:,} | {_time(steps * alpha)} | {_time(constant + steps * alpha)} |")
    return "\n".join(lines) + "\n"


def fitted() -> tuple[float, float]:
    """Seconds per call and per step for which ring takes 180 ms and double_tree takes 1 ms."""
    ring, tree = formulas.ring(_MANY, 0).steps, formulas.double_tree(_MANY, 0).steps
    alpha = (_RING_S - _TREE_S) / (ring - tree)
    return _TREE_S - tree * alpha, alpha


def best_seconds(name: str, n: int, size_bytes: float, alpha_s: float, beta_s_per_byte: float) -> float:
    """The alpha-beta time of the algorithm `name`. Trees use the best number of CHUNKS."""
    return min(_COSTS[name](n, size_bytes, chunks).seconds(alpha_s, beta_s_per_byte) for chunks in CHUNKS)


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 - 1e-9 else f"{seconds * 1e3:.3g} ms"


if __name__ == "__main__":
    print(counts(), fastest(), many(), sep="\n", end="")
