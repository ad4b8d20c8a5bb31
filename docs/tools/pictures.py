"""Write the SVG pictures of docs/concepts.md to docs/images: `python docs/tools/pictures.py`."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Final

IMAGES: Final = Path(__file__).parents[1] / "images"
WIDTH: Final = 480
# Fill colors for groups or for the source ranks of values, and then for sums and for empty boxes.
FILLS: Final = ("#cfe3f7", "#fddcb0", "#c9ecd6", "#f3cfe6", "#e4e7ea", "#ffffff")
SUM, EMPTY = 4, 5
_FONT: Final = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
_COLORS: Final = "#1f2328"


def _text(x: float, y: float, words: str, size: int = 15, more: str = "") -> str:
    anchor = "" if "text-anchor" in more else ' text-anchor="middle"'
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}"{anchor}{more}>{words}</text>'


def _left(x: float, y: float, words: str, size: int = 15, more: str = "") -> str:
    return _text(x, y, words, size, ' text-anchor="start"' + more)


def _box(
    x: float,
    y: float,
    width: float,
    height: float,
    fill: int,
    words: str,
    size: int = 15,
    strong: bool = False,
) -> str:
    line = ' stroke-width="3"' if strong else ""
    dashed = ' stroke-dasharray="3 3"' if fill == EMPTY else ""
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{FILLS[fill]}"{line}{dashed}/>'
    return shape + _text(x + width / 2, y + height / 2 + size * 0.35, words, size)


def _picture(title: str, height: int, parts: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" font-family="{_FONT}">\n<title>{title}</title>\n'
        f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 8 4 0 8z" fill="{_COLORS}"/></marker>\n'
        f"<style>text {{ fill: {_COLORS} }} rect, line {{ stroke: {_COLORS} }}</style></defs>\n"
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff" style="stroke: none"/>\n'
    )
    return head + "\n".join(parts) + "\n</svg>\n"


# -- ranks of pp=2 dp=2 tp=2 --------------------------------------------------------------------------

PLACES: Final = list(product(range(2), repeat=3))


def _grid(
    x: float, y: float, cell: tuple[int, int], fills: list[int], words: list[str], strong: int = -1
) -> list[str]:
    """For each pp coord, a square with dp rows and tp columns. The ranks are in row-major order."""
    width, height = cell
    return [
        _box(
            x + pp * (2 * width + width // 2) + tp * width,
            y + dp * height,
            width,
            height,
            fills[rank],
            words[rank],
            15 if width > 40 else 13,
            rank == strong,
        )
        for rank, (pp, dp, tp) in enumerate(PLACES)
    ]


def mesh() -> str:
    words = [f"rank {rank}" for rank in range(8)]
    parts = _grid(70, 58, (80, 40), [0 if rank == 5 else SUM for rank in range(8)], words, strong=5)
    for pp in range(2):
        left = 70 + pp * 200
        parts += [_text(left + 80, 24, f"pp={pp}", 15, ' font-weight="600"')]
        parts += [_text(left + 40 + tp * 80, 50, f"tp={tp}") for tp in range(2)]
    parts += [_left(14, 84 + dp * 40, f"dp={dp}") for dp in range(2)]
    parts += [_left(14, 170, "rank 5 is at pp=1 dp=0 tp=1, and 5 = 4 x 1 + 2 x 0 + 1")]
    return _picture("The eight ranks of pp=2 dp=2 tp=2, with the coords of each", 184, parts)


def groups() -> str:
    parts = []
    for at, name in enumerate(("pp", "dp", "tp")):
        others = [tuple(c for i, c in enumerate(place) if i != at) for place in PLACES]
        order = sorted(set(others))
        parts += [_text(82 + at * 158, 26, f"along {name}", 15, ' font-weight="600"')]
        fills = [order.index(each) for each in others]
        parts += _grid(16 + at * 158, 40, (29, 30), fills, [str(rank) for rank in range(8)])
        for row, group in enumerate(order):
            ranks = [str(rank) for rank, each in enumerate(others) if each == group]
            parts += [
                _box(36 + at * 158, 118 + row * 24, 16, 16, row, "", 13),
                _left(62 + at * 158, 131 + row * 24, f"ranks {' '.join(ranks)}", 14),
            ]
    return _picture("The groups of pp=2 dp=2 tp=2 along each dim", 220, parts)


def merged() -> str:
    words = [f"rank {rank}" for rank in range(8)]
    parts = _grid(70, 40, (80, 34), [dp for _, dp, _ in PLACES], words)
    parts += [_text(150 + pp * 200, 28, f"pp={pp}", 15, ' font-weight="600"') for pp in range(2)]
    parts += [_left(14, 62 + dp * 34, f"dp={dp}") for dp in range(2)]
    for dp in range(2):
        ranks = " ".join(str(rank) for rank, place in enumerate(PLACES) if place[1] == dp)
        parts += [
            _box(70, 122 + dp * 26, 16, 16, dp, ""),
            _left(96, 135 + dp * 26, f"ranks {ranks} have coords 0 1 2 3 along model"),
        ]
    return _picture('The two groups of model = ["pp", "tp"]', 182, parts)


def _table(
    title: str, rows: list[tuple[str, list[str], list[int]]], gaps: dict[int, str], height: int
) -> str:
    """Draw rows of eight cells, with one cell per rank. gaps: headings, by the row that follows them."""
    parts, y = [], 12
    for number, (name, words, fills) in enumerate(rows):
        if number in gaps:
            parts += [_left(14, y + 22, gaps[number], 15, ' font-weight="600"')]
            y += 30
        parts += [_left(14, y + 19, name)]
        parts += [_box(112 + 44 * c, y, 44, 27, fills[c], words[c]) for c in range(8)]
        y += 27
        y += 4 if number + 1 not in gaps else 6
    return _picture(title, height, parts)


def expert_view() -> str:
    def row(name: str, of: list[int], fills: list[int]) -> tuple[str, list[str], list[int]]:
        return name, [str(each) for each in of], fills

    gray, ranks = [SUM] * 8, list(range(8))
    rows = [
        row("rank", ranks, gray),
        row("pp", [rank // 4 for rank in ranks], gray),
        row("dp", [rank // 2 % 2 for rank in ranks], gray),
        row("tp", [rank % 2 for rank in ranks], [rank // 2 for rank in ranks]),
        row("pp", [rank // 4 for rank in ranks], gray),
        row("edp", [0 for rank in ranks], gray),
        row("ep", [rank % 4 for rank in ranks], [rank // 4 for rank in ranks]),
    ]
    gaps = {
        1: "dims of the mesh: one color for each group along tp",
        4: "view expert: one color for each group along ep",
    }
    return _table("The coords of eight ranks in the mesh and in the view expert", rows, gaps, 304)


def data_rank() -> str:
    ranks = list(range(8))
    share = [rank // 2 for rank in ranks]
    rows = [
        ("rank", [str(rank) for rank in ranks], [SUM] * 8),
        ("dp", [str(rank // 4) for rank in ranks], [SUM] * 8),
        ("fsdp", [str(rank // 2 % 2) for rank in ranks], [SUM] * 8),
        ("tp", [str(rank % 2) for rank in ranks], [SUM] * 8),
        ("data rank", [str(each) for each in share], share),
    ]
    return _table("Ranks, coords and data ranks of dp=2 fsdp=2 tp=2", rows, {}, 178)


# -- collectives along a dim of size 4 ----------------------------------------------------------------

Held = list[list[tuple[str, int]]]
_OWN: Final = [[(each, c)] for c, each in enumerate("abcd")]
_PARTS: Final = [[(f"{each}{part}", c) for part in range(4)] for c, each in enumerate("abcd")]
_NONE: Final = [("None", EMPTY)]


def _call(call: str, before: Held, after: Held, lines: list[tuple[int, int]] | None = None) -> str:
    """Draw boxes with the values on each coord of a dim before and after one call."""
    parts = [_left(72, 24, "before", 14), _left(308, 24, "after", 14)]
    for c in range(4):
        y = 34 + 36 * c
        parts += [_left(10, y + 20, f"coord {c}", 14)]
        for x, held in ((72, before[c]), (308, after[c])):
            width = 156 / len(held) if len(held) > 1 or "+" in held[0][0] else 52
            parts += [
                _box(x + width * i, y, width, 29, fill, words, 14) for i, (words, fill) in enumerate(held)
            ]
    if lines is None:
        parts += ['<line x1="240" y1="102" x2="292" y2="102" stroke-width="2" marker-end="url(#tip)"/>']
    for source, target in lines or []:
        y1, y2 = 48 + 36 * source, 48 + 36 * target
        parts += [f'<line x1="132" y1="{y1}" x2="300" y2="{y2}" stroke-width="1.5" marker-end="url(#tip)"/>']
    return _picture(call, 184, parts)


def all_reduce() -> str:
    return _call("all_reduce along a dim of size 4", _OWN, [[("a + b + c + d", SUM)]] * 4)


def all_gather() -> str:
    return _call("all_gather along a dim of size 4", _OWN, [[each for [each] in _OWN]] * 4)


def reduce_scatter() -> str:
    sums = [[(" + ".join(f"{each}{c}" for each in "abcd"), SUM)] for c in range(4)]
    return _call("reduce_scatter along a dim of size 4", _PARTS, sums)


def all_to_all() -> str:
    return _call(
        "all_to_all along a dim of size 4", _PARTS, [[_PARTS[c][part] for c in range(4)] for part in range(4)]
    )


def broadcast() -> str:
    return _call(
        "broadcast with src=1 along a dim of size 4", _OWN, [_OWN[1]] * 4, [(1, c) for c in range(4)]
    )


def gather() -> str:
    """Draw gather. Scatter is the same in reverse."""
    return _call(
        "gather with dst=0 along a dim of size 4",
        _OWN,
        [[each for [each] in _OWN], _NONE, _NONE, _NONE],
        [(c, 0) for c in range(4)],
    )


def send_recv() -> str:
    free: Held = [[("empty", EMPTY)]]
    return _call(
        "send from coord 0, recv on coord 3",
        [_OWN[0], *(free * 3)],
        [_OWN[0], *(free * 2), _OWN[0]],
        [(0, 3)],
    )


def shift() -> str:
    lines = [(c, (c + 1) % 4) for c in range(4)]
    return _call("shift by +1 along a dim of size 4", _OWN, [_OWN[c - 1] for c in range(4)], lines)


PICTURES: Final = (
    mesh, groups, merged, expert_view, data_rank,
    all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, gather, send_recv, shift,
)  # fmt: skip


if __name__ == "__main__":
    for make in PICTURES:
        (IMAGES / f"{make.__name__}.svg").write_text(make(), encoding="utf-8")
