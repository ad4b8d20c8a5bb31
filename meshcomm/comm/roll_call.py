"""A barrier that knows who is missing: ranks sign in at the store instead of at the backend."""

from __future__ import annotations

from typing import Any

from meshcomm.comm.store_wait import wait_for
from meshcomm.errors import BarrierTimeout
from meshcomm.layout.sizes import fold


def roll_call(store: Any, coord: int, ranks: list[int], timeout_s: float, where: str) -> None:
    """Return when every rank of `ranks` has come; after `timeout_s` raise, naming those that have not.

    Works on any backend, NCCL included, as it moves nothing on the device. Costs four store
    operations per rank, where all come at once.
    store: a torch store with a prefix that this call alone uses, the same on every rank.
    coord: this rank's place in `ranks`.
    Raises BarrierTimeout on every rank that came, also on one that comes after the others gave up.
    """
    store.set(f"here/{coord}", "1")
    if store.add("come", 1) == len(ranks):
        # Whoever gave up has left a note; then nobody may go on as if all had met.
        store.compare_set("verdict", "", "all here")
    came_in_time = wait_for(store, ["verdict"], timeout_s)
    verdict = store.get("verdict") if came_in_time else store.compare_set("verdict", "", "gave up")
    if verdict == b"all here":
        return
    missing = [rank for place, rank in enumerate(ranks) if not store.check([f"here/{place}"])]
    came = [rank for rank in ranks if rank not in missing]
    late = "" if missing else "; all have come by now, but some gave up before"
    error = BarrierTimeout(
        f"{where}: {len(missing)} of {len(ranks)} ranks did not come within {timeout_s:g} s",
        given=f"missing: rank {fold(missing)}; came: rank {fold(came)}"
        if missing
        else f"came: {fold(came)}{late}",
        expected=f"ranks {fold(ranks)}",
        hint="look at what the missing ranks are doing; a longer timeout_s helps only if they are slow",
    )
    error.missing = tuple(missing)
    raise error
