"""May this host open as many files and threads as the plan needs?"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from meshcomm.doctor.finding import Facts, Finding
from meshcomm.layout import Plan
from meshcomm.mesh.devices import backend_on
from meshcomm.mesh.environment import with_variables


@dataclass(frozen=True, slots=True)
class Cost:
    """What one idle Gloo group costs a process; each peer that it talks to costs a descriptor more."""

    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True)
class Limit:
    """used: now. needed: by the ranks on this host beyond that, at most; None without a plan.

    scope: "process", "user" or "container". limit: None where there is none.
    """

    name: str
    scope: str
    limit: int | None
    used: int
    needed: int | None

    def facts(self) -> Facts:
        """As plain data."""
        return {
            "name": self.name,
            "scope": self.scope,
            "limit": self.limit,
            "used": self.used,
            "needed": self.needed,
        }


def gloo_cost(variables: dict[str, str]) -> Cost | None:
    """Measured here, on a Gloo group of one; None where the system does not say what is open.

    variables: as a mesh would set them. Raises RuntimeError where Gloo finds no address.
    """
    if not sys.platform.startswith("linux"):
        return None
    with with_variables(variables, keep=True):
        # The first group may also pay for what all share.
        groups = [_solo()]
        files, threads = descriptors(), thread_count()
        groups.append(_solo())
        cost = Cost(descriptors() - files, thread_count() - threads)
        groups.clear()
    return cost


def _solo() -> object:
    return dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))


def descriptors() -> int:
    """Open file descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def thread_count() -> int:
    """Threads of this process."""
    return len(os.listdir("/proc/self/task"))


def needs(plan: Plan, device: torch.device, cost: Cost) -> tuple[int, int]:
    """Descriptors and threads that one rank's Gloo groups cost at most: connected with every peer.

    The default group of torch.distributed is counted, idle, the connection to the store, and the
    two threads with which a mesh answers other ranks and watches its own calls.
    """
    sizes = [
        family.size
        for family in plan.families
        if family.creates and backend_on(family.options.backend, device) == "gloo"
    ]
    groups = len(sizes) + (backend_on(plan.defaults.backend, device) == "gloo")
    peers = sum(size - 1 for size in sizes)
    return 1 + groups * cost.descriptors + peers, 2 + groups * cost.threads


def limits(need: tuple[int, int] | None, local_ranks: int) -> list[Limit]:
    """The limits that apply here, beside what `local_ranks` ranks of such a need would use."""
    if not sys.platform.startswith("linux"):
        return []
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files, threads = descriptors(), thread_count()
    # Each rank is a process like this one, before its groups.
    many = None if need is None else local_ranks * (threads + need[1])
    found = [
        Limit("file descriptors", "process", _finite(soft), files, None if need is None else need[0]),
    ]
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    # The kernel does not hold root to it.
    if os.geteuid() != 0:
        found.append(Limit("threads", "user", _finite(processes), _threads_of_user(), many))
    group = _pids_folder()
    if group is not None:
        limit = _number(group / "pids.max")
        found.append(Limit("threads", "container", limit, _number(group / "pids.current") or 0, many))
    return found


def limit_findings(found: list[Limit]) -> Iterator[Finding]:
    """Whether what is needed is left."""
    for limit in found:
        if limit.needed is None:
            continue
        name = f"{limit.name} of the {limit.scope}"
        total = limit.used + limit.needed
        if limit.limit is None or total <= limit.limit:
            most = "no limit" if limit.limit is None else f"the limit is {limit.limit}"
            yield Finding("ok", f"enough {name}", given=f"{total} at most; {most}")
            continue
        hints = {
            "process": f"ulimit -n {total}, or fewer dims with groups of their own",
            "user": f"ulimit -u {total}, or fewer ranks on this host",
            "container": f"a container with at least {total} tasks (pids.max), or fewer ranks in it",
        }
        yield Finding(
            "error",
            f"the plan needs more {limit.name} than a {limit.scope} may have",
            given=f"{limit.used} in use, {limit.needed} more for the plan, the limit is {limit.limit}",
            expected=f"a limit of at least {total}",
            hint=hints[limit.scope],
        )


def _finite(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def _threads_of_user() -> int:
    me = os.getuid()
    count = 0
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and folder.stat().st_uid == me:
                count += len(os.listdir(folder / "task"))
        except OSError:
            continue
    return count


def _pids_folder() -> Path | None:
    """Where the kernel says how many tasks this container may have."""
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    own = {line.split(":", 2)[1]: line.split(":", 2)[2].lstrip("/") for line in lines if line.count(":") >= 2}
    for folder in (root / own.get("", ""), root / "pids" / own.get("pids", ""), root, root / "pids"):
        if (folder / "pids.max").is_file():
            return folder
    return None


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
