"""Where does every rank of a mesh sit, and with whom? By arithmetic alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, overload

from einops import rearrange

from meshcomm.errors import LayoutError
from meshcomm.layout.digits import Digits, Ranks
from meshcomm.layout.dims import Dims, DimTable
from meshcomm.layout.order import RankOrder


class Layout:
    """A mesh as a value: dims, their sizes, and which rank sits where. No process is involved.

    Args:
        dims: name -> size, outermost first. The rank grid is row-major in this order, so the
            last dim's neighbours are next to each other.
        rank_order: the rank at each position of the row-major grid; default 0, 1, 2, ... A
            layout on part of a world lists that part's ranks.
        views: name -> another {dim: size} factorisation of the same positions. A dim that a
            view shares with the base by name must mean the same groups.
        merge: name -> dims that together get one coord, row-major in the order written.

    Raises LayoutError, which says what does not fit.

    >>> layout = Layout({"pp": 2, "dp": 2, "tp": 2}, merge={"model": ("pp", "tp")})
    >>> layout.coords(6)
    {'pp': 1, 'dp': 1, 'tp': 0}
    >>> layout.groups("dp").tolist()
    [[0, 2], [1, 3], [4, 6], [5, 7]]
    >>> layout.group_of(6, "model").tolist()
    [2, 3, 6, 7]
    """

    __slots__ = ("_order", "_table", "dims", "merge", "views", "world_size")

    dims: Final[Mapping[str, int]]
    views: Final[Mapping[str, Mapping[str, int]]]
    merge: Final[Mapping[str, tuple[str, ...]]]
    world_size: Final[int]

    def __init__(
        self,
        dims: Mapping[str, int],
        rank_order: Sequence[int] | None = None,
        views: Mapping[str, Mapping[str, int]] | None = None,
        merge: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._table = DimTable(dims, views or {}, merge or {})
        self._order = RankOrder(rank_order, self._table.dims)
        self.dims = self._table.dims
        self.views = self._table.views
        self.merge = self._table.merge
        self.world_size = self._table.world_size

    # -- values ---------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        order = None if self._order.given is None else self._order.given.tobytes()
        views = tuple((name, tuple(sizes.items())) for name, sizes in self.views.items())
        return (tuple(self.dims.items()), order, views, tuple(self.merge.items()))

    def __repr__(self) -> str:
        parts = [f"dims={dict(self.dims)}"]
        if self._order.given is not None:
            parts.append(f"rank_order={self._order.given.tolist()}")
        if self.views:
            parts.append(f"views={ {name: dict(sizes) for name, sizes in self.views.items()} }")
        if self.merge:
            parts.append(f"merge={dict(self.merge)}")
        return f"Layout({', '.join(parts)})"

    @property
    def rank_order(self) -> tuple[int, ...] | None:
        """The rank at each position, or None where rank and position are the same."""
        return None if self._order.given is None else tuple(self._order.given.tolist())

    @property
    def ranks(self) -> Ranks:
        """Every rank of the layout, in grid order."""
        return self._order.ranks()

    @property
    def names(self) -> tuple[str, ...]:
        """Every single name that a call may use: base dims, view dims, merged dims."""
        return self._table.names

    def __contains__(self, rank: object) -> bool:
        return rank in self._order

    # -- dims -----------------------------------------------------------------------------------

    def digits(self, dims: Dims) -> Digits:
        """How positions are read along `dims`. Raises UnknownDim."""
        return self._table.digits(dims)

    def size(self, dims: Dims) -> int:
        """Number of ranks along `dims`."""
        return self._table.digits(dims).size

    def expand(self, dims: Dims) -> tuple[str, ...]:
        """`dims` with merged names replaced by the dims they merge."""
        return self._table.expand(dims)

    def home(self, dims: Dims) -> str:
        """The view that `dims` belong to, "" for the base. Raises UnknownDim where they share none."""
        return self._table.home(dims)

    def others(self, dims: Dims) -> Digits:
        """How positions are read along all the dims that `dims` are not."""
        rest = self._table.others(dims)
        return self.digits(rest) if rest else Digits()

    # -- ranks ----------------------------------------------------------------------------------

    def position(self, rank: int) -> int:
        """Index of `rank` in the row-major rank grid. Raises LayoutError where it has none."""
        return self._order.position(rank)

    def rank_of(self, position: int) -> int:
        """The rank at a position of the row-major rank grid."""
        return self._order.rank(position)

    def coords(self, rank: int, view: str | None = None) -> dict[str, int]:
        """Every coord of `rank`, by dim, in the base or in a view."""
        sizes = self.dims if view is None else self.views[view]
        position = self.position(rank)
        return {name: self.digits(name).coord(position) for name in sizes}

    def coord(self, rank: int, dims: Dims) -> int:
        """The coord of `rank` along `dims`."""
        return self.digits(dims).coord(self.position(rank))

    def rank_at(self, **coords: int) -> int:
        """The rank at these coords: every dim of the base, or every dim of one view, once."""
        for sizes in (self.dims, *self.views.values()):
            if set(sizes) == set(coords):
                break
        else:
            for name in coords:
                if name not in self._table.known:
                    self._table.unknown(name)
            missing = [name for name in self.dims if name not in coords]
            raise LayoutError(
                "coords that do not say one rank",
                given=", ".join(f"{n}={c}" for n, c in coords.items()) or "nothing",
                expected="one coord for each of " + ", ".join(self.dims),
                hint=f"add {', '.join(missing)}" if missing else "leave out the others",
            )
        position = 0
        for name, size in sizes.items():
            coord = coords[name]
            if not 0 <= coord < size:
                raise LayoutError(
                    f"{name}={coord} is outside the mesh",
                    given=f"{name}={coord}",
                    expected=f"0 to {size - 1}",
                    hint=f"{name} has size {size}; coords count from 0",
                )
            position += self.digits(name).offset(coord)
        return self.rank_of(position)

    def groups(self, dims: Dims) -> Ranks:
        """Every group along `dims`, shape (number of groups, size), in coord order.

        Row i, column c: the rank with coord c in group i. Groups are in row-major order of the
        coords along the other dims.
        """
        self.digits(dims)
        names, rest = self.expand(dims), self._table.others(dims)
        sizes = self._table.factorisation(self.home(dims))
        grid = self.ranks.reshape(tuple(sizes.values()))
        pattern = f"{' '.join(sizes)} -> ({' '.join(rest)}) ({' '.join(names)})"
        return rearrange(grid, pattern)

    def group_of(self, rank: int, dims: Dims) -> Ranks:
        """The ranks of `rank`'s group along `dims`, in coord order: element c has coord c."""
        digits = self.digits(dims)
        position = self.position(rank)
        return self._order.at(position - digits.offset(digits.coord(position)) + digits.offsets())

    def group_index(self, rank: int, dims: Dims) -> int:
        """Which row of `groups(dims)` holds `rank`."""
        return self.others(dims).coord(self.position(rank))

    @overload
    def peer_rank(self, rank: int, dims: Dims, offset: int, *, wrap: Literal[True] = ...) -> int: ...
    @overload
    def peer_rank(self, rank: int, dims: Dims, offset: int, *, wrap: bool) -> int | None: ...
    def peer_rank(self, rank: int, dims: Dims, offset: int, *, wrap: bool = True) -> int | None:
        """The rank `offset` coords further along `dims`; None past the edge without `wrap`."""
        digits = self.digits(dims)
        position = self.position(rank)
        coord = digits.coord(position)
        target = coord + offset
        if wrap:
            target %= digits.size
        elif not 0 <= target < digits.size:
            return None
        return self.rank_of(position - digits.offset(coord) + digits.offset(target))
