"""From dims to the communicator that talks along them; a miss explains itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from meshcomm.comm.communicator import Communicator
from meshcomm.layout import Dims


@final
class CommunicatorCache(dict[Dims, Communicator]):
    """A dictionary, so that the hot path is one look-up.

    `explain(dims)` is called for dims that are not in it: it returns a communicator that they can
    share, or raises UnknownDim (or MeshClosed, or NotMember).
    """

    __slots__ = ("_explain",)

    def __init__(self, explain: Callable[[Dims], Communicator]) -> None:
        super().__init__()
        self._explain = explain

    def along(self, dims: Dims) -> Communicator:
        """`self[dims]`, also for what no dictionary takes, such as a list: it is refused by name."""
        try:
            return self[dims]
        except TypeError:
            return self._explain(dims)

    def __missing__(self, dims: Dims) -> Communicator:
        found = self._explain(dims)
        self[dims] = found
        return found
