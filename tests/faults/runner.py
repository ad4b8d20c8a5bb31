"""Run one row on real processes: the outcome of each rank, and any difference from the row's promise."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import os
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, final

from tests.faults.row import Rank, Row

# How much longer than promised a row may take. Ranks that still run then hang.
_LIMIT_S: Final = 15.0
# How long a rank may take, after its error, to close its mesh and end.
_ENDS_S: Final = 10.0

# Modules that the processes share by forking. If another test has started the fork server before, the processes
# import missing modules themselves.
_PRELOAD: Final = [
    "torch",
    "torch.distributed",
    "meshcomm.mesh",
    "meshcomm.train",
    "meshcomm.testing.pool",
    "tests.faults.rows",
]
# How long the processes of a row may take to start.
_STARTS_S: Final = 60.0


@dataclass(frozen=True)
class Said:
    """The outcome of one surviving rank: its error, or "" if it ended without one.

    at: the time, on the clock that all processes of a host share.
    named: the ranks that the error lists as odd or missing, if it has such a list.
    """

    kind: str
    text: str
    at: float
    named: tuple[int, ...] | None = None


@final
@dataclass
class Result:
    """The outcome of a row.

    said: by rank, for ranks that were neither killed nor stopped.
    gone: rank -> "SIGKILL" or "SIGSTOP".
    hung: rank -> its stacks; ranks that neither raised nor ended in time.
    seconds: from the fault to the last error or, if no rank raised, to the end of the last rank.
    left: number of the row's processes that were left after its end.
    """

    said: dict[int, Said] = field(default_factory=dict)
    gone: dict[int, str] = field(default_factory=dict)
    hung: dict[int, str] = field(default_factory=dict)
    seconds: float | None = None
    left: int = 0


@dataclass
class _Worker:
    rank: int
    process: BaseProcess
    pipe: Connection
    stacks: Path


# Texts of errors of ranks that did not open their mesh within the row's short timeout.
_UNOPENED: Final = (
    "could not create the group",
    "never arrived to agree on the mesh",
    "could not meet the others",
)
_TRIES: Final = 3


def run(row: Row) -> Result:
    """Run `row`. If the machine is too busy to open its meshes, so that the row's fault never happened, run it again."""
    for _ in range(_TRIES - 1):
        result = _once(row)
        if row.opens or not any(text in said.text for said in result.said.values() for text in _UNOPENED):
            return result
    return _once(row)


def _once(row: Row) -> Result:
    """Run the row once, from the start of its processes to the end of the last one."""
    context = get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory(prefix="meshcomm-fault-") as name, _store(row, context) as (port, pid):
        folder = Path(name)
        workers = []
        try:
            for rank in row.started:
                ours, theirs = context.Pipe()
                stacks = folder / f"stacks{rank}"
                arguments = (row.name, rank, folder, pid, theirs, _environment(row, rank, port), stacks)
                process = context.Process(target=_rank, args=arguments, daemon=True)
                process.start()
                theirs.close()
                workers.append(_Worker(rank, process, ours, stacks))
            _begin_together(workers)
            return _watch(workers, row.promise_s + _LIMIT_S)
        finally:
            for worker in workers:
                worker.process.kill()
                worker.process.join()
                worker.pipe.close()


def _begin_together(workers: list[_Worker]) -> None:
    """Wait until every process has finished its imports, because the timeouts must not run during imports."""
    deadline = time.monotonic() + _STARTS_S
    for worker in workers:
        if not worker.pipe.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"rank {worker.rank} did not start within {_STARTS_S:g} s")
        assert worker.pipe.recv() == "ready"
    for worker in workers:
        worker.pipe.send("go")


def _environment(row: Row, rank: int, port: int) -> dict[str, str]:
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(row.ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(row.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if row.server in ("agent", "own process"):
        variables["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    return {**variables, **row.environment(rank)}


# -- who holds the store ----------------------------------------------------------------------------


@contextlib.contextmanager
def _store(row: Row, context: Any) -> Iterator[tuple[int, int]]:
    """The store's port, and the id of the process that holds it, or 0 if the store has no process of its own."""
    if row.server in ("agent", "taken by a store"):
        store = _serve()
        yield store.port, 0
        del store
    elif row.server == "own process":
        ours, theirs = context.Pipe()
        process = context.Process(target=_server, args=(theirs,), daemon=True)
        process.start()
        try:
            yield ours.recv(), process.pid
        finally:
            process.kill()
            process.join()
            ours.close()
    else:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
            if row.server == "rank 0":
                listener.close()
            else:
                listener.listen(64)
            yield port, 0


def _serve() -> Any:
    from meshcomm.rendezvous.exposure import serve_on_loopback

    store = serve_on_loopback("127.0.0.1", 0, timedelta(seconds=60))
    assert store is not None
    return store


def _server(pipe: Connection) -> None:
    store = _serve()
    pipe.send(store.port)
    signal.pause()


# -- watching the ranks -----------------------------------------------------------------------------


def _watch(workers: list[_Worker], limit_s: float) -> Result:
    result = Result()
    faults: list[float] = []
    talking = {worker.pipe: worker for worker in workers}
    waiting = {worker.process.sentinel: worker for worker in workers}
    deadline = time.monotonic() + limit_s
    while waiting and time.monotonic() < deadline:
        for ready in wait([*talking, *waiting], timeout=0.25):
            if isinstance(ready, Connection):
                try:
                    kind, value = ready.recv()
                except (EOFError, ConnectionResetError):
                    talking.pop(ready)
                    continue
                if kind == "fault":
                    faults.append(value)
                    continue
                result.said[talking[ready].rank] = value
            elif waiting[ready].pipe not in talking:
                _ended(waiting.pop(ready), result)
        for worker in list(waiting.values()):
            if _state(worker.process.pid) == "T":
                result.gone[worker.rank] = "SIGSTOP"
        if all(worker.rank in result.gone or worker.rank in result.said for worker in waiting.values()):
            # All ranks have reported; they only have to close and end.
            deadline = min(deadline, time.monotonic() + _ENDS_S)
        if waiting and all(worker.rank in result.gone for worker in waiting.values()):
            break
    stuck = [worker for worker in waiting.values() if worker.rank not in result.gone]
    result.hung = {worker.rank: _stacks(worker) for worker in stuck}
    sessions = {worker.process.pid for worker in workers}
    for worker in workers:
        if result.gone.get(worker.rank) == "SIGSTOP":
            worker.process.kill()
            worker.process.join()
    result.left = len(_of_sessions(sessions))
    # If no rank raises, the end of the last rank counts.
    ends = [said.at for said in result.said.values() if said.kind] or [s.at for s in result.said.values()]
    if ends and faults:
        result.seconds = max(ends) - max(faults)
    return result


def _ended(worker: _Worker, result: Result) -> None:
    worker.process.join()
    code = worker.process.exitcode
    if code == -signal.SIGKILL:
        result.gone[worker.rank] = "SIGKILL"
    elif worker.rank not in result.said or code != 0:
        before = result.said.get(worker.rank)
        text = _log(worker) if before is None else f"after {before.kind or 'its end'}: {before.text}"
        result.said[worker.rank] = Said(f"exit code {code}", text, time.monotonic())


def _state(pid: int | None) -> str:
    """The kernel's letter for a process: T for a stopped one; "" if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _of_sessions(sessions: set[int | None]) -> list[int]:
    """Processes in the sessions that the ranks lead, including the ranks, without zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, session = (path / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) in sessions and state != "Z":
                found.append(int(path.name))
    return found


def _stacks(worker: _Worker) -> str:
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker.process.pid or 0, signal.SIGUSR1)
    time.sleep(0.2)
    return _log(worker)


def _log(worker: _Worker) -> str:
    """The rank's stderr, which includes its stacks."""
    return worker.stacks.read_text(errors="replace") if worker.stacks.exists() else ""


# -- in a rank --------------------------------------------------------------------------------------


def _rank(
    name: str, rank: int, folder: Path, server: int, pipe: Connection, variables: dict[str, str], stacks: Path
) -> None:
    """One rank of the row `name`, from its start to its end."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with stacks.open("w") as file:
        # torch's own log matters only if something hangs.
        os.dup2(file.fileno(), 2)
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
        os.environ.update(variables)
        import torch

        from tests.faults.rows import ROWS

        torch.set_num_threads(1)
        # A collection would touch, and so copy, every page that the ranks share since the fork.
        gc.freeze()
        me = Rank(rank, ROWS[name], folder, server, pipe)
        pipe.send("ready")
        pipe.recv()
        pipe.send(("said", _outcome(me)))
        if me.row.bare:
            atexit._run_exitfuncs()
        pipe.close()
        faulthandler.unregister(signal.SIGUSR1)


def _outcome(me: Rank) -> Said:
    from meshcomm.errors import MeshcommError

    try:
        me.row.program(me)
    except BaseException as error:
        if me.row.bare:
            # Python does the same if the error is not caught.
            sys.excepthook(type(error), error, error.__traceback__)
        else:
            me.reported.append(error)
    if not me.reported:
        return Said("", "", time.monotonic())
    error = me.reported[-1]
    at = me.raised_at or time.monotonic()
    text = str(error) if isinstance(error, MeshcommError) else "".join(traceback.format_exception(error))
    named = (*getattr(error, "mismatched_ranks", ()), *getattr(error, "missing", ()))
    return Said(type(error).__name__, text, at, named or None)


# -- compare with the row: plain data in, a list of complaints out --------------------------------------


def complaints(row: Row, result: Result, busy_s: float = 0.0) -> list[str]:
    """All differences between `result` and the expectations of `row`; empty if there are none.

    busy_s: seconds that other work on the machine may add to the promise.
    """
    found = [f"rank {rank} hangs:\n{stacks}" for rank, stacks in result.hung.items()]
    survivors = set(row.expected)
    for rank in row.started:
        if rank not in survivors and rank not in result.gone and rank not in result.hung:
            found.append(f"rank {rank} was to be killed or stopped, and said {result.said.get(rank)}")
    for rank in sorted(survivors - set(result.hung)):
        said = result.said.get(rank)
        if said is None:
            found.append(f"rank {rank} said nothing: {result.gone.get(rank)}")
        elif said.kind not in row.expected[rank].split("|"):
            found.append(
                f"rank {rank}: {row.expected[rank] or 'no error'} expected, got {said.kind}\n{said.text}"
            )
        elif said.kind:
            unnamed = [other for other in row.to_name(rank) if other not in names(said)]
            blamed = [other for other in row.blameless if other in (said.named or ())]
            if unnamed or blamed:
                found.append(f"rank {rank} does not name {unnamed}, and blames {blamed}\n{said.text}")
    if result.seconds is None:
        found.append("nobody told when the fault was")
    elif result.seconds > row.promise_s + busy_s:
        busy = f", and {busy_s:g} s for other work" if busy_s else ""
        found.append(f"{result.seconds:.2f} s after the fault, promised within {row.promise_s:g} s{busy}")
    if result.left:
        found.append(f"{result.left} processes of the row were left")
    return found


def names(said: Said) -> set[int]:
    """The ranks that an error names: its own list if it has one, otherwise the ranks in its text."""
    if said.named is not None:
        return set(said.named)
    found = set()
    # "rank 2", "ranks 1 3", "ranks 0-2 5", "coord 2"
    for listed in re.findall(r"\b(?:ranks?|coords?) ((?:\d+(?:-\d+)?(?:[ ,]+|\b))+)", said.text):
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", listed):
            found |= set(range(int(first), int(last or first) + 1))
    return found
