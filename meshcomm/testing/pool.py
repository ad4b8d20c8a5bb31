"""A pool of warm ranks: processes that are forked once, with torch already loaded, and reused from test to test."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, final

from meshcomm.watching.ending import signal_text

# Loading torch takes seconds, or much longer on a busy machine.
_START_S: Final = 120.0
# The signal on which ranks write their stacks. Training handles SIGUSR1 itself.
_STACK_SIGNAL: Final = getattr(signal, "SIGRTMIN", signal.SIGUSR1)
# How long ranks may take to write their stacks.
_STACKS_S: Final = 2.0


@final
class RankFailure(AssertionError):
    """One or more ranks raised an exception, died, or did not return in time. `by_rank` contains each rank's text."""

    def __init__(self, by_rank: Mapping[int, str], world_size: int) -> None:
        self.by_rank = dict(by_rank)
        # A text that several ranks share is shown once, with these ranks.
        folded: dict[str, list[int]] = {}
        for rank, text in by_rank.items():
            folded.setdefault(text, []).append(rank)
        parts = [
            f"rank {' '.join(map(str, ranks))} of {world_size}:\n{text}" for text, ranks in folded.items()
        ]
        super().__init__("\n\n".join(parts))


@final
@dataclass(frozen=True)
class Ended:
    """How one rank's call ended.

    value: the call's result or exception. text: a description of the failure; empty for "returned".
    stack: the main thread's stack at the timeout, or all threads' stacks at a fault such as SIGSEGV, as written by
        faulthandler; empty if no stack was taken.
    reusable: whether the rank can run another call.
    """

    state: Literal["returned", "raised", "died", "late"]
    value: Any = None
    text: str = ""
    stack: str = ""
    out: str = ""
    err: str = ""
    reusable: bool = False


@final
@dataclass(frozen=True)
class Held:
    """What a function on a rank may return: a value, and objects that must stay alive until the next call."""

    value: Any
    alive: Any = None
    reusable: bool = True


class Limits(NamedTuple):
    """The time limits of one call, in seconds.

    timeout_s: the limit for the whole call. settle_s: how long the other ranks may take to finish after one has failed.
    grace_s: how long ranks may take to answer after a limit has expired and their stacks were taken.
    """

    timeout_s: float = 60.0
    settle_s: float = 15.0
    grace_s: float = 0.0


class _Files(NamedTuple):
    """One rank's files: its stacks, written on request or at a fault, its stdout and its stderr."""

    stacks: Path
    out: Path
    err: Path


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    files: _Files


@final
class Pool:
    """Warm rank processes. `run` calls a function on each of them and returns the results.

    The ranks get torchrun's environment variables, such as RANK, WORLD_SIZE and LOCAL_RANK, and a store
    that outlives them, on a port chosen by the system. After a failure, the ranks that ran the call are
    terminated and replaced. No rank outlives the process that created the pool.
    """

    def __init__(self, preload: tuple[str, ...] = ("torch", "torch.distributed", "meshcomm.mesh")) -> None:
        # torch's store looks up the name of every address that connects. Without this limit, a name server
        # that does not respond would cost each test five seconds.
        os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
        # A process with threads cannot be forked safely. The fork server never starts threads.
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload([*preload, "meshcomm.testing.pool"])
        # A process always keeps its rank, because torch caches DeviceMeshes: a process that later became another
        # rank of an equal DeviceMesh would get the groups of its earlier rank.
        self._idle: dict[int, _Worker] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="meshcomm-pool-")
        self._started = 0

    @property
    def folder(self) -> Path:
        """A folder that all ranks can access. It is deleted when the pool is closed."""
        return Path(self._folder.name)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: int = 8,
        timeout_s: float = 60.0,
        env: Mapping[str, str] | None = None,
        allow: bool = False,
    ) -> list[Any]:
        """Call `function(*args)` in `ranks` processes in parallel, and return the results by rank.

        function: must be importable by name. args: must be picklable, as must the results.
        allow:    if True, return an exception as the rank's result instead of raising RankFailure.
        Raises:   RankFailure. A rank that does not return in time is terminated, and the text contains its stack.
        """
        ended = self.call(partial(function, *args), ranks=ranks, limits=Limits(timeout_s), env=env)
        failures = {rank: _failure_text(end) for rank, end in enumerate(ended) if end.state != "returned"}
        if failures and not allow:
            raise RankFailure(failures, ranks)
        return [end.value for end in ended]

    def call(
        self,
        function: Callable[[], Any],
        *,
        ranks: int,
        limits: Limits,
        env: Mapping[str, str] | None = None,
        capture: bool = False,
        failed: Callable[[Any], bool] = lambda value: False,
    ) -> list[Ended]:
        """Like `run`, but returns how each rank ended instead of raising an exception.

        function: must be picklable, such as a functools.partial of a function that can be imported by name.
        capture:  whether to capture the ranks' stdout and stderr in `Ended.out` and `Ended.err`.
        failed:   returns whether a returned value means that the ranks must not be reused.
        """
        from meshcomm.rendezvous.exposure import serve_on_loopback

        store = serve_on_loopback("127.0.0.1", 0, timedelta(seconds=limits.timeout_s))
        assert store is not None
        common = {
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        workers = self._take(ranks)
        try:
            for rank, worker in enumerate(workers):
                variables = {**common, **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)), **(env or {})}
                with contextlib.suppress(BrokenPipeError):  # it has died; its pipe says so below
                    worker.pipe.send((function, variables, capture))
            ended = self._collect(workers, limits, failed)
        except BaseException:
            # The call was interrupted, so the state of the ranks is unknown.
            _end_all(workers)
            raise
        if capture:
            for rank, worker in enumerate(workers):
                ended[rank] = replace(ended[rank], out=_read(worker.files.out), err=_read(worker.files.err))
        good = all(end.state == "returned" and not failed(end.value) for end in ended.values())
        reusable = {rank: worker for rank, worker in enumerate(workers) if good and ended[rank].reusable}
        self._idle.update(reusable)
        _end_all([worker for rank, worker in enumerate(workers) if rank not in reusable])
        return [ended[rank] for rank in range(ranks)]

    def close(self) -> None:
        """Terminate all ranks and delete the pool's folder."""
        _end_all(list(self._idle.values()))
        self._idle.clear()
        self._folder.cleanup()

    def _take(self, count: int) -> list[_Worker]:
        taken: list[_Worker] = []
        fresh: list[_Worker] = []
        for rank in range(count):
            idle = self._idle.pop(rank, None)
            if idle is not None and idle.process.is_alive():
                taken.append(idle)
                continue
            ours, theirs = self._context.Pipe()
            files = _Files(*(self.folder / f"rank{self._started}.{kind}" for kind in _Files._fields))
            self._started += 1
            process = self._context.Process(target=_serve, args=(theirs, files), daemon=True)
            process.start()
            theirs.close()
            taken.append(_Worker(process, ours, files))
            fresh.append(taken[-1])
        for worker in fresh:
            # The first ranks wait until the fork server has loaded torch. This does not count against a test's timeout.
            # A closed pipe also counts as readable.
            ready = worker.pipe.poll(_START_S)
            with contextlib.suppress(EOFError, ConnectionResetError):
                if ready and worker.pipe.recv():
                    continue
            _end_all(taken)
            raise RankFailure({0: f"a rank did not start within {_START_S:g} s"}, count)
        return taken

    def _collect(
        self, workers: list[_Worker], limits: Limits, failed: Callable[[Any], bool]
    ) -> dict[int, Ended]:
        ended: dict[int, Ended] = {}
        stacks: dict[int, str] = {}
        waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
        deadline = time.monotonic() + limits.timeout_s
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready and stacks:
                break
            if not ready:
                late = list(waiting.values())
                stacks = dict(zip(late, _dump([workers[rank] for rank in late]), strict=True))
                deadline = time.monotonic() + limits.grace_s
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                end = ended[rank] = _ended(workers[rank], stacks.get(rank, ""))
                if not stacks and (end.state != "returned" or failed(end.value)):
                    # The other ranks may be waiting for this one. Give them a moment, then take their stacks.
                    deadline = min(deadline, time.monotonic() + limits.settle_s)
        for rank in waiting.values():
            text = f"did not return within {limits.timeout_s:g} s\n" + stacks[rank]
            ended[rank] = Ended("late", TimeoutError(text), text, stacks[rank])
        return ended


def _failure_text(end: Ended) -> str:
    """Return the text of a failure, with the stacks that the rank wrote if it died of a fault such as SIGSEGV."""
    fault = end.stack.strip() if end.state == "died" else ""
    return f"{end.text}\n{fault}".rstrip()


def _ended(worker: _Worker, stack: str) -> Ended:
    """Return how a rank ended, once it has sent its answer or closed its pipe."""
    try:
        answer: Ended = worker.pipe.recv()
        return replace(answer, stack=stack)
    except (EOFError, ConnectionResetError):
        worker.process.join(5)
        text = how_it_died(worker.process.exitcode)
        return Ended("died", ChildProcessError(text), text, stack or _read(worker.files.stacks))


def how_it_died(code: int | None) -> str:
    """Return text for an exit code.

    >>> how_it_died(-9), how_it_died(3)
    ('was killed by SIGKILL', 'ended with exit code 3')
    """
    if code is None:
        return "closed its connection to the test"
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal_text(-code)}"


def _dump(workers: list[_Worker]) -> list[str]:
    """Make ranks write the stacks of their main threads, and return the stacks."""
    files = [worker.files.stacks for worker in workers]
    before = [len(_read(file)) for file in files]
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.process.pid or 0, _STACK_SIGNAL)
    # faulthandler writes no end mark. The stacks are complete when all files have text and have stopped growing.
    deadline, last, sizes = time.monotonic() + _STACKS_S, [-1], before
    while time.monotonic() < deadline and (sizes != last or any(map(int.__eq__, sizes, before))):
        time.sleep(0.05)
        last, sizes = sizes, [len(_read(file)) for file in files]
    return [_read(file) for file in files]


def _read(file: Path) -> str:
    return file.read_text(errors="backslashreplace") if file.exists() else ""


def _end_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.pipe.close()
        worker.process.kill()
    for worker in workers:
        worker.process.join()


# -- a rank's life ------------------------------------------------------------------------------


def _serve(pipe: Connection, files: _Files) -> None:
    """Run calls from the pipe until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), name="meshcomm-parent", daemon=True).start()
    # A test may start processes, such as DataLoader workers, which daemonic processes are not allowed to do.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    stacks = open(files.stacks, "w")  # noqa: SIM115 - faulthandler needs it open for life
    faulthandler.enable(file=stacks, all_threads=True)
    import torch

    torch.set_num_threads(1)
    # A garbage collection would write to every page shared since the fork, and so copy it.
    gc.freeze()
    clean = dict(os.environ)
    held: Any = None
    pipe.send("ready")
    while True:
        try:
            function, variables, capture = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        os.environ.clear()
        os.environ.update({**clean, **variables})
        del held
        # Register again for each call, because a function may install its own handler. Dump only the main thread, which
        # the kernel prefers for signals. With all_threads, faulthandler reads the state of threads that C++ is just
        # creating, which sometimes kills a healthy rank.
        faulthandler.unregister(_STACK_SIGNAL)
        faulthandler.register(_STACK_SIGNAL, file=stacks, all_threads=False)
        with _written_to(files.out, files.err) if capture else contextlib.nullcontext():
            answer, held = _make(function)
        try:
            pipe.send(answer)
        except Exception as error:  # the result or exception cannot be pickled
            note = f"{type(answer.value).__name__} cannot be sent to the test: {error}\n{answer.text}"
            pipe.send(Ended("raised", RuntimeError(note), note, reusable=True))


def _make(function: Callable[[], Any]) -> tuple[Ended, Any]:
    try:
        value = function()
        held = value if isinstance(value, Held) else Held(value)
        return Ended("returned", held.value, reusable=held.reusable), held.alive
    except BaseException as error:
        return Ended("raised", error, traceback.format_exc()), None
    finally:
        if (watched := sys.modules.get("meshcomm.mesh.watched")) is not None:
            # A watch continues with the next default group of this process, which belongs to the next test.
            watched.gives_way()
        if (torch := sys.modules.get("torch")) is not None:
            # These would change the next test's tensors.
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)
        sys.stdout.flush()
        sys.stderr.flush()


@contextlib.contextmanager
def _written_to(*paths: Path) -> Iterator[None]:
    """Redirect the process's stdout and stderr, including the output of C libraries, to files."""
    streams = [os.dup(number) for number in (1, 2)]
    for number, path in zip((1, 2), paths, strict=True):
        file = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    for stream in (sys.stdout, sys.stderr):
        # Flush each line, so that printed lines are not lost if the rank is killed.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
    try:
        yield
    finally:
        for number, old in zip((1, 2), streams, strict=True):
            os.dup2(old, number)
            os.close(old)


def _end_with(parent: int) -> None:
    """Terminate this process when the process that created the pool has ended for any reason."""
    wait([parent])
    os._exit(1)
