"""Where is this rank, and where is any other, along the dims of a live mesh?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, overload

from meshcomm.errors import LayoutError, NotMember
from meshcomm.layout import Dims, Layout
from meshcomm.layout.sizes import fold
from meshcomm.mesh.environment import Launch


class TopologyQueries:
    """Ranks and coords, answered by the layout. `Mesh` is one; it has `rank` and `layout`."""

    rank: int
    layout: Layout
    _launch: Launch
    _data_dims: tuple[str, ...] | None

    @property
    def is_member(self) -> bool:
        """Whether this rank is in the mesh."""
        return self.rank in self.layout

    @property
    def local_rank(self) -> int:
        """The number of this process on its host, as the launcher says it: which of the host's devices is its own.

        Not unique across hosts: every host has a local rank 0.
        """
        return self._launch.local_rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the mesh."""
        return self.layout.world_size

    @property
    def dims(self) -> Mapping[str, int]:
        """Base dims and their sizes, outermost first."""
        return self.layout.dims

    @property
    def coords(self) -> dict[str, int]:
        """This rank's coords, by base dim."""
        return self.layout.coords(self._member())

    def coords_of(self, rank: int, view: str | None = None) -> dict[str, int]:
        """The coords of any rank, in the base or in a view."""
        return self.layout.coords(rank, view)

    def size(self, dims: Dims) -> int:
        """Number of ranks along `dims`."""
        return self.layout.size(dims)

    def coord(self, dims: Dims) -> int:
        """This rank's coord along `dims`."""
        return self.layout.coord(self._member(), dims)

    @property
    def data_rank(self) -> int:
        """Which share of the samples is this rank's: its coord along the dims that play data and shard, outermost first.

        Equal along tensor, pipeline and context, whose ranks read the same samples: what a DistributedSampler takes as
        `rank`. Raises LayoutError where the mesh was opened without [parallel], which says the roles.
        """
        dims = self._samples_differ_along()
        return self.coord(dims) if dims else 0

    @property
    def data_world(self) -> int:
        """In how many shares the samples are divided: a DistributedSampler's `num_replicas`. Raises as `data_rank`."""
        dims = self._samples_differ_along()
        return self.size(dims) if dims else 1

    def _samples_differ_along(self) -> tuple[str, ...]:
        self._member()
        if self._data_dims is None:
            dims = tuple(self.layout.dims)
            some = f'"{dims[0]}"' if len(dims) == 1 else f'("{dims[0]}", "{dims[1]}")'
            raise LayoutError(
                "the mesh was not told along which dims samples differ",
                given=f"dims {', '.join(dims)}, and no [parallel] that says the part of each",
                expected="a mesh that was opened with a configuration that has [parallel]",
                hint=f"mesh.coord({some}) and mesh.size({some}), with the dims along which yours do",
            )
        return self._data_dims

    def ranks(self, dims: Dims) -> list[int]:
        """The global ranks of this rank's group along `dims`; element c has coord c."""
        ranks: list[int] = self.layout.group_of(self._member(), dims).tolist()
        return ranks

    def rank_at(self, **coords: int) -> int:
        """The global rank at these coords."""
        return self.layout.rank_at(**coords)

    @overload
    def peer_rank(self, dims: Dims, offset: int, *, wrap: Literal[True] = ...) -> int: ...
    @overload
    def peer_rank(self, dims: Dims, offset: int, *, wrap: bool) -> int | None: ...
    def peer_rank(self, dims: Dims, offset: int, *, wrap: bool = True) -> int | None:
        """The global rank `offset` coords further along `dims`; None past the edge without `wrap`.

        For what counts in ranks, a log say. Messages take the coord: `dst=mesh.coord(dims) + offset`.
        """
        return self.layout.peer_rank(self._member(), dims, offset, wrap=wrap)

    @property
    def label(self) -> str:
        """This rank with its coords, as in `rank 5 (pp=1 dp=0 tp=1)`."""
        return self.layout.label(self.rank)

    def _member(self) -> int:
        if not self.is_member:
            raise NotMember(
                f"rank {self.rank} is not in the mesh {dict(self.layout.dims)}",
                given=f"rank {self.rank}; the mesh covers ranks {fold(self.layout.ranks)}",
                expected="a rank of the mesh",
                hint="if mesh.is_member:",
            )
        return self.rank

    def _usable(self) -> None:
        """Raise where nothing can be called: on a rank that is not a member."""
        self._member()
