"""May this host open as many files and threads as the plan needs?"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import psutil
import torch

from meshcomm.doctor.finding import Finding
from meshcomm.layout import Plan
from meshcomm.predict.lint import GLOO_DESCRIPTORS
from meshcomm.transport.support import backend_on

# Threads of one Gloo group; measured with torch 2.15 on Linux.
GLOO_THREADS: Final = 3


class Cost(NamedTuple):
    """Open file descriptors and threads."""

    descriptors: int
    threads: int


class Limit(NamedTuple):
    """used: now. needed: by the ranks on this host beyond that, at most; None without a plan.

    scope: "process", "user" or "container". limit: None where there is none.
    """

    name: str
    scope: str
    limit: int | None
    used: int
    needed: int | None


def in_use() -> Cost:
    """What this process has open."""
    process = psutil.Process()
    return Cost(process.num_fds(), process.num_threads())


def needs(plan: Plan, device: torch.device) -> Cost:
    """What one rank's Gloo groups cost at most: connected with every peer.

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
    return Cost(1 + groups * GLOO_DESCRIPTORS + peers, 2 + groups * GLOO_THREADS)


def limits(need: Cost | None, local_ranks: int) -> list[Limit]:
    """The limits that apply here, and what `local_ranks` ranks of such a need would use."""
    used = in_use()
    # Each rank is a process like this one, before its groups.
    many = None if need is None else local_ranks * (used.threads + need.threads)
    soft = _finite(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    found = [Limit("file descriptors", "process", soft, used.descriptors, need and need.descriptors)]
    # The kernel does not hold root to it.
    if os.geteuid() != 0:
        soft = _finite(resource.getrlimit(resource.RLIMIT_NPROC)[0])
        every = [each.info for each in psutil.process_iter(["uids", "num_threads"])]
        mine = [each for each in every if each["uids"] and each["uids"].real == os.getuid()]
        found.append(Limit("threads", "user", soft, sum(each["num_threads"] or 0 for each in mine), many))
    if (group := _pids_folder()) is not None:
        most, current = ((group / name).read_text().strip() for name in ("pids.max", "pids.current"))
        limit = None if most == "max" else int(most)
        found.append(Limit("threads", "container", limit, int(current), many))
    return found


def limit_findings(found: list[Limit]) -> Iterator[Finding]:
    """Whether what is needed is left."""
    for limit in found:
        total = limit.used + (limit.needed or 0)
        if limit.needed is None or limit.limit is None or total <= limit.limit:
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


def _pids_folder() -> Path | None:
    """Where the kernel says how many tasks this container may have."""
    root, own = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
    lines = own.read_text().splitlines() if own.exists() else []
    paths = {kind: path.lstrip("/") for _, kind, path in (line.split(":", 2) for line in lines)}
    folders = (root / paths.get("", ""), root / "pids" / paths.get("pids", ""), root, root / "pids")
    return next((folder for folder in folders if (folder / "pids.max").is_file()), None)
