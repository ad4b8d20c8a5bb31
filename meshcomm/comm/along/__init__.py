"""Communication along dims by name: what a mesh can say to its ranks."""

from __future__ import annotations

from meshcomm.comm.along.messages import MessagesAlong
from meshcomm.comm.along.moves import MovesAlong
from meshcomm.comm.along.reductions import ReductionsAlong

__all__ = ["AlongDims"]


class AlongDims(ReductionsAlong, MovesAlong, MessagesAlong):
    """Collectives and messages whose first argument says along which dims. `Mesh` is one.

    Peers and roots are coords along the dims. A subclass has `layout`, `label` (this rank with its
    coords, for errors) and a Directory of communicators.
    """
