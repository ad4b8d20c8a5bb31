"""Names and sizes <-> ranks: where every rank of a mesh sits, by arithmetic alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np
from einops import rearrange
from numpy.typing import NDArray

from meshcomm.errors import LayoutError, UnknownDim
from meshcomm.layout.names import check_name, did_you_mean
from meshcomm.layout.sizes import fold, resolve, times, toml_dims

Dims: TypeAlias = str | tuple[str, ...]
Ranks: TypeAlias = NDArray[np.int64]


class Digits(tuple[tuple[int, int], ...]):
    """How positions are read along some dims: (size, stride) pairs, outermost first.

    A position is a rank's index in the row-major rank grid. Its coord is the mixed-radix number
    whose digits are `position // stride % size`. Two dims have the same groups, in the same
    order, exactly when their canonical digits are equal.
    """

    __slots__ = ()

    @property
    def size(self) -> int:
        """Number of coords."""
        return math.prod(size for size, _ in self)

    def canonical(self) -> Digits:
        """Without digits of size 1, and neighbours that step evenly written as one."""
        joined: list[tuple[int, int]] = []
        for size, stride in self:
            if size == 1:
                continue
            if joined and joined[-1][1] == size * stride:
                joined[-1] = (joined[-1][0] * size, stride)
            else:
                joined.append((size, stride))
        return Digits(joined)

    def coord(self, position: int) -> int:
        """The coord of a position."""
        value = 0
        for size, stride in self:
            value = value * size + position // stride % size
        return value

    def coords(self, positions: Ranks) -> Ranks:
        """`coord` of every position, same shape."""
        values = np.zeros_like(positions)
        for size, stride in self:
            values = values * size + positions // stride % size
        return values

    def offset(self, coord: int) -> int:
        """How far the position with this coord lies from the one with coord 0."""
        value = 0
        for size, stride in reversed(self):
            value += coord % size * stride
            coord //= size
        return value

    def offsets(self) -> Ranks:
        """`offset` of every coord, shape (size,)."""
        grid = np.zeros(1, dtype=np.int64)
        for size, stride in self:
            grid = (grid[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
        return grid


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

    __slots__ = ("_digits", "_homes", "_order", "_position", "dims", "merge", "views", "world_size")

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
        _check_sizes(dims, "dims")
        self.dims = MappingProxyType(dict(dims))
        self.world_size = math.prod(dims.values())
        self._order, self._position = _order(rank_order, self.dims, self.world_size)

        # _homes: which factorisation a dim belongs to, "" for the base; _digits: how it is read.
        self._homes: dict[str, str] = {}
        self._digits: dict[Dims, Digits] = {}
        self._add_factorisation("", self.dims)
        resolved: dict[str, Mapping[str, int]] = {}
        for view, sizes in (views or {}).items():
            check_name(view, "view")
            _check_sizes(sizes, f"views.{view}", open_dim=True)
            filled = resolve(sizes, self.world_size, f"view {view}")
            self._add_factorisation(view, filled)
            resolved[view] = MappingProxyType(filled)
        self.views = MappingProxyType(resolved)

        merged: dict[str, tuple[str, ...]] = {}
        for name, parts in (merge or {}).items():
            check_name(name, "merged dim")
            if name in self._digits:
                raise LayoutError(
                    f"merge.{name} has the name of a dim",
                    given=f"merge.{name} = {list(parts)}, dims {toml_dims(self.dims)}",
                    expected="a name that no dim has",
                    hint=f"merge.{name}_{'_'.join(parts)}",
                )
            if len(parts) < 2:
                raise LayoutError(
                    f"merge.{name} merges {len(parts)} dim(s)",
                    given=f"merge.{name} = {list(parts)}",
                    expected="two or more dims",
                    hint=f"use the dim {parts[0]} itself" if parts else "remove the line",
                )
            digits = self._read(tuple(parts))
            merged[name] = self.expand(tuple(parts))
            self._digits[name] = digits
            self._homes[name] = self.home(tuple(parts))
        self.merge = MappingProxyType(merged)

    def _add_factorisation(self, view: str, sizes: Mapping[str, int]) -> None:
        stride = self.world_size
        for name, size in sizes.items():
            stride //= size
            digits = Digits([(size, stride)])
            known = self._digits.get(name)
            if known is None:
                self._digits[name] = digits
                self._homes[name] = view
            elif known.canonical() != digits.canonical():
                where = self._homes[name]
                raise LayoutError(
                    f"view {view} and {'the base' if not where else f'view {where}'} share the dim "
                    f'"{name}", but it has other groups there',
                    given=f"size {size}, stride {stride} in {view}; "
                    f"size {known[0][0]}, stride {known[0][1]} in {where or 'dims'}",
                    expected="a shared dim that means the same ranks in both",
                    hint=f"rename it in views.{view}, or place and size it as in {where or 'dims'}",
                )

    # -- values ---------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        order = None if self._order is None else self._order.tobytes()
        views = tuple((name, tuple(sizes.items())) for name, sizes in self.views.items())
        return (tuple(self.dims.items()), order, views, tuple(self.merge.items()))

    def __repr__(self) -> str:
        parts = [f"dims={dict(self.dims)}"]
        if self._order is not None:
            parts.append(f"rank_order={self._order.tolist()}")
        if self.views:
            parts.append(f"views={ {name: dict(sizes) for name, sizes in self.views.items()} }")
        if self.merge:
            parts.append(f"merge={dict(self.merge)}")
        return f"Layout({', '.join(parts)})"

    @property
    def rank_order(self) -> tuple[int, ...] | None:
        """The rank at each position, or None where rank and position are the same."""
        return None if self._order is None else tuple(self._order.tolist())

    @property
    def ranks(self) -> Ranks:
        """Every rank of the layout, in grid order."""
        if self._order is None:
            return np.arange(self.world_size, dtype=np.int64)
        return self._order.copy()

    @property
    def names(self) -> tuple[str, ...]:
        """Every single name that a call may use: base dims, view dims, merged dims."""
        return tuple(name for name in self._digits if isinstance(name, str))

    def __contains__(self, rank: object) -> bool:
        if self._position is None:
            return isinstance(rank, int) and 0 <= rank < self.world_size
        return rank in self._position

    # -- dims -----------------------------------------------------------------------------------

    def digits(self, dims: Dims) -> Digits:
        """How positions are read along `dims`. Raises UnknownDim."""
        try:
            return self._digits[dims]
        except (KeyError, TypeError):
            return self._read(dims)

    def size(self, dims: Dims) -> int:
        """Number of ranks along `dims`."""
        return self.digits(dims).size

    def expand(self, dims: Dims) -> tuple[str, ...]:
        """`dims` with merged names replaced by the dims they merge."""
        names = (dims,) if isinstance(dims, str) else dims
        merge = getattr(self, "merge", {})
        flat: list[str] = []
        for name in names:
            flat.extend(merge.get(name, (name,)))
        return tuple(flat)

    def home(self, dims: Dims) -> str:
        """The view that `dims` belong to, "" for the base."""
        names = self.expand(dims)
        for name in names:
            if name not in self._homes:
                self._unknown(name)
        homes = dict.fromkeys(self._homes[name] for name in names)
        for candidate in ("", *homes):
            sizes = self._factorisation(candidate)
            if all(name in sizes for name in names):
                return candidate
        raise UnknownDim(
            f"{_quoted(names)} do not belong to one factorisation of the mesh",
            given=", ".join(f"{name} of {self._homes[name] or 'the base'}" for name in names),
            expected="dims of the base, or dims of one view",
            hint="declare a view that has them all",
        )

    def _factorisation(self, view: str) -> Mapping[str, int]:
        if not view or view not in getattr(self, "views", {}):
            return self.dims
        return self.views[view]

    def _read(self, dims: Dims) -> Digits:
        if isinstance(dims, str):
            self._unknown(dims)
        if not isinstance(dims, tuple) or not dims:
            raise UnknownDim(
                f"not a dim or a tuple of dims: {dims!r}",
                given=repr(dims),
                expected="a name, or a tuple of names",
                hint=self._listed(),
            )
        names = self.expand(dims)
        for name in names:
            if name not in self._digits:
                self._unknown(name)
        if len(set(names)) != len(names):
            raise UnknownDim(
                f"{_quoted(names)} name a dim twice",
                given=_quoted(names),
                expected="each dim once",
                hint=_quoted(tuple(dict.fromkeys(names))),
            )
        home = self.home(names)
        sizes = self._factorisation(home)
        digits: list[tuple[int, int]] = []
        for name in names:
            inner = list(sizes.values())[list(sizes).index(name) + 1 :]
            digits.append((sizes[name], math.prod(inner)))
        result = Digits(digits)
        self._digits[dims] = result
        return result

    def _unknown(self, name: object) -> None:
        raise UnknownDim(
            f"the mesh has no dim {name!r}",
            given=repr(name),
            expected=self._listed(),
            hint=did_you_mean(str(name), self.names) or "one of these, or a tuple of them",
        )

    def _listed(self) -> str:
        text = "one of " + ", ".join(f"{name} ({self.size(name)})" for name in self.dims)
        for view, sizes in getattr(self, "views", {}).items():
            text += f"; of view {view}: " + ", ".join(f"{n} ({s})" for n, s in sizes.items())
        merge = getattr(self, "merge", {})
        if merge:
            text += "; merged: " + ", ".join(f"{n} {_quoted(parts)}" for n, parts in merge.items())
        return text

    # -- ranks ----------------------------------------------------------------------------------

    def position(self, rank: int) -> int:
        """Index of `rank` in the row-major rank grid. Raises LayoutError where it has none."""
        if rank not in self:
            raise LayoutError(
                f"rank {rank} is not in the mesh",
                given=f"rank {rank}",
                expected=f"0 to {self.world_size - 1}"
                if self._position is None
                else f"one of {fold(sorted(self._position))}",
                hint=f"the mesh has {times(self.dims)} ranks",
            )
        return rank if self._position is None else self._position[rank]

    def rank_of(self, position: int) -> int:
        """The rank at a position of the row-major rank grid."""
        return position if self._order is None else int(self._order[position])

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
                if name not in self._digits:
                    self._unknown(name)
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
        names = self.expand(dims)
        self.digits(dims)
        sizes = self._factorisation(self.home(names))
        grid = self.ranks.reshape(tuple(sizes.values()))
        rest = [name for name in sizes if name not in names]
        pattern = f"{' '.join(sizes)} -> ({' '.join(rest)}) ({' '.join(names)})"
        return rearrange(grid, pattern)

    def group_of(self, rank: int, dims: Dims) -> Ranks:
        """The ranks of `rank`'s group along `dims`, in coord order: element c has coord c."""
        digits = self.digits(dims)
        position = self.position(rank)
        positions = position - digits.offset(digits.coord(position)) + digits.offsets()
        return positions if self._order is None else self._order[positions]

    def group_index(self, rank: int, dims: Dims) -> int:
        """Which row of `groups(dims)` holds `rank`."""
        return self.others(dims).coord(self.position(rank))

    def others(self, dims: Dims) -> Digits:
        """How positions are read along all the dims that `dims` are not."""
        names = self.expand(dims)
        sizes = self._factorisation(self.home(names))
        rest = tuple(name for name in sizes if name not in names)
        return self.digits(rest) if rest else Digits()

    def peer(self, rank: int, dim: Dims, offset: int, wrap: bool = True) -> int | None:
        """The rank `offset` coords further along `dim`; None past the edge without `wrap`."""
        digits = self.digits(dim)
        position = self.position(rank)
        coord = digits.coord(position)
        target = coord + offset
        if wrap:
            target %= digits.size
        elif not 0 <= target < digits.size:
            return None
        return self.rank_of(position - digits.offset(coord) + digits.offset(target))


def _check_sizes(dims: Mapping[str, int], where: str, open_dim: bool = False) -> None:
    if not dims:
        raise LayoutError(
            f"{where} is empty",
            given="no dim",
            expected="at least one dim",
            hint=f"{where} = {{ dp = 1 }}",
        )
    for name, size in dims.items():
        check_name(name, "dim")
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and not open_dim):
            raise LayoutError(
                f"{where}.{name} = {size!r} is not a size",
                given=f"{name} = {size!r}",
                expected="a whole number of 1 or more",
                hint=f"{where}.{name} = 1 keeps the dim and gives it one rank",
            )


def _order(
    rank_order: Sequence[int] | None, dims: Mapping[str, int], world: int
) -> tuple[Ranks | None, dict[int, int] | None]:
    if rank_order is None:
        return None, None
    order = np.asarray(rank_order, dtype=np.int64)
    if order.shape != (world,):
        raise LayoutError(
            f"rank_order lists {order.size} ranks for a mesh of {world}",
            given=f"{order.size} ranks, {times(dims)}",
            expected=f"{world} different ranks",
            hint="one rank for each position of the row-major grid, or no rank_order",
        )
    values, counts = np.unique(order, return_counts=True)
    if (values.size and values[0] < 0) or (counts > 1).any():
        odd = values[(counts > 1) | (values < 0)]
        raise LayoutError(
            "rank_order is not a permutation",
            given=f"rank {int(odd[0])} {'twice' if odd[0] >= 0 else ''}".rstrip(),
            expected=f"{world} different ranks, none negative",
            hint="list each rank once",
        )
    if (order == np.arange(world)).all():
        return None, None
    order.setflags(write=False)
    return order, {rank: position for position, rank in enumerate(order.tolist())}


def _quoted(names: Sequence[str]) -> str:
    return "(" + ", ".join(f'"{name}"' for name in names) + ")"
