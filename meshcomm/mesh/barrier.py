"""A barrier at the job's store that ends in time, also where the store is what does not answer."""

from __future__ import annotations

import torch.distributed as dist

from meshcomm.comm.roll_call import roll_call
from meshcomm.comm.store_wait import kind_of
from meshcomm.errors import BarrierTimeout
from meshcomm.layout.sizes import fold
from meshcomm.mesh.reach import within
from meshcomm.mesh.store import GRACE_S


def meet_at_store(store: dist.Store, coord: int, ranks: list[int], timeout_s: float, where: str) -> None:
    """`roll_call`, ended a little after `timeout_s` where a TCPStore's server was cut off or stopped.

    store: with a prefix that this call alone uses, the same on every rank.
    coord: this rank's place in `ranks`.
    Raises BarrierTimeout: as roll_call does; or without anybody missing, where nothing is known of them.
    """

    def meet() -> None:
        roll_call(store, coord, ranks, timeout_s, where)

    if kind_of(store) != "TCPStore":
        meet()
        return
    try:
        within(timeout_s + 2 * GRACE_S, meet)
    except TimeoutError:
        raise BarrierTimeout(
            f"{where}: the job's store has not answered for {timeout_s:g} s",
            given="a TCPStore whose server was cut off, is stopped or is overloaded",
            expected=f"a store that answers; nothing is known of ranks {fold(ranks)}",
            hint="look at rank 0 or the launcher, which holds the store, and at the network between",
        ) from None
