"""Start one process per rank on this host, with a store on the loopback interface, and end all of them together."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import Popen
from typing import Any, Final, NoReturn, final

from meshcomm.config import Config
from meshcomm.config.elastic import ElasticConfig
from meshcomm.errors import LaunchError, MeshcommError, StoreError, parts_of
from meshcomm.job.reaper import DISMISSED, JOB_VARIABLE, end_all, start_reaper
from meshcomm.job.replacing import SAVED, Replacing, sizes_of
from meshcomm.job.standby import Process, Standby
from meshcomm.job.supervisor import LOOPBACK, STORE_TIMEOUT, Label, Supervisor, labels_of
from meshcomm.mesh.devices import check_host
from meshcomm.mesh.rank_failure import (
    ask_places,
    collect,
    forget,
    frame_at_signal,
    leave_told,
    names_of_ranks,
)
from meshcomm.rendezvous.exposure import serve_on_loopback
from meshcomm.rendezvous.generation import VARIABLE
from meshcomm.rendezvous.meeting import of_this_attempt
from meshcomm.rendezvous.processes import state_of_rank
from meshcomm.rendezvous.signed import SECRET_VARIABLE, SignedStore
from meshcomm.watching.ending import Failure, signal_text, without_error
from meshcomm.watching.verdict import whereabouts

_POLL_S: Final = 0.05
# A start that takes longer is worth a line.
_LONG_S: Final = 10.0

# The time in seconds between asking ranks to end and SIGKILL. torch defines the variable.
GRACE_S: Final = 10.0
_GRACE_VARIABLE: Final = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
# How long the ranks may take to answer where they are, before a signal ends them.
_PLACES_S: Final = 3.0
# After Ctrl-C, a user waits at the terminal.
_INTERRUPT_GRACE_S: Final = 3.0


class _Signalled(BaseException):
    """The launcher itself received a signal."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.saved = False
        self.lines: list[str] = []


def launch(
    arguments: Sequence[str],
    world_size: int,
    max_restarts: int = 0,
    settings: Config | None = None,
    grace_s: float = GRACE_S,
    elastic: ElasticConfig | None = None,
    on_failure: Callable[[dict[str, Any]], None] | None = None,
) -> int:
    """Run `python ARGUMENTS` as `world_size` ranks; return the job's exit code.

    settings: names the ranks until the program has opened a mesh. None if unknown.
    elastic: how lost ranks are handled while the others continue, see `Elastic.reopen`. If None, the job ends.
    grace_s: the time between a signal to this process and SIGKILL for the ranks. After a rank has failed, this time is ten
        seconds. TORCH_ELASTIC_SHUTDOWN_TIMEOUT overrides both.
    on_failure: called with the cause of the last attempt's failure, as in `Supervisor.cause`, or of the signal.
    Called by: the main thread, because signals are handled until the job ends.

    The exit code is 0 if all ranks succeeded and SAVED if some ended after a checkpoint. If ranks failed, it is the exit code
    of the root cause's rank (128 + signal if a signal ended it). If this process received a signal, it is 128 + signal.
    Before a signal ends the ranks, their lines and calls are printed. SIGUSR1 is forwarded to the ranks. No process of the job
    outlives this call or this process. Ranks that do not end in time (three seconds after Ctrl-C) are killed, together with all
    processes that ranks have started. The last lines on stderr name the root cause and the failures that followed. After a
    failure, all ranks are restarted, up to `max_restarts` times; the exit code is that of the last attempt.
    """
    if world_size > 4096:
        raise LaunchError(
            f"{world_size} processes on one host",
            given=f"a mesh of {world_size} ranks, started outside a launcher",
            expected="at most 4096 ranks on one host",
            hint="torchrun --nnodes N --nproc-per-node M -m meshcomm ... on every host",
        )
    if settings is not None:
        check_host(settings, world_size)
    sizes = None if settings is None or elastic is None else sizes_of(settings, world_size)
    label = labels_of(settings, world_size)
    folder = Path(tempfile.mkdtemp(prefix="meshcomm-"))
    reaper = start_reaper(folder)
    handled = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        # nohup ignores this signal.
        handled.remove(signal.SIGHUP)
    before = {number: signal.signal(number, _signalled) for number in handled}
    try:
        for attempt in range(max_restarts + 1):
            replacing = Replacing(world_size, elastic or ElasticConfig(), sizes)
            ranks = _Ranks(arguments, world_size, folder, attempt, max_restarts, label, replacing)
            failures = ranks.run(grace_s)
            if not failures:
                return SAVED if ranks.saved else 0
            restart = f"; restart {attempt + 1} of {max_restarts}" if attempt < max_restarts else ""
            code, lines = ranks.told(failures, restart)
            leave_told(ranks.cause, folder, attempt)
            print(lines, file=sys.stderr, flush=True)
        if on_failure is not None:
            on_failure(ranks.cause)
        return code
    except _Signalled as received:
        if on_failure is not None:
            what = parts_of(MeshcommError(f"the job was ended by {signal_text(received.number)}"))
            on_failure(what | {"type": None, "rank": None, "name": None, "at": None, "lines": received.lines})
        return SAVED if received.saved else 128 + received.number
    finally:
        end_all(folder)
        with contextlib.suppress(OSError):
            reaper.communicate(DISMISSED)
        for number, handler in before.items():
            signal.signal(number, handler)
        shutil.rmtree(folder, ignore_errors=True)


def _signalled(number: int, _: object) -> NoReturn:
    raise _Signalled(number)


@final
class _Ranks(Supervisor):
    """The processes of one attempt."""

    def __init__(
        self,
        arguments: Sequence[str],
        world_size: int,
        folder: Path,
        attempt: int,
        max_restarts: int,
        label: Label,
        replacing: Replacing,
    ) -> None:
        super().__init__(replacing, label)
        self._arguments, self._folder, self._attempt = arguments, folder, attempt
        self._processes: list[Process] = []
        self._alive_at = [time.time()] * world_size
        self._began: float | None = time.monotonic()
        # Each attempt has a new store, which outlives the ranks and which other hosts cannot reach.
        store = serve_on_loopback(LOOPBACK, 0, STORE_TIMEOUT)
        if store is None:
            raise LaunchError(
                f"no store can listen on {LOOPBACK}",
                given=f"no free port of {LOOPBACK}, or too many open files",
                expected="a free port, chosen by the system",
                hint="meshcomm doctor shows the limits of this host",
            )
        self._store = store
        # The variables that torchrun sets on one host.
        self.common = {
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world_size)),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            **os.environ,
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(world_size)),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
            JOB_VARIABLE: str(folder),
        }
        self.meet_at(LOOPBACK, store.port, folder.name, store)
        self._standby = Standby(arguments, self.common)

    def run(self, grace_s: float) -> dict[int, Failure]:
        """Start all processes, and end all of them when `follow` returns. Return the failures."""
        grace = os.environ.get(_GRACE_VARIABLE)
        # After a failure, the other ranks have nothing left to finish.
        ending, within_s = int(signal.SIGTERM), float(grace or GRACE_S)
        signalled: _Signalled | None = None
        ranks = self._processes
        usual = signal.signal(signal.SIGUSR1, lambda number, _: _send(ranks, number))
        try:
            for process in range(self.replacing.places.count):
                ranks.append(self._new(process))
                self.running.add(process)
            if self.replacing.left:
                self._standby.start()
            return self.follow()
        except _Signalled as received:
            signalled, ending, within_s = received, received.number, float(grace or grace_s)
            # Schedulers repeat the signal while ranks save their state.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if ending == signal.SIGINT:
                within_s = min(within_s, _INTERRUPT_GRACE_S)
            try:
                received.lines = self._tell_places(ending)
            except _Signalled:
                # A second Ctrl-C.
                within_s = 0.0
            raise
        finally:
            _end(ranks, {ending: within_s, signal.SIGKILL: GRACE_S})
            self._standby.end()
            if signalled is not None:
                members = self.replacing.places.processes
                signalled.saved = {ranks[process].poll() for process in members} == {SAVED}
            end_all(self._folder)
            signal.signal(signal.SIGUSR1, usual)

    def start(self, process: int) -> None:
        generation = self.common[VARIABLE] = str(self.replacing.started(process))
        taken = self._standby.take({**_variables(process), VARIABLE: generation})
        self._processes[process] = taken or self._new(process)
        self._alive_at[process] = time.time()
        self.running.add(process)
        if self.replacing.left:
            self._standby.start()
        else:
            self._standby.end()

    def _new(self, process: int) -> Popen[bytes]:
        environment = self.common | _variables(process)
        return Popen([sys.executable, *self._arguments], env=environment, start_new_session=True)

    def look(self) -> dict[int, Failure]:
        time.sleep(_POLL_S)
        self._tell_start()
        now, failures = time.time(), dict[int, Failure]()
        for process in [*self.running]:
            code = self._processes[process].poll()
            if code is None:
                self._alive_at[process] = now
                continue
            self.running.remove(process)
            if code < 0 and self.loses_nothing(without_error(process, code, now, self.name)):
                continue
            if code == 0:
                self.completed.add(process)
            elif code == SAVED:
                self.saved.add(process)
            else:
                frame = frame_at_signal(self._folder, self._attempt, process)
                failures[process] = without_error(process, code, self._alive_at[process], self.name, *frame)
        return failures

    def _tell_start(self) -> None:
        """Print a line when the ranks have opened their mesh, if that took long: the first step will, too."""
        if self._began is not None and names_of_ranks(self._folder, self._attempt):
            if (took := time.monotonic() - self._began) > _LONG_S:
                print(f"meshcomm: the ranks are up after {took:.0f} s", file=sys.stderr, flush=True)
            self._began = None

    def end(self, process: int) -> None:
        self.running.discard(process)
        # A stopped process, too, ends by this signal. What it has started must not run beside the processes of a new rank.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._processes[process].pid, signal.SIGKILL)
        _await_end([self._processes[process]], GRACE_S)

    def forget_errors(self, process: int) -> None:
        forget(self._folder, self._attempt, process)

    def explained(self, failures: Mapping[int, Failure]) -> dict[int, Failure]:
        explained = dict(failures)
        for error in collect(self._folder, self._attempt):
            ended = explained.get(error.rank)
            if error.seen and ended is not None:
                what = f"{error.what}; then it {ended.what}"
                explained[error.rank] = replace(error, code=ended.code, what=what, seen=False)
            elif not error.seen or self._processes[error.rank].poll() not in (0, SAVED):
                explained[error.rank] = error
        return explained

    def raised(self) -> dict[int, Failure]:
        errors = collect(self._folder, self._attempt)
        return {error.rank: error for error in errors if error.seen and error.rank in self.completed}

    def expects_cause(self, failures: Collection[Failure]) -> bool:
        # A rank itself waits for the cause of its error. But one that its backend ended by SIGABRT cannot report why: the
        # other ranks report their calls instead, which takes a moment.
        # The exit code, as a rank may have left an error before.
        aborted = [failure for failure in failures if self._processes[failure.rank].poll() == -signal.SIGABRT]
        unfinished = len(self.running & {*self.replacing.places.processes})
        spoke = sum(not error.seen for error in collect(self._folder, self._attempt))
        return (
            bool(aborted)
            and spoke < unfinished
            and all(failure.follows or failure in aborted for failure in failures)
        )

    def name(self, process: int) -> str:
        return names_of_ranks(self._folder, self._attempt).get(process) or super().name(process)

    def _tell_places(self, number: int) -> list[str]:
        """Print the current call of each rank with an open mesh, and the ranks that it waits for. Once the ranks have ended, this is lost.
        Return the lines."""
        statuses = ask_places(self._folder, self._attempt, _PLACES_S)
        store = SignedStore(of_this_attempt(self._store, self.common), self.common[SECRET_VARIABLE])
        silent = dict[int, str]()
        for rank, status in statuses.items():
            if not status:
                # What another program has written tells nothing, and must not keep the ranks from being ended.
                with contextlib.suppress(StoreError):
                    silent[rank] = state_of_rank(store, rank)
        lines = whereabouts({rank: status for rank, status in sorted(statuses.items()) if status}, silent)
        if lines or number == signal.SIGINT:
            title = "where each rank was before it was ended" if lines else "no rank had an open mesh"
            lines.insert(0, f"{signal_text(number)}: {title}")
            print("\n".join(f"meshcomm: {line}" for line in lines), file=sys.stderr, flush=True)
        return lines


def _variables(process: int) -> dict[str, str]:
    """Return the environment variables of a rank's own."""
    return dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(process))


def _send(ranks: Sequence[Process], number: int) -> None:
    for process in ranks:
        if process.poll() is None:
            process.send_signal(number)


def _end(ranks: Sequence[Process], signals: Mapping[int, float]) -> None:
    """Send each signal to the process groups of running ranks, and wait up to the given number of seconds for them to end."""
    for number, within_s in signals.items():
        # A stopped rank handles the signal only after SIGCONT.
        for sent in (number, signal.SIGCONT):
            # Skip reaped processes, because their IDs may have been reused.
            for process in ranks:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid, sent)
        _await_end(ranks, within_s)


def _await_end(ranks: Sequence[Process], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
