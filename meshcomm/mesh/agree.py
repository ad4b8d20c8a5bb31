"""All ranks agree on the mesh, through the store, before the first group exists."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import socket
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final, NamedTuple

from meshcomm.errors import MeshMismatchError
from meshcomm.layout.sizes import ranks_text
from meshcomm.rendezvous.store import SLICE_S, Interrupted, interrupted, store_failed
from meshcomm.watching.verdict import alike, blamed, majority

# The lower bits of the arrival counter hold the number of ranks that have arrived. The upper bits hold the sum of the
# world sizes that these ranks expect: n * n for n ranks. The store's signed 64-bit numbers can count two million ranks.
_COUNT_BITS: Final = 21
_COUNT: Final = (1 << _COUNT_BITS) - 1
# How long the watching rank pauses between two checks of the store, if world sizes differ.
_PAUSE_S: Final = 0.01

# The verdict, packed with the time on the deciding host, the ranks per host, and `nodes`; see Agreed.
AGREED: Final = "agree %Y%m%d-%H%M%S"

# How long ranks wait for the rank that reads the list of arrivals.
_TELL_S: Final = 10.0
# How long the rank that hosts the store waits for the others to read the error: a rank that has exited never confirms this.
_LEAVES_S: Final = 3.0


def agree(
    store: Any,
    rank: int,
    ranks: Sequence[int],
    facts: Mapping[str, Any],
    timeout_s: float,
    what: str = "the mesh",
) -> Agreed:
    """Block until every rank of `ranks` has arrived with equal `facts`. Otherwise, raise an error on every rank.

    store: the job's store, under a prefix for this agreement.
    facts: maps names to plain data that must be equal.

    Takes three store operations per rank. The majority decides which ranks are mismatched. In a tie, all ranks are
    mismatched. Raises MeshMismatchError with the mismatched ranks, the fact and both values. After
    `timeout_s`, the error names the missing ranks and the hosts of the ranks that arrived. A rank that arrives after
    the others gave up raises this error too. Raises StoreError if the store fails.
    """
    world_size = len(ranks)
    text = json.dumps({"world": world_size, **facts}, separators=(",", ":"))
    mine = hashlib.sha256(text.encode()).hexdigest()[:16]
    deadline = time.monotonic() + timeout_s
    try:
        # One number holds the count of arrived ranks and the sum of the world sizes that they expect.
        total = store.add("come", 1 + (world_size << _COUNT_BITS))
        count, expected = total & _COUNT, total >> _COUNT_BITS
        _announce(store, count, _Arrival(rank, mine, world_size, socket.gethostname()))
        if expected != count * world_size:
            # A single rank watches for all ranks, because every watcher reads the full list.
            if store.add("watchers", 1) == 1:
                _watch(store, deadline)
        elif count == world_size:
            _conclude(store, count, deadline)
        try:
            verdict = _get(store, "verdict", max(deadline - time.monotonic(), 0.001))
        except Interrupted:
            raise
        except RuntimeError:
            # A rank that arrives later reads this key and learns that it is too late.
            verdict = store.compare_set("verdict", "", "gave up")
        if verdict == b"gave up":
            raise _same_error(store, rank, partial(_absent, store, ranks, timeout_s, what))
        word, *words = verdict.decode().split(" ")
        if word != "agree":
            store.set(f"facts/{mine}", text)
            raise _same_error(store, rank, partial(_mismatch, store, timeout_s, what))
        return Agreed(words[0], int(words[1]), _unpacked(words[2]) if len(words) > 2 else ())
    except RuntimeError as error:
        lost = f"rank {rank} lost the job's store while the ranks agreed on {what}"
        raise store_failed(lost, error) from error


def leave_together(store: Any, stays: bool) -> None:
    """Called by every rank of a failed agreement, after the rank has read the error.

    stays: whether this process may host the store. If so, wait up to three seconds for the others to read the error.
    """
    deadline = time.monotonic() + _LEAVES_S
    with contextlib.suppress(RuntimeError):
        left_count = store.add("left", 1)
        while stays and left_count < len(_announced(store)) and time.monotonic() < deadline:
            time.sleep(0.02)
            left_count = store.add("left", 0)


def _same_error(store: Any, rank: int, find: Callable[[], MeshMismatchError]) -> MeshMismatchError:
    """Raise the same error on every rank: one rank reads the list and publishes the error. If all of 131,072 ranks read the
    list, they would read 741 GB in total."""
    if store.add("tellers", 1) == 1:
        error = find()
        store.set("told", json.dumps(vars(error)))
        return error
    try:
        facts = json.loads(_get(store, "told", _TELL_S))
    except RuntimeError:  # the rank that should publish the error is gone
        return find()
    lists = {name: tuple(facts.get(name, ())) for name in ("mismatched_ranks", "missing")}
    if rank in lists["missing"]:
        # The same first line as on the others, so that a launcher prints it once.
        facts["given"] = f"{facts['given']}; rank {rank} has arrived since, after the others had given up"
        facts["hint"] = "start the ranks closer together, or set a longer timeout_s"
    return MeshMismatchError(**{**facts, **lists})


class Agreed(NamedTuple):
    """moment: the time, as in `20261122-142530`.
    ranks_per_host: ranks r with equal r // ranks_per_host share a host. 0 if hosts have different numbers of ranks, or if
        the ranks of a host are not consecutive.
    nodes: the index of each rank's host, if ranks_per_host is 0. Hosts are numbered in the order of their first ranks."""

    moment: str
    ranks_per_host: int
    nodes: tuple[int, ...] = ()


class _Arrival(NamedTuple):
    rank: int
    fingerprint: str
    world_size: int
    host: str


def _announce(store: Any, number: int, arrival: _Arrival) -> None:
    """Publish the arrival `number`. If the store can append atomically, all ranks share one key."""
    line = " ".join(map(str, arrival)) + "\n"
    if store.has_extended_api():
        store.append("here", line)
    else:
        store.set(f"here/{number}", line)


def _announced(store: Any) -> dict[int, _Arrival]:
    """Return the ranks that have arrived so far. Called by ranks that have already arrived."""
    if store.has_extended_api():
        lines = store.get("here").decode().splitlines()
    else:
        numbers = range(1, (store.add("come", 0) & _COUNT) + 1)
        keys = [key for key in (f"here/{number}" for number in numbers) if store.check([key])]
        lines = [store.get(key).decode().strip() for key in keys]
    arrivals = (line.split(" ", 3) for line in lines)
    return {int(rank): _Arrival(int(rank), mine, int(size), host) for rank, mine, size, host in arrivals}


def _conclude(store: Any, count: int, deadline: float) -> int:
    """Publish the verdict if no ranks beyond the `count` that have arrived are expected. Return the next count to check."""
    while len(arrivals := _announced(store)) < count:
        if time.monotonic() >= deadline:
            return count
        time.sleep(0.001)
    sizes = Counter(arrivals[rank].world_size for rank in sorted(arrivals))
    if count >= sizes.most_common(1)[0][0]:
        alike = len({arrival.fingerprint for arrival in arrivals.values()}) == 1 and len(sizes) == 1
        hosts = [arrivals[rank].host for rank in sorted(arrivals)]
        agreed = f"{time.strftime(AGREED)} {_ranks_per_host(hosts) or f'0 {_packed(hosts)}'}"
        store.compare_set("verdict", "", agreed if alike else "differ")
    return min((size for size in (*sizes, 2 * count) if size > count), default=count)


def _watch(store: Any, deadline: float) -> None:
    """If world sizes differ, decide once the most commonly expected number of ranks has arrived."""
    enough = 0
    while time.monotonic() < deadline and not store.check(["verdict"]):
        count = store.add("come", 0) & _COUNT
        if count >= enough:
            enough = _conclude(store, count, deadline)
        time.sleep(_PAUSE_S)


def _ranks_per_host(hosts: Sequence[str]) -> int:
    """See Agreed. `hosts` lists each rank's host.

    >>> _ranks_per_host("aabb"), _ranks_per_host("abab"), _ranks_per_host("aab"), _ranks_per_host("aabbaa")
    (2, 0, 0, 0)
    """
    per_host = len(hosts) // len(set(hosts))
    blocks = all(host == hosts[rank - rank % per_host] for rank, host in enumerate(hosts))
    return per_host if blocks and per_host * len(set(hosts)) == len(hosts) else 0


def _packed(hosts: Sequence[str]) -> str:
    """Return the host of each rank, run-length encoded: 2 kB for 131,072 ranks that are assigned to hosts in turn.

    >>> _unpacked(_packed("baab"))
    (0, 1, 1, 0)
    """
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return base64.b64encode(zlib.compress(json.dumps([numbers[host] for host in hosts]).encode())).decode()


def _unpacked(text: str) -> tuple[int, ...]:
    return tuple(json.loads(zlib.decompress(base64.b64decode(text))))


def _get(store: Any, key: str, timeout_s: float) -> bytes:
    """Wait for `key` and return its value, in one round trip instead of two."""
    usual, ends = store.timeout, time.monotonic() + timeout_s
    try:
        while True:
            left_s = max(ends - time.monotonic(), 0.001)
            slice_s = min(left_s, SLICE_S) if interrupted else left_s
            store.set_timeout(timedelta(seconds=slice_s))
            try:
                value: bytes = store.get(key)
                return value
            except RuntimeError as error:
                if slice_s == left_s or "timeout" not in str(error).lower():
                    raise
            if any(is_interrupted() for is_interrupted in interrupted):
                raise Interrupted("a wait on the store ended because ranks were lost")
    finally:
        store.set_timeout(usual)


def _mismatch(store: Any, timeout_s: float, what: str) -> MeshMismatchError:
    arrivals = _announced(store)
    present = sorted(arrivals)
    prints = {rank: arrivals[rank].fingerprint for rank in present}
    usual, odd = majority(prints)
    differ = alike(odd, prints)
    # In a tie, the error compares the first rank's facts with the others'.
    common = usual or differ.pop(0)
    facts = json.loads(_get(store, f"facts/{prints[common[0]]}", timeout_s))
    others = "the others" if usual else ranks_text(common)
    lines: list[str] = []
    for ranks in differ:
        other_facts = json.loads(store.get(f"facts/{prints[ranks[0]]}"))
        for name, ours, theirs in _differences(facts, other_facts):
            lines.append(f"{ranks_text(ranks)}: {name} = {_plain(theirs)}; {others}: {_plain(ours)}")
    return MeshMismatchError(
        f"{what} differs between ranks: {blamed(odd, not usual, len(present))}",
        given="\n".join(lines),
        expected=f"the values of {ranks_text(usual)}" if usual else "the same values on every rank",
        hint=f"start {ranks_text(odd)} with the same config, code and package versions",
        mismatched_ranks=tuple(odd),
    )


def _absent(store: Any, ranks: Sequence[int], timeout_s: float, what: str) -> MeshMismatchError:
    arrivals = _announced(store)
    hosts: dict[str, list[int]] = {}
    for rank in sorted(arrivals):
        hosts.setdefault(arrivals[rank].host, []).append(rank)
    missing = tuple(rank for rank in ranks if rank not in arrivals)
    came = "arrived, by host: " + "; ".join(f"{host}: {ranks_text(own)}" for host, own in hosts.items())
    expected = f"all of {ranks_text(sorted(ranks))}"
    if not missing:
        return MeshMismatchError(
            f"all {len(ranks)} ranks have arrived by now to agree on {what}, but some gave up earlier",
            given=f"a timeout of {timeout_s:g} s; {came}",
            expected=expected,
            hint="start the ranks closer together, or set a longer timeout_s",
        )
    return MeshMismatchError(
        f"{ranks_text(missing)} of {len(ranks)} never arrived to agree on {what}",
        given=f"after {timeout_s:g} s {came}",
        expected=expected,
        hint="check how the missing ranks were started, and their first error",
        missing=missing,
    )


def _differences(ours: Any, theirs: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Return the differing facts by dotted name, two levels deep. If only the order of names differs, return the full fact."""
    if not (isinstance(ours, dict) and isinstance(theirs, dict)) or path.count(".") == 2:
        return [(path, ours, theirs)]
    if path and list(ours) != list(theirs) and set(ours) == set(theirs):
        return [(path, ours, theirs)]
    return [
        difference
        for name in dict.fromkeys((*ours, *theirs))
        if json.dumps(ours.get(name)) != json.dumps(theirs.get(name))
        for difference in _differences(ours.get(name), theirs.get(name), f"{path}.{name}" if path else name)
    ]


def _plain(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_plain(inner)}" for name, inner in value.items()) + " }"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) < 200 else text[:200] + " .."
