"""Start one process per rank on this host, with a store on the loopback interface, and end all of them together."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from subprocess import Popen
from typing import Final, NoReturn, final

from meshcomm.config.elastic import ElasticConfig
from meshcomm.errors import LaunchError
from meshcomm.launch.places import Sizes
from meshcomm.launch.reaper import DISMISSED, JOB_VARIABLE, end_all, start_reaper
from meshcomm.launch.replacing import Replacing
from meshcomm.launch.standby import Process, Standby
from meshcomm.mesh.exposure import serve_on_loopback
from meshcomm.mesh.generation import VARIABLE
from meshcomm.mesh.rank_failure import ask_places, collect, forget, frame_at_signal, names_of_ranks
from meshcomm.mesh.rendezvous import of_this_attempt, state_of_rank
from meshcomm.mesh.signed import SECRET_VARIABLE, SignedStore, new_secret
from meshcomm.watching.ending import Failure, root_cause, signal_text, without_error
from meshcomm.watching.verdict import whereabouts

SAVED: Final = os.EX_TEMPFAIL
"""Exit code 75, "try again": of a rank that stopped on a signal after saving a checkpoint, and of a job with such ranks."""

_LOOPBACK: Final = "127.0.0.1"
_STORE_TIMEOUT: Final = timedelta(seconds=60)
_POLL_S: Final = 0.05

# The time in seconds between asking ranks to end and SIGKILL. torch defines the variable.
GRACE_S: Final = 10.0
_GRACE_VARIABLE: Final = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
# How long the other ranks may take to report their calls if SIGABRT ended a rank.
_SPEAKS_S: Final = 5.0
# How long the ranks may take to answer where they are, before a signal ends them.
_PLACES_S: Final = 3.0
# After Ctrl-C, a user waits at the terminal.
_INTERRUPT_GRACE_S: Final = 3.0
Exits = dict[int, tuple[int, float]]
"""For each failed rank, its exit code, negative for a signal, and the time when it was last seen alive."""


class _Signalled(BaseException):
    """The launcher itself received a signal."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.saved = False


def launch(
    arguments: Sequence[str],
    world_size: int,
    max_restarts: int = 0,
    label: Callable[[int], str] = "rank {}".format,
    grace_s: float = GRACE_S,
    elastic: ElasticConfig | None = None,
    sizes: Sizes | None = None,
) -> int:
    """Run `python ARGUMENTS` as `world_size` ranks; return the job's exit code.

    elastic: how lost ranks are handled while the others continue, see `Elastic.reopen`. sizes: the sizes that the mesh may then
        have.
    label: returns the name of a rank, with its coords, if the program has opened no mesh; called only after a failure.
    grace_s: the time between a signal to this process and SIGKILL for the ranks. After a rank has failed, this time is ten
        seconds. TORCH_ELASTIC_SHUTDOWN_TIMEOUT overrides both.
    Called by: the main thread, because signals are handled until the job ends.

    The exit code is 0 if all ranks succeeded and SAVED if some ended after a checkpoint. If ranks failed, it is the exit code
    of the root cause's rank (128 + signal if a signal ended it). If this process received a signal, it is 128 + signal.
    Before a signal ends the ranks, their lines and calls are printed. SIGUSR1 is forwarded to the ranks. No process of the job outlives this call or this process. Ranks that do not end in time
    (three seconds after Ctrl-C) are killed, together with all processes that ranks have started. The last lines on stderr
    name the root cause and the failures that followed. After a failure, all ranks are restarted, up to `max_restarts` times;
    the exit code is that of the last attempt.
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
        # nohup ignores this signal.
        handled.remove(signal.SIGHUP)
    before = {each: signal.signal(each, _signalled) for each in handled}
    try:
        for attempt in range(max_restarts + 1):
            replacing = Replacing(world_size, elastic or ElasticConfig(), sizes)
            ranks = _Ranks(arguments, world_size, folder, attempt, max_restarts, label, replacing)
            exits, ended = ranks.run(grace_s)
            if not exits:
                return 0 if len(ended) == len(replacing.places.processes) else SAVED
            failures = ranks.failures(exits)
            # Use the ranks of the current mesh, like the ranks' own messages.
            failed = replacing.numbered(failures)
            names = ranks.name_of_rank if failed else ranks.name
            members = replacing.places.processes
            raised = {
                members.index(each): seen for each, seen in ranks.raised(ended).items() if each in members
            }
            ended = [rank for rank, process in enumerate(members) if process in ended]
            root, others = root_cause(failed or failures.values(), len(members), names, ended, raised)
            restart = f"; restart {attempt + 1} of {max_restarts}" if attempt < max_restarts else ""
            lines = [root.text] if root.text else []
            others += replacing.notes(failed, ended, root.rank)
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


def _signalled(number: int, _: object) -> NoReturn:
    raise _Signalled(number)


@final
class _Ranks:
    """The processes of one attempt. replacing: the policy for lost ranks."""

    def __init__(
        self,
        arguments: Sequence[str],
        world_size: int,
        folder: Path,
        attempt: int,
        max_restarts: int,
        label: Callable[[int], str],
        replacing: Replacing,
    ) -> None:
        self._arguments, self._folder, self._attempt = arguments, folder, attempt
        self._label, self._replacing = label, replacing
        self._processes: list[Process] = []
        self._unmet: Mapping[int, Failure] = {}
        # For each process that was ended because it hung, what it did.
        self._hung: dict[int, str] = {}
        # Each attempt has a new store, which outlives the ranks and which other hosts cannot reach.
        store = serve_on_loopback(_LOOPBACK, 0, _STORE_TIMEOUT)
        if store is None:
            raise LaunchError(
                f"no store can listen on {_LOOPBACK}",
                given=f"no free port of {_LOOPBACK}, or too many open files",
                expected="a free port, chosen by the system",
                hint="meshcomm doctor shows the limits of this host",
            )
        self._store = store
        secret = new_secret()
        # The variables that torchrun sets on one host.
        self._common = {
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
            SECRET_VARIABLE: secret,
        }
        self._common.pop(VARIABLE, None)
        if replacing.is_elastic:
            # After a loss, torch's store prints a C++ trace from each rank.
            self._common.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
            self._common[VARIABLE] = "0"
            replacing.store = SignedStore(of_this_attempt(store, self._common), secret)
        self._standby = Standby(arguments, self._common)

    def run(self, grace_s: float) -> tuple[Exits, list[int]]:
        """Start all processes. When all processes have ended, return the failed and the successful ones."""
        said = os.environ.get(_GRACE_VARIABLE)
        # After a failure, the other ranks have nothing left to finish.
        ending, within_s = int(signal.SIGTERM), float(said or GRACE_S)
        signalled: _Signalled | None = None
        ranks = self._processes
        usual = signal.signal(signal.SIGUSR1, lambda number, _: _send(ranks, number))
        try:
            ranks += map(self._start, range(self._replacing.places.count))
            if self._replacing.may_replace:
                self._standby.start()
            return self._await_exits()
        except _Signalled as received:
            signalled, ending, within_s = received, received.number, float(said or grace_s)
            # Schedulers repeat the signal while ranks save their state.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if ending == signal.SIGINT:
                within_s = min(within_s, _INTERRUPT_GRACE_S)
            try:
                self._tell_places(ending)
            except _Signalled:
                # A second Ctrl-C.
                within_s = 0.0
            raise
        finally:
            _end(ranks, {ending: within_s, signal.SIGKILL: GRACE_S})
            self._standby.end()
            if signalled is not None:
                members = self._replacing.places.processes
                signalled.saved = {ranks[each].poll() for each in members} == {SAVED}
            end_all(self._folder)
            signal.signal(signal.SIGUSR1, usual)

    def name(self, process: int) -> str:
        """Return the name of a process's rank, with its coords."""
        return names_of_ranks(self._folder, self._attempt).get(process) or self._label(process)

    def name_of_rank(self, rank: int) -> str:
        """Return the name of a rank in the current mesh, with its coords."""
        return self.name(self._replacing.places.processes[rank])

    def failures(self, exits: Exits) -> dict[int, Failure]:
        """Return the failure of each process. If all processes failed only because they lost a peer, include the
        processes whose loss they have not recovered from.
        """
        found = {
            each: self._unmet.get(each)
            or without_error(
                each, code, alive_at, self.name, *frame_at_signal(self._folder, self._attempt, each)
            )
            for each, (code, alive_at) in exits.items()
        }
        found |= {each: replace(found[each], what=what) for each, what in self._hung.items() if each in found}
        for failure in collect(self._folder, self._attempt):
            if not failure.seen:
                found[failure.rank] = failure
            elif (ended := found.get(failure.rank)) is not None:
                what = f"{failure.what}; then it {ended.what}"
                found[failure.rank] = replace(failure, code=ended.code, what=what, seen=False)
            elif self._processes[failure.rank].poll() not in (0, SAVED):
                found[failure.rank] = failure
        if any(not each.follows for each in found.values()):
            return found
        return {**self._replacing.recent, **found}

    def raised(self, ended: Sequence[int]) -> dict[int, Failure]:
        """Return the errors that were seen on processes that have ended with exit code 0."""
        found = collect(self._folder, self._attempt)
        return {failure.rank: failure for failure in found if failure.seen and failure.rank in ended}

    def _tell_places(self, number: int) -> None:
        """Print where the ranks are that have an open mesh, and which ranks they wait for: afterward, nobody can tell."""
        statuses = ask_places(self._folder, self._attempt, _PLACES_S)
        store = of_this_attempt(self._store, self._common)
        silent = {rank: state_of_rank(store, rank) for rank, status in statuses.items() if not status}
        lines = whereabouts({rank: status for rank, status in sorted(statuses.items()) if status}, silent)
        if lines:
            lines.insert(0, f"{signal_text(number)}: where each rank was before it was ended")
            print("\n".join(f"meshcomm: {line}" for line in lines), file=sys.stderr, flush=True)

    def _spoke(self) -> int:
        return sum(not failure.seen for failure in collect(self._folder, self._attempt))

    def _start(self, process: int) -> Popen[bytes]:
        own = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(process))
        return Popen([sys.executable, *self._arguments], env=self._common | own, start_new_session=True)

    def _start_again(self, process: int, generation: int) -> Process:
        self._common[VARIABLE] = str(generation)
        own = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(process)) | {VARIABLE: str(generation)}
        started = self._standby.take(own) or self._start(process)
        if self._replacing.may_replace:
            self._standby.start()
        else:
            self._standby.end()
        return started

    def _goes_on(self, exits: Exits, ended: bool) -> bool:
        failures = self.failures(exits)
        if not self._replacing.lost({each: failures[each] for each in exits}, ended):
            return False
        for each in exits:
            forget(self._folder, self._attempt, each)
            self._hung.pop(each, None)
            # Processes that the lost rank has started must not run at the same time as those of the new rank.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._processes[each].pid, signal.SIGKILL)
        return True

    def _await_exits(self) -> tuple[Exits, list[int]]:
        """Wait until all ranks have succeeded, or one has failed. Return the failed processes, and the processes that had
        succeeded.
        """
        ranks, replacing = self._processes, self._replacing
        alive_at = [time.time()] * len(ranks)
        failed: Exits = {}
        # Processes that a signal has ended when all work was done.
        after_end: set[int] = set()
        deadline = None
        while True:
            now = time.time()
            for each in replacing.starts():
                ranks[each] = self._start_again(each, replacing.started(each))
            for each, what in replacing.hung().items():
                if ranks[each].poll() is None:
                    # A stopped process, too, ends by this signal, and cannot return.
                    self._hung[each] = what
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(ranks[each].pid, signal.SIGKILL)
            codes = [process.poll() for process in ranks]
            killed = [each for each, code in enumerate(codes) if code is not None and code < 0]
            if killed and not failed and replacing.has_ended:
                for each in killed:
                    if each not in after_end:
                        how = without_error(each, codes[each] or 0, now, self.name).summary
                        print(f"meshcomm: {how} after the end; nothing is lost", file=sys.stderr, flush=True)
                    codes[each] = 0
                after_end |= {*killed}
            members = replacing.places.processes
            well = [each for each in members if codes[each] in (0, SAVED)]
            failed |= {
                each: (code, alive_at[each])
                for each, code in enumerate(codes)
                if code not in (None, 0, SAVED) and each not in failed and each not in replacing.down
            }
            if failed and deadline is None and self._goes_on(failed, bool(well)):
                failed = {}
                continue
            if not failed and (unmet := replacing.unmet(well)):
                self._unmet = unmet
                return {each: (failure.code, failure.time) for each, failure in unmet.items()}, well
            replacing.lose_patience()
            replacing.grow(bool(well))
            if failed and deadline is None:
                # A rank that its backend ended by SIGABRT cannot report why. The other ranks report their calls instead, which
                # takes a moment.
                aborted = all(code == -signal.SIGABRT for code, _ in failed.values())
                deadline = now + (_SPEAKS_S if aborted else 0.0)
            left = sum(codes[each] is None for each in members)
            if not left or (deadline is not None and (now >= deadline or self._spoke() >= left)):
                return failed, [each for each in well if codes[each] == 0]
            alive_at = [now] * len(ranks)
            time.sleep(_POLL_S)


def _send(ranks: Sequence[Process], number: int) -> None:
    for process in ranks:
        if process.poll() is None:
            process.send_signal(number)


def _end(ranks: Sequence[Process], signals: Mapping[int, float]) -> None:
    """Send each signal to the process groups of running ranks, and wait up to the given number of seconds for them to end."""
    for number, within_s in signals.items():
        # A stopped rank handles the signal only after SIGCONT.
        for each in (number, signal.SIGCONT):
            # Skip reaped processes, because their IDs may have been reused.
            for process in ranks:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid, each)
        deadline = time.monotonic() + within_s
        while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
