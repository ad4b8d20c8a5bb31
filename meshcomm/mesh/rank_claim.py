"""Is this process the only one of its rank? Asked through the store, before it counts itself anywhere."""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path
from typing import Any, Final

from meshcomm.errors import LaunchError, MeshMismatchError
from meshcomm.layout.sizes import ranks_text

_NAME: Final = re.compile(r"process (\d+) of (.*), started at (\S+)")
_TWICE: Final = "meshcomm/twice"


def process_name() -> str:
    """What no other process is called: its host, number, and when it was started."""
    return f"process {os.getpid()} of {socket.gethostname()}, started at {_started('self') or '?'}"


def is_running(name: str) -> bool | None:
    """Whether the process with this `process_name` runs, as far as its host can tell; None on another host."""
    parts = _NAME.fullmatch(name)
    if parts is None or parts[2] != socket.gethostname():
        return None
    if parts[3] != "?":
        return _started(parts[1]) == parts[3]
    if sys.platform == "win32":
        return False  # there, a signal of 0 would be Ctrl-C
    try:
        os.kill(int(parts[1]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _started(process: str) -> str | None:
    """When a process of this host was started, in the kernel's ticks; None where it has ended or nobody says."""
    try:
        # The name in parentheses may hold anything; what follows it are a state and numbers.
        numbers = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return None if numbers[0] in "ZX" else numbers[19]
    except (OSError, IndexError):
        return None


def claim(store: Any, rank: int, *, kept: bool) -> None:
    """Say that this process is `rank`; harmless when repeated, and after a process that has ended.

    Called by: every process of the job, before anything else that counts its rank in the store.
    store: seen by all of them. kept: whether it may hold what earlier attempts of the job wrote; then a
    process of another host, of which nobody here knows whether it runs, counts as one of those.

    Costs one store operation. Raises LaunchError naming both processes where another one is this rank;
    `blame` then tells the others.
    """
    key, mine = f"meshcomm/owner/{rank}", process_name()
    first = store.compare_set(key, "", mine).decode()
    if first == mine:
        return
    runs = is_running(first)
    if runs or (runs is None and not kept):
        raise came_twice(store, rank, first)
    store.compare_set(key, first, mine)


def came_twice(store: Any, rank: int, first: str) -> LaunchError:
    """The error of this process where the one called `first` is `rank` as well; left for the others too."""
    mine = process_name()
    line = f"{rank}\t{first}\t{mine}\n"
    if store.has_extended_api():
        store.append(_TWICE, line)
    else:
        store.set(_TWICE, line)
    return LaunchError(
        f"rank {rank} came twice: another process has said before that it is rank {rank}",
        given=f"{first}\n{mine} (this one)",
        expected="another rank for each process of a job, and another address or file for each job",
        hint="look at what says the rank of both: RANK in the environment, process.rank, or init(rank=...)",
    )


def blame(error: MeshMismatchError, store: Any) -> None:
    """Where ranks never came, say in `error` which other ranks came twice: they are the mismatched ones.

    store: as for `claim`. Changes nothing where no rank came twice, or the store is gone.
    """
    if not error.missing:
        return
    try:
        lines = store.get(_TWICE).decode().splitlines() if store.check([_TWICE]) else []
        found = [(int(rank), first, second) for rank, first, second in (line.split("\t") for line in lines)]
        # What an earlier attempt left is of a process that is nobody's owner any more.
        found = [each for each in found if store.get(f"meshcomm/owner/{each[0]}").decode() == each[1]]
    except RuntimeError:
        return
    if not found:
        return
    error.mismatched_ranks = tuple(sorted({rank for rank, _, _ in found}))
    listed = [f"rank {rank} came twice: {first}; and {second}" for rank, first, second in found]
    error.given = "\n".join([str(error.given), *listed])
    error.hint = f"look at what says the rank of the processes that are {ranks_text(error.mismatched_ranks)}"
