"""Barriers with a timeout, through the job's store, that report which ranks did not arrive."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from meshcomm.errors import BarrierTimeout
from meshcomm.layout.sizes import fold
from meshcomm.mesh.runtime import Watching
from meshcomm.rendezvous.store import GRACE_S, kind_of, wait_for, within
from meshcomm.watching.recorder import FlightRecorder
from meshcomm.watching.words import UNKNOWN, made_at


def monitored_barrier(
    store: Any,
    coord: int,
    ranks: list[int],
    timeout_s: float,
    where: str,
    calls: Callable[[list[int]], str] | None = None,
) -> None:
    """Block until every rank of `ranks` has arrived. After `timeout_s`, raise an error with the missing ranks.

    Takes five store operations per rank if all ranks arrive at the same time. The last rank to leave deletes the keys.
    store: the job's store, under a prefix that only this call uses.
    coord: this rank's position in `ranks`.
    calls: returns lines with the calls of missing ranks.
    Raises BarrierTimeout on every rank that arrives, including ranks that arrive after the others gave up.
    The error names no missing ranks if a TCPStore's server does not answer.
    """
    meet = partial(_meet, store, coord, len(ranks), timeout_s)
    try:
        absent = within(timeout_s + 2 * GRACE_S, meet) if kind_of(store) == "TCPStore" else meet()
    except TimeoutError:
        raise BarrierTimeout(
            f"{where}: the job's store has not answered for {timeout_s:g} s",
            given="a TCPStore whose server was cut off, is stopped or is overloaded",
            expected=f"a store that answers; it is unknown which of ranks {fold(ranks)} have arrived",
            hint="check rank 0 or the launcher, which holds the store, and the network in between",
        ) from None
    if absent is None:
        return
    missing = [ranks[place] for place in absent]
    came = [rank for rank in ranks if rank not in missing]
    calls_made = calls(missing) if calls is not None and missing else ""
    raise BarrierTimeout(
        f"{where}: {len(missing)} of {len(ranks)} ranks did not arrive within {timeout_s:g} s",
        given=f"missing: rank {fold(missing)}; arrived: rank {fold(came)}"
        + (f"\n{calls_made}" if calls_made else "")
        if missing
        else f"arrived: {fold(came)}; all have arrived by now, but some gave up earlier",
        expected=f"ranks {fold(ranks)}",
        hint="if ranks differ in their number of calls, mesh.step() after each step names the call that a rank skipped"
        if calls_made
        else "look at what the missing ranks are doing; a longer timeout_s helps only if they are slow",
        missing=tuple(missing),
    )


def _meet(store: Any, coord: int, size: int, timeout_s: float) -> list[int] | None:
    """Return the coords of the missing ranks, or None if all ranks met."""
    store.set(f"here/{coord}", "1")
    arrival_keys = [f"here/{place}" for place in range(size)]
    # Another program can change the counter, but it cannot sign a key.
    if store.add("come", 1) >= size and store.check(arrival_keys):
        # A rank that gives up writes "gave up" first. After that, no rank may continue.
        store.compare_set("outcome", "", "all here")
    came_in_time = wait_for(store, ["outcome"], timeout_s)
    outcome = store.get("outcome") if came_in_time else store.compare_set("outcome", "", "gave up")
    absent = (
        None
        if outcome == b"all here"
        else [place for place, key in enumerate(arrival_keys) if not store.check([key])]
    )
    if store.add("left", 1) == size:
        for key in (*arrival_keys, "come", "outcome", "left"):
            store.delete_key(key)
    return absent


def calls_of(watch: Watching | None, recorders: Mapping[int, FlightRecorder], missing: list[int]) -> str:
    """Return lines with the calls of ranks that missed a barrier, in the groups that they share with this rank."""
    if watch is None:
        return ""
    mine = {recorder.label: recorder.started for recorder in recorders.values()}
    lines = []
    for rank, status in sorted(watch.statuses(missing).items()):
        for group in status["groups"]:
            ours, theirs = mine.get(group["label"]), group["started"]
            if ours is not None and theirs != ours:
                last = group["last"] or {**UNKNOWN, "call": "none", "callsite": status["main"]}
                lines.append(
                    f"rank {rank} has made {theirs} calls on {group['label']}, this rank {ours}; "
                    f"its last call: {last['call']} {made_at(last)}"
                )
    return "\n".join(lines[:8])
