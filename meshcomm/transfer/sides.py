"""The two sides of a link: which rank of the link is which rank of the source and of the target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, TypeVar, final

import numpy as np

from meshcomm.errors import TransferMismatch
from meshcomm.layout import Layout
from meshcomm.layout.sizes import ranks_text
from meshcomm.mesh import Mesh
from meshcomm.mesh.groups import merged
from meshcomm.transfer.plan import Ends

# The single dim of a link's mesh.
LINK: Final = "link"

SideName: TypeAlias = Literal["source", "target"]
BOTH: Final[tuple[SideName, SideName]] = ("source", "target")

T = TypeVar("T")


@final
@dataclass(frozen=True, eq=False)
class Sides:
    """The sides of a transfer, as this rank sees them.

    mesh:           the mesh that carries the transfer, with a dim over all ranks of both sides.
    ends:           the layouts of both sides, and the coord along this dim of each of their ranks.
    source, target: this process's own mesh on each side; None on a side that this process is not on.
    dim:            the name of the dim.
    """

    mesh: Mesh
    ends: Ends
    source: Mesh | None
    target: Mesh | None
    dim: str = LINK

    @classmethod
    def to_rank(cls, mesh: Mesh, rank: int) -> Sides:
        """Return the sides of a transfer from all ranks of a mesh to one of them. Called by: every rank of the mesh.

        Any two ranks may have to exchange a piece, so all ranks need a dim in common. It is a merged dim, whose group is created
        the first time, and not a second mesh: the mesh keeps one watchdog, one store, one order of its calls. Along the mesh's
        own dims, a piece would be passed on from dim to dim, and ranks would hold what others want.
        """
        dim = dim_of_all(mesh)
        positions = np.arange(mesh.layout.world_size)
        ends = Ends(
            mesh.layout, Layout({"rank": 1}, [rank]), positions, positions[[mesh.layout.position(rank)]]
        )
        return cls(mesh, ends, mesh, mesh if mesh.rank == rank else None, dim)

    @classmethod
    def along(cls, mesh: Mesh, dim: str) -> Sides:
        """Return the sides of a transfer among the ranks along a dim of a mesh, which are all on both sides."""
        layout, numbers = Layout({dim: mesh.size(dim)}), np.arange(mesh.size(dim))
        return cls(mesh, Ends(layout, layout, numbers, numbers), mesh, mesh, dim)

    @property
    def me(self) -> int:
        """This rank's coord along the dim."""
        return self.mesh.coord(self.dim)

    def own(self, side: SideName) -> Mesh | None:
        """Return this process's mesh on a side."""
        return self.source if side == "source" else self.target

    def layout(self, side: SideName) -> Layout:
        """Return the layout of a side."""
        return self.ends.source if side == "source" else self.ends.target

    def numbers(self, side: SideName) -> Any:
        """Return the coord along `link` of each rank of a side, by its position in the side's layout."""
        return self.ends.source_ranks if side == "source" else self.ends.target_ranks

    def position(self, side: SideName, number: int | None = None) -> int | None:
        """Return the position in a side's layout of a coord along `link`, by default this rank's; None if it is not on it."""
        found = np.flatnonzero(self.numbers(side) == (self.me if number is None else number))
        return int(found[0]) if len(found) else None

    def label(self, number: int) -> str:
        """Return a rank by its coord along `link` as text, such as `rank 2 of the target (copy=1 tp=0)`."""
        names = []
        for side in BOTH:
            position = self.position(side, number)
            if position is not None:
                layout = self.layout(side)
                rank = layout.rank_of(position)
                coords = " ".join(f"{dim}={coord}" for dim, coord in layout.coords(rank).items())
                names.append(f"rank {rank} of the {side} ({coords})")
        return " and ".join(names)

    def of_all(self, mine: Any) -> list[Any]:
        """Return each rank's plain data, by coord along the dim. Called by: every rank of both sides."""
        return self.mesh.objects.all_gather(self.dim, mine)

    def refuse(self, what: str, problems: Sequence[str], hint: str, **facts: Any) -> TransferMismatch:
        """Return the error of ranks that do not agree on a transfer."""
        shown = [*problems[:20], *([f"and {len(problems) - 20} more"] if len(problems) > 20 else [])]
        return TransferMismatch(
            what,
            given="\n".join(shown),
            expected="the same tensors on both sides, split in any way",
            hint=hint,
            problems=tuple(problems),
            **facts,
        )

    def ranks_of(self, side: SideName, positions: Iterable[int]) -> str:
        """Return ranks of a side as text, from their positions."""
        return f"{ranks_text(sorted(self.layout(side).rank_of(at) for at in positions))} of the {side}"


def dim_of_all(mesh: Mesh) -> str:
    """Return the name of a dim of all ranks of a mesh. Called by: every rank of the mesh. Creates its group the first time."""
    sizes = mesh.layout.dims
    return merged(mesh, tuple(dim for dim, size in sizes.items() if size > 1) or tuple(sizes)[:1])


def by_value(values: Sequence[T], key: Callable[[T], Any] = lambda value: value) -> dict[Any, list[int]]:
    """Return the indices of equal values, by value."""
    groups: dict[Any, list[int]] = {}
    for index, value in enumerate(values):
        groups.setdefault(key(value), []).append(index)
    return groups
