"""Who comes late along which dim, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from rich.table import Table


class Arrivals(Protocol):
    """Arrivals at the calls of one group, by coord; times in seconds."""

    @property
    def ranks(self) -> Sequence[int]: ...
    @property
    def mean_s(self) -> Sequence[float]: ...
    @property
    def worst_s(self) -> Sequence[float]: ...
    @property
    def last(self) -> Sequence[float]: ...
    @property
    def calls(self) -> int: ...


def lateness_table(
    groups: Mapping[str, Arrivals], stragglers: Mapping[str, tuple[int, float]] | None = None
) -> Table:
    """A line for each coord of each dim: how long after the first of its group it comes.

    stragglers: by dim, the latest rank of the whole mesh and its mean in seconds, under the table.
    """
    table = Table(title="arrival after the first rank of the group", title_justify="left")
    for name, justify in (("dim", "left"), ("coord", "right"), ("rank", "right"), ("mean ms", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("worst ms", justify="right")
    table.add_column("last to come", justify="right")
    for dim, along in groups.items():
        for coord, rank in enumerate(along.ranks):
            table.add_row(
                f"{dim}, {along.calls} calls" if coord == 0 else "",
                str(coord),
                str(rank),
                f"{along.mean_s[coord] * 1e3:.3f}",
                f"{along.worst_s[coord] * 1e3:.3f}",
                f"{along.last[coord]:.0%}",
                end_section=coord == len(along.ranks) - 1,
            )
    if stragglers:
        told = (f"{dim}: rank {rank}, {mean * 1e3:.3f} ms" for dim, (rank, mean) in stragglers.items())
        table.caption = "latest of the whole mesh along " + "; ".join(told)
        table.caption_justify = "left"
    return table
