"""Start one process per rank on this host, around a store on the loopback, and end all of them together."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from subprocess import Popen
from typing import Final, NoReturn, final

import torch.distributed as dist

from meshcomm.errors import LaunchError
from meshcomm.launch.reaper import DISMISSED, JOB_VARIABLE, end_all, start_reaper
from meshcomm.launch.root_cause import root_cause, without_error
from meshcomm.layout.sizes import ranks_text
from meshcomm.mesh.exposure import serve_on_loopback
from meshcomm.mesh.generation import VARIABLE, Generation, announce, have_met
from meshcomm.mesh.rank_failure import Failure, collect, forget, names_of_ranks
from meshcomm.mesh.rendezvous import of_this_attempt, state_of_rank

SAVED: Final = os.EX_TEMPFAIL
"""The exit code of a rank that a signal ended behind a checkpoint, and of a job of such ranks: 75, "try again"."""

_LOOPBACK: Final = "127.0.0.1"
_STORE_TIMEOUT: Final = timedelta(seconds=60)
_POLL_S: Final = 0.05

# What ranks get between being asked to end and SIGKILL; the variable is torch's, in seconds.
GRACE_S: Final = 10.0
_GRACE_VARIABLE: Final = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
# How long the others may take to say what they called, where a rank was ended by SIGABRT.
_SPEAKS_S: Final = 5.0
# After Ctrl-C somebody waits at the terminal.
_INTERRUPT_GRACE_S: Final = 3.0
# Exit codes that a new process would end with too: a misused library, or an interrupt.
_FINAL: Final = (2, 130)

Exits = dict[int, tuple[int, float]]
"""By rank that failed by itself: its exit code, negative for a signal, and the time it was last seen alive."""


class _Signalled(BaseException):
    """The launcher itself was sent a signal."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.saved = False


def launch(
    arguments: Sequence[str],
    world_size: int,
    max_restarts: int = 0,
    label: Callable[[int], str] = "rank {}".format,
    grace_s: float = GRACE_S,
    replace: int = 0,
) -> int:
    """Run `python ARGUMENTS` as `world_size` ranks; return the job's exit code.

    replace: how many ranks that were lost get a new process, while the others run on: see `Mesh.reopen`.
    label: the name of a rank, with its coords, where the program has opened no mesh; only called after a failure.
    grace_s: what ranks get between a signal to this process and being killed; ten seconds where one of them has failed.
        TORCH_ELASTIC_SHUTDOWN_TIMEOUT says another number for both.
    Called by: the main thread, as signals are handled until the job ends.

    The code is 0 if all ranks ended well, SAVED if some ended behind a checkpoint, that of the rank whose failure caused
    the others' (128 + signal if a signal ended it), or 128 + signal if this process was sent one. SIGUSR1 goes on to the
    ranks. No process of the job outlives the call, nor this process: ranks that do not end in time (three seconds after
    Ctrl-C) are killed, and so is everything that ranks have started. The last lines on stderr name the root cause and those that
    followed. After a failure all are started again, up to `max_restarts` times; the code is that of the last time.
    """
    if world_size > 4096:
        raise LaunchError(
            f"{world_size} processes on one host",
            given=f"a mesh of {world_size} ranks, started outside a launcher",
            expected="at most 4096 ranks on one host",
            hint="torchrun --nnodes N --nproc-per-node M -m meshcomm ... on every host",
        )
    folder = Path(tempfile.mkdtemp(prefix="meshcomm-"))
    reaper = start_reaper(folder)
    handled = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        # By nohup.
        handled.remove(signal.SIGHUP)
    before = {each: signal.signal(each, _signalled) for each in handled}
    try:
        for attempt in range(max_restarts + 1):
            spares = _Spares(folder, attempt, replace, label)
            exits, ended = _run_ranks(arguments, world_size, folder, attempt, max_restarts, grace_s, spares)
            if not exits:
                return 0 if len(ended) == world_size else SAVED
            names = spares.names
            failures = spares.failures(exits)
            root, others = root_cause(failures.values(), world_size, names, ended)
            restart = f"; restart {attempt + 1} of {max_restarts}" if attempt < max_restarts else ""
            lines = [root.text] if root.text else []
            if replace and ended and root.rank not in ended:
                others.append(
                    f"{ranks_text(ended)} had ended well: no new process can meet all ranks any more"
                )
            left = sorted(
                failure.rank for failure in failures.values() if failure.what.startswith("RankLost")
            )
            if left:
                way = "a program goes on by mesh.reopen(error), a Trainer by itself"
                others.append(f"{ranks_text(left)} ended by RankLost: {way}")
            lines += [f"meshcomm: {line}" for line in (root.summary + restart, *others)]
            print("\n".join(lines), file=sys.stderr, flush=True)
        return root.code
    except _Signalled as received:
        return SAVED if received.saved else 128 + received.number
    finally:
        end_all(folder)
        with contextlib.suppress(OSError):
            reaper.communicate(DISMISSED)
        for each, handler in before.items():
            signal.signal(each, handler)
        shutil.rmtree(folder, ignore_errors=True)


@final
class _Spares:
    """The new processes that an attempt may still start for ranks that were lost, and the ends of those that were replaced.

    count: how many. store: the job's, once it is there.
    """

    def __init__(self, folder: Path, attempt: int, count: int, label: Callable[[int], str]) -> None:
        self._folder, self._attempt, self._count, self._label = folder, attempt, count, label
        self._generation = Generation()
        self._replaced: dict[int, Failure] = {}
        self._lost: Exits = {}
        self.store: dist.Store | None = None

    @property
    def left(self) -> int:
        """How many can still be replaced."""
        return self._count

    def names(self, rank: int) -> str:
        """The rank with its coords."""
        return names_of_ranks(self._folder, self._attempt).get(rank) or self._label(rank)

    def failures(self, exits: Exits) -> dict[int, Failure]:
        """How ranks have failed; where all of them only lost a peer, with the ranks that were replaced last."""
        found = {
            rank: self._replaced[rank]
            if self._lost.get(rank) == (code, alive_at)
            else without_error(rank, code, alive_at, self.names)
            for rank, (code, alive_at) in exits.items()
        }
        found |= {failure.rank: failure for failure in collect(self._folder, self._attempt)}
        return found if any(not each.follows for each in found.values()) else {**self._replaced, **found}

    def replace(self, exits: Exits, ended: bool) -> Generation | None:
        """The generation in which new processes take the places of these ranks; None where the job has to end.

        ended: whether another rank has ended well. A rank that gave up as it lost a peer, or that was misused, would do so
        again.
        """
        failures = self.failures(exits)
        lost = {rank: failures[rank] for rank in exits}
        if ended or self.store is None or len(lost) > self._count:
            return None
        if any(failure.follows or failure.code in _FINAL for failure in lost.values()):
            return None
        self._count -= len(lost)
        for rank, failure in lost.items():
            forget(self._folder, self._attempt, rank)
            lines = [failure.text] if failure.text else []
            lines.append(f"meshcomm: {failure.summary}; replaced, {self._count} more can be")
            print("\n".join(lines), file=sys.stderr, flush=True)
        self._generation = Generation(
            self._generation.number + 1, {rank: failure.what for rank, failure in lost.items()}
        )
        self._replaced, self._lost = lost, {**exits}
        announce(self.store, self._generation)
        return self._generation

    def unmet(self, ended: Sequence[int]) -> Exits:
        """The ranks that were replaced last, where nobody can meet their new processes, as others have ended before; else {}.

        ended: the ranks that have ended well. One that has opened no mesh is not waited for.
        """
        if not ended or not self._lost or have_met(self.store, self._generation.number):
            return {}
        return self._lost if any(state_of_rank(self.store, rank) for rank in ended) else {}


def _signalled(number: int, _: object) -> NoReturn:
    raise _Signalled(number)


def _run_ranks(
    arguments: Sequence[str],
    world_size: int,
    folder: Path,
    attempt: int,
    max_restarts: int,
    grace_s: float,
    spares: _Spares,
) -> tuple[Exits, list[int]]:
    """Start all ranks; return when none is left."""
    # A new store for each attempt, which no rank's end takes away and no other host reaches.
    store = serve_on_loopback(_LOOPBACK, 0, _STORE_TIMEOUT)
    if store is None:
        raise LaunchError(
            f"no store can listen on {_LOOPBACK}",
            given=f"no free port of {_LOOPBACK}, or too many open files",
            expected="a free port, chosen by the system",
            hint="meshcomm doctor shows the limits of this host",
        )
    # What torchrun sets on one host.
    common = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world_size)),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        **os.environ,
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(world_size)),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": folder.name,
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        JOB_VARIABLE: str(folder),
        # What a loss ends, torch's store tells of by a trace through C++ from each rank.
        **(
            {VARIABLE: "0", "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}
            if spares.left
            else {}
        ),
    }
    spares.store = of_this_attempt(store, common)
    said = os.environ.get(_GRACE_VARIABLE)
    # Of ranks beside one that has failed; they have nothing to finish.
    ending, within_s = int(signal.SIGTERM), float(said or GRACE_S)
    ranks: list[Popen[bytes]] = []
    signalled: _Signalled | None = None
    usual = signal.signal(signal.SIGUSR1, lambda number, _: _send(ranks, number))
    try:

        def start(rank: int) -> Popen[bytes]:
            own = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
            return Popen([sys.executable, *arguments], env=common | own, start_new_session=True)

        def replace(exits: Exits, ended: bool) -> bool:
            generation = spares.replace(exits, ended)
            if generation is None:
                return False
            common[VARIABLE] = str(generation.number)
            for rank in exits:
                # What the rank has started must not stay beside what the new one starts.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(ranks[rank].pid, signal.SIGKILL)
                ranks[rank] = start(rank)
            return True

        ranks += map(start, range(world_size))
        return _await_exits(ranks, lambda: len(collect(folder, attempt)), replace, spares.unmet)
    except _Signalled as received:
        signalled, ending, within_s = received, received.number, float(said or grace_s)
        # Schedulers repeat it while ranks save what they have.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if ending == signal.SIGINT:
            within_s = min(within_s, _INTERRUPT_GRACE_S)
        raise
    finally:
        _end(ranks, {ending: within_s, signal.SIGKILL: GRACE_S})
        if signalled is not None:
            signalled.saved = {process.poll() for process in ranks} == {SAVED}
        end_all(folder)
        signal.signal(signal.SIGUSR1, usual)


def _send(ranks: Sequence[Popen[bytes]], number: int) -> None:
    for process in ranks:
        if process.poll() is None:
            process.send_signal(number)


def _await_exits(
    ranks: Sequence[Popen[bytes]],
    spoke: Callable[[], int],
    replace: Callable[[Exits, bool], bool],
    unmet: Callable[[Sequence[int]], Exits],
) -> tuple[Exits, list[int]]:
    """Return when all ranks have ended well, or one has failed: who has failed, and who had ended well.

    replace: (who has failed, whether a rank has ended well) -> whether new processes have their places in `ranks`.
    unmet: who has ended well -> who was lost, and has a new process that waits for one of these.
    spoke: how many ranks have left an error. One that its backend ended by SIGABRT cannot: the others are asked what
    they called, which takes them a moment.
    """
    alive_at = [time.time()] * len(ranks)
    failed: Exits = {}
    deadline = None
    while True:
        now = time.time()
        codes = [process.poll() for process in ranks]
        failed |= {
            rank: (code, alive_at[rank])
            for rank, code in enumerate(codes)
            if code not in (None, 0, SAVED) and rank not in failed
        }
        well = [rank for rank, code in enumerate(codes) if code in (0, SAVED)]
        if failed and deadline is None and replace(failed, bool(well)):
            failed = {}
            continue
        if not failed and (lost := unmet(well)):
            return lost, [rank for rank in well if codes[rank] == 0]
        if failed and deadline is None:
            aborted = all(code == -signal.SIGABRT for code, _ in failed.values())
            deadline = now + (_SPEAKS_S if aborted else 0.0)
        if None not in codes or (deadline is not None and (now >= deadline or spoke() >= codes.count(None))):
            return failed, [rank for rank, code in enumerate(codes) if code == 0]
        alive_at = [now] * len(ranks)
        time.sleep(_POLL_S)


def _end(ranks: Sequence[Popen[bytes]], signals: Mapping[int, float]) -> None:
    """Send each signal to the process groups of ranks that run, and wait so many seconds for their end."""
    for number, within_s in signals.items():
        # A rank that is stopped takes the signal when it goes on.
        for each in (number, signal.SIGCONT):
            # Not to one that has been reaped: its number may be another process's by now.
            for process in ranks:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid, each)
        deadline = time.monotonic() + within_s
        while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
