"""Collectives along one dim, or along several merged into one."""

from __future__ import annotations

from typing import final

from meshcomm.comm.moves import Moves
from meshcomm.comm.reductions import Reductions


@final
class Communicator(Reductions, Moves):
    """What talks along `name`. Shape rules live here, once for every transport.

    Args:
        name: the dim or dims, as errors show them.
        transport: the group.
        who: this rank with its coords, for errors, as in `rank 5 (pp=1 dp=0 tp=1)`.
        calls: compares the first calls on this group between its ranks.
        recorder: remembers the calls on this group, and knows whom to ask when one fails.

    Methods take what the Mesh methods of the same name take, after the dims, and keep the same
    promises; with `async_op` they return a Handle of what they otherwise return.
    """

    __slots__ = ()
