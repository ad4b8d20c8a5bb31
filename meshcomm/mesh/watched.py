"""Watches the process groups that a program creates with torch, from creation to the end of the default group."""

from __future__ import annotations

import atexit
import os
import platform
import re
import time
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, final

import torch
import torch.distributed as dist

from meshcomm import __version__
from meshcomm.comm.checks import seconds_of
from meshcomm.config.mesh import MeshConfig
from meshcomm.errors import LaunchError, UnsupportedOp
from meshcomm.layout.sizes import rank_text
from meshcomm.mesh.agree import agree
from meshcomm.mesh.devices import choose_device
from meshcomm.mesh.outside import OutsideGroups
from meshcomm.mesh.rank_failure import end_by
from meshcomm.mesh.runtime import WORLD
from meshcomm.mesh.watchdog import Watchdog, WatchOptions
from meshcomm.rendezvous import keys
from meshcomm.rendezvous.launcher import Launch, find_launch
from meshcomm.rendezvous.meeting import of_this_attempt
from meshcomm.rendezvous.processes import claim, state_of_rank
from meshcomm.rendezvous.signed import signed
from meshcomm.rendezvous.store import prefixed
from meshcomm.transport.support import STREAM_ORDERED
from meshcomm.transport.torch_changes import CAN_WATCH, changed, on_default_group
from meshcomm.transport.torch_private import backend_of, default_group, default_store, timeout_of
from meshcomm.watching.exceptions import caused_by

if TYPE_CHECKING:
    from meshcomm.mesh.stats import Stats

# The last requested watch. A program has one watch. A mesh that the program opens does its own watching.
_LAST: list[Watch] = []

# Characters that are not allowed in folder names.
_NO_NAME: Final = re.compile(r"[^\w.-]")

# The timeout for the groups of a default group whose backend does not report a timeout.
_TIMEOUT_S: Final = 600.0


def watch(
    *,
    validate_calls: int | Literal["always"] = 64,
    reports: str = "meshcomm-reports",
    warn_after_s: float = 60.0,
) -> Watch:
    """Watch every process group of this program, from `init_process_group`, `new_group` or DeviceMesh.

        meshcomm.watch()
        dist.init_process_group("nccl")                    # and nothing else changes

    The ranks of a group compare the group's first calls before any data moves. If a call fails, or does not
    complete within its group's timeout, the error names the missing ranks, the call and the line of code.
    `meshcomm run script.py` calls `watch` automatically.

    Called by:      every process of the job, before or after `init_process_group`.
    validate_calls: how many of the first calls in each group the ranks compare. 0 compares none, "always" all.
    reports:        folder for the reports that ranks write about a failed call. If "", ranks write none.
    warn_after_s:   seconds after which a blocked call logs one line with the ranks it waits for. By default, torch
                    raises only after 30 minutes.
    Raises:         ConfigError; UnsupportedOp before torch 2.14, which has no hooks for process groups.
                    Creating the default group raises UnsupportedOp for a backend other than Gloo or NCCL, and
                    MeshMismatchError naming the ranks that do not watch, or watch with different arguments.
    """
    if not CAN_WATCH:
        raise UnsupportedOp(
            f"torch {torch.__version__} cannot be watched",
            given="process groups have no hooks",
            expected="torch 2.14 or newer",
            hint="meshcomm.init(device_mesh), whose own calls are watched on any torch",
        )
    MeshConfig(dims={"all": -1}, validate_calls=validate_calls, reports=reports)
    return Watch(validate_calls, reports, seconds_of(warn_after_s, lambda: "meshcomm.watch, warn_after_s"))


def watch_if_possible(prints: bool) -> None:
    """Like `watch`, for programs that did not request it. Does nothing on older torch. If `prints`, print stats at the end."""
    if CAN_WATCH:
        Watch(64, "meshcomm-reports", 60.0, asked=False, prints=prints)


def gives_way() -> None:
    """End this program's watch, if any, before a mesh or another watch observes the same groups."""
    while _LAST:
        _LAST[-1].close()


@final
class Watch:
    """Watches a program's process groups until `close` is called. Created by `meshcomm.watch`."""

    def __init__(
        self,
        validate_calls: int | Literal["always"],
        reports: str,
        warn_after_s: float,
        *,
        asked: bool = True,
        prints: bool = False,
    ) -> None:
        self._compared, self._reports, self._warn_after_s = validate_calls, reports, warn_after_s
        self._asked, self._prints = asked, prints
        self._watchdog: Watchdog | None = None
        self._outside: OutsideGroups | None = None
        self._began = time.perf_counter()
        gives_way()
        _LAST.append(self)
        self._put_back = changed()
        self._forget = on_default_group(self._begin, self._ends)
        atexit.register(self.close)
        if dist.is_initialized():
            self._begin()

    def stats(self) -> Stats:
        """Return this rank's calls and bytes in each group, as in `Mesh.stats`, while the default group exists."""
        from meshcomm.mesh.stats import stats_of_groups

        recorders = [] if self._outside is None else self._outside.recorders
        label = "this rank" if self._watchdog is None else self._watchdog.own.label
        return stats_of_groups(label, time.perf_counter() - self._began, recorders)

    def close(self) -> None:
        """Stop watching. The program's groups remain. Further calls have no effect."""
        if self in _LAST:
            _LAST.remove(self)
        atexit.unregister(self.close)
        self._forget()
        try:
            self._end()
        finally:
            self._put_back()

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        explained = None if error is None or self._watchdog is None else self._watchdog.explain(error)
        self.close()
        if explained is not None and error is not None:
            raise caused_by(explained, error)

    def _begin(self) -> None:
        """Start watching, once the default group exists. Raises the errors of `watch`."""
        # The groups of a simulated rank are not the program's.
        if self._watchdog is not None or WORLD.get() is not None or dist.get_world_size() == 1:
            return
        backend = backend_of(default_group())
        if not any(name in backend for name in ("gloo", *STREAM_ORDERED)):
            # A dry run has no other ranks to watch.
            if self._asked and backend != "fake":
                raise UnsupportedOp(
                    f"groups of the backend {backend} cannot be watched",
                    given=f"a default group of {backend}",
                    expected="gloo or nccl",
                    hint='init_process_group("gloo"), or leave meshcomm.watch() out',
                )
            return
        rank, ranks, launch = dist.get_rank(), range(dist.get_world_size()), launch_here()
        device = torch.device("cpu")
        if any(name in backend for name in STREAM_ORDERED) and torch.cuda.is_available():
            device = choose_device("cuda", launch)
        timeout_s = timeout_of(default_group(), device) or _TIMEOUT_S
        store = signed(of_this_attempt(default_store()), "default group")
        claim(store, rank, kept=True)
        store_of_watch = prefixed(f"meshcomm/watch{store.add(keys.WATCHED.format(rank), 1)}", store)
        versions = {
            "meshcomm": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        facts = {"validate_calls": self._compared, "versions": versions}
        agreed = agree(prefixed("agree", store_of_watch), rank, ranks, facts, timeout_s, "the watch")
        label = rank_text(rank, None)
        options = WatchOptions(
            timeout_s,
            partial(end_by, launch, label),
            reports=reports_of(self._reports, agreed.moment),
            compared=None if self._compared == "always" else self._compared,
            process_of=partial(state_of_rank, store),
            warn_after_s=self._warn_after_s,
        )
        self._watchdog = Watchdog(prefixed("mesh", store_of_watch), rank, {}, len(ranks), options)
        self._outside = OutsideGroups(self._watchdog, ranks, device, label, options.compared)
        self._began = time.perf_counter()

    def _ends(self) -> None:
        if WORLD.get() is None:
            self._end()

    def _end(self) -> None:
        if self._prints and self._watchdog is not None and self._watchdog.own.rank == 0:
            print(self.stats())
        watchdog, outside = self._watchdog, self._outside
        self._watchdog = self._outside = None
        if watchdog is not None:
            watchdog.close()
        if outside is not None:
            outside.close()


def launch_here() -> Launch:
    """Return the launch of this process, from the launcher or from torch's default group, which may not use the launcher's
    variables.
    """
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return find_launch(os.environ)
    rank, world = dist.get_rank(), dist.get_world_size()
    with suppress(LaunchError):
        launch = find_launch(os.environ)
        if (launch.rank, launch.world_size) == (rank, world):
            return launch
    # Lightning sets only LOCAL_RANK.
    local = os.environ.get("LOCAL_RANK", "")
    return Launch("torch", rank, world, int(local) if local.isdecimal() else 0, 1, placed=local.isdecimal())


def reports_of(folder: str, moment: str) -> str:
    """Return this run's folder inside `folder`. The folder's name contains the time and, if known, the job."""
    named = (os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"))
    job = next((name for name in named if name not in ("", "none")), "")
    return os.path.join(folder, _NO_NAME.sub("-", f"{moment}-{job}".rstrip("-"))) if folder else ""
