"""Do all ranks mean the same mesh? Asked through the store, before the first group exists."""

from __future__ import annotations

import hashlib
import json
import socket
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from meshcomm.errors import MeshMismatchError
from meshcomm.layout.sizes import fold


def agree(
    store: Any,
    rank: int,
    world_size: int,
    facts: Mapping[str, Any],
    timeout_s: float,
    what: str = "the mesh",
) -> None:
    """Return when every rank has come with equal `facts`; else raise on every rank.

    Args:
        store: a torch store that all ranks see (its stubs lack half of its methods), used for
            nothing else: give each agreement its own prefix.
        facts: name -> plain data that must be equal. What differs by nature stays out.

    Costs three store operations per rank. Who is odd is decided by majority, among equals by the
    lowest rank. Raises MeshMismatchError naming the odd ranks, the fact and both values, or, after
    `timeout_s`, the ranks that never came and the hosts of those that did.
    """
    text = json.dumps(facts, sort_keys=False, separators=(",", ":"))
    mine = hashlib.sha256(text.encode()).hexdigest()[:16]
    _announce(store, rank, mine)
    if store.add("come", 1) == world_size:
        prints = {each.fingerprint for each in _announced(store, world_size).values()}
        store.set("verdict", "agree" if len(prints) == 1 else "differ")
    try:
        verdict = _get(store, "verdict", timeout_s)
    except RuntimeError as error:
        raise _absent(store, world_size, timeout_s, what) from error
    if verdict != b"agree":
        store.set(f"facts/{mine}", text)
        raise _mismatch(store, world_size, what)


class _Arrival(NamedTuple):
    fingerprint: str
    host: str


def _announce(store: Any, rank: int, fingerprint: str) -> None:
    """Say that `rank` is here. One key for all ranks where the store can append in one step."""
    if store.has_extended_api():
        store.append("here", f"{rank} {fingerprint} {socket.gethostname()}\n")
    else:
        store.set(f"here/{rank}", f"{rank} {fingerprint} {socket.gethostname()}\n")


def _announced(store: Any, world_size: int) -> dict[int, _Arrival]:
    """Who has come so far, by rank."""
    if store.has_extended_api():
        lines = store.get("here").decode().splitlines()
    else:
        keys = [key for key in (f"here/{rank}" for rank in range(world_size)) if store.check([key])]
        lines = [store.get(key).decode().strip() for key in keys]
    arrivals = {}
    for line in lines:
        rank, fingerprint, host = line.split(" ", 2)
        arrivals[int(rank)] = _Arrival(fingerprint, host)
    return arrivals


def _get(store: Any, key: str, timeout_s: float) -> bytes:
    """The value of `key`, waited for: one trip to the store where wait and get are two."""
    usual = store.timeout
    store.set_timeout(timedelta(seconds=timeout_s))
    try:
        value: bytes = store.get(key)
        return value
    finally:
        store.set_timeout(usual)


def _mismatch(store: Any, world_size: int, what: str) -> MeshMismatchError:
    arrivals = _announced(store, world_size)
    prints = [arrivals[rank].fingerprint for rank in range(world_size)]
    # Most ranks first; of equally many, the one with the lowest rank.
    common = Counter(prints).most_common(1)[0][0]
    odd = tuple(other for other, fingerprint in enumerate(prints) if fingerprint != common)
    usual = json.loads(store.get(f"facts/{common}"))
    lines: list[str] = []
    for fingerprint in dict.fromkeys(prints[other] for other in odd):
        ranks = [other for other in odd if prints[other] == fingerprint]
        other_facts = json.loads(store.get(f"facts/{fingerprint}"))
        for name, ours, theirs in _differences(usual, other_facts):
            lines.append(f"{_ranks(ranks)}: {name} = {_plain(theirs)}; the others: {_plain(ours)}")
    usual_ranks = [other for other in range(world_size) if other not in odd]
    error = MeshMismatchError(
        f"{what} differs between ranks: {_ranks(odd)} of {world_size} {'is' if len(odd) == 1 else 'are'} odd",
        given="\n".join(lines),
        expected=f"what {_ranks(usual_ranks)} {'has' if len(usual_ranks) == 1 else 'have'}",
        hint=f"start {_ranks(odd)} with the same config, code and package versions",
    )
    error.odd_ranks = odd
    return error


def _absent(store: Any, world_size: int, timeout_s: float, what: str) -> MeshMismatchError:
    arrivals = _announced(store, world_size)
    hosts: dict[str, list[int]] = {}
    for rank in sorted(arrivals):
        hosts.setdefault(arrivals[rank].host, []).append(rank)
    missing = [rank for rank in range(world_size) if rank not in arrivals]
    came = "; ".join(f"{host}: {_ranks(ranks)}" for host, ranks in hosts.items())
    error = MeshMismatchError(
        f"{_ranks(missing)} of {world_size} never came to agree on {what}"
        if missing
        else f"no verdict on {what} within {timeout_s:g} s although all {world_size} ranks came",
        given=f"after {timeout_s:g} s there came, by host: {came}",
        expected=f"all of ranks 0 to {world_size - 1}",
        hint="look at how the missing ranks were started and at their first error",
    )
    error.missing = tuple(missing)
    return error


def _differences(ours: Any, theirs: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(ours, dict) and isinstance(theirs, dict) and path.count(".") < 2:
        if path and list(ours) != list(theirs) and set(ours) == set(theirs):
            return [(path, ours, theirs)]  # only the order differs
        found = []
        for name in dict.fromkeys((*ours, *theirs)):
            if ours.get(name) != theirs.get(name) or _order(ours.get(name)) != _order(theirs.get(name)):
                inner = f"{path}.{name}" if path else name
                found += _differences(ours.get(name), theirs.get(name), inner)
        return found
    return [(path, ours, theirs)]


def _order(value: Any) -> Any:
    return list(value) if isinstance(value, dict) else None


def _plain(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_plain(inner)}" for name, inner in value.items()) + " }"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) < 200 else text[:200] + " .."


def _ranks(ranks: tuple[int, ...] | list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {fold(ranks)}"
