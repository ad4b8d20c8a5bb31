"""A pool of warm ranks: processes forked once with torch loaded, used by one test after another."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, TypeVar, final, overload

from meshcomm.testing.stacks import dump
from meshcomm.testing.worker import READY, Answer, Call, Files, serve

T = TypeVar("T")

# Loading torch takes seconds, on a busy machine many.
_START_S = 120.0


@final
class RankFailure(AssertionError):
    """One or more ranks raised, died, or did not return in time. `by_rank` has each one's text."""

    def __init__(self, by_rank: Mapping[int, str], world_size: int) -> None:
        self.by_rank = dict(by_rank)
        # Equal texts are told once, with all their ranks.
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

    value: what it returned or raised. text: what went wrong; empty for "returned".
    stack: what all threads did when the time was up, as faulthandler writes it; empty if never asked.
    """

    state: Literal["returned", "raised", "died", "late"]
    value: Any = None
    text: str = ""
    stack: str = ""
    out: str = ""
    err: str = ""


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    files: Files


@final
class Pool:
    """Warm ranks. `run` gives each of them one function call and returns what they returned.

    The ranks see what torchrun would show them: RANK, WORLD_SIZE, LOCAL_RANK, and a store that
    outlives them, at a port chosen by the system. After a failure the ranks that took part are
    ended and replaced. No rank outlives the process that made the pool.
    """

    def __init__(self, preload: tuple[str, ...] = ("torch", "torch.distributed", "meshcomm.mesh")) -> None:
        # torch's store looks up the name of every address that connects; a name server that does
        # not answer must not cost each test five seconds.
        os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
        # A process that has run threads cannot be forked safely; the fork server never runs any.
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload([*preload, "meshcomm.testing.worker"])
        # By rank: torch keeps what it once found out about a DeviceMesh, and a process that were
        # another rank of an equal one later would get the groups of the first.
        self._idle: dict[int, _Worker] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="meshcomm-pool-")
        self._started = 0

    @property
    def folder(self) -> Path:
        """A folder that all ranks see and that goes with the pool."""
        return Path(self._folder.name)

    @overload
    def run(
        self,
        function: Callable[..., T],
        *args: Any,
        ranks: int = ...,
        timeout_s: float = ...,
        env: Mapping[str, str] | None = ...,
        allow: Literal[False] = ...,
    ) -> list[T]: ...
    @overload
    def run(
        self,
        function: Callable[..., T],
        *args: Any,
        ranks: int = ...,
        timeout_s: float = ...,
        env: Mapping[str, str] | None = ...,
        allow: bool,
    ) -> list[Any]: ...
    def run(
        self,
        function: Callable[..., T],
        *args: Any,
        ranks: int = 8,
        timeout_s: float = 60.0,
        env: Mapping[str, str] | None = None,
        allow: bool = False,
    ) -> list[Any]:
        """Call `function(*args)` on `ranks` processes at once; return their results by rank.

        function: importable by name. args and results: picklable.
        allow:    return an exception as a rank's result instead of raising RankFailure.
        Raises:   RankFailure; a rank that does not return in time is ended, and its stacks are
                  in the text.
        """
        ended = self.call(function, args, ranks=ranks, timeout_s=timeout_s, env=env)
        failures = {rank: one.text for rank, one in enumerate(ended) if one.state != "returned"}
        if failures and not allow:
            raise RankFailure(failures, ranks)
        return [one.value for one in ended]

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        ranks: int,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        capture: bool = False,
        failed: Callable[[Any], bool] = lambda value: False,
        settle_s: float = 15.0,
        grace_s: float = 0.0,
    ) -> list[Ended]:
        """As `run`, but tells how each rank ended instead of raising.

        capture:  keep what the ranks write to stdout and stderr for `Ended.out` and `err`.
        failed:   whether a returned value means that the ranks must not be used again.
        settle_s: what the others get to end by themselves after one rank failed.
        grace_s:  what ranks get to answer after their stacks were taken, at the end of timeout_s.
        """
        from meshcomm.mesh.exposure import serve_on_loopback

        store = serve_on_loopback("127.0.0.1", 0, timedelta(seconds=timeout_s))
        assert store is not None
        workers = self._take(ranks)
        try:
            for rank, worker in enumerate(workers):
                variables = {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(store.port),
                    "TORCHELASTIC_USE_AGENT_STORE": "True",
                    **(env or {}),
                }
                with contextlib.suppress(BrokenPipeError):  # it has died; its pipe says so below
                    worker.pipe.send(Call(function, args, variables, capture))
            ended, reusable = self._collect(workers, timeout_s, failed, settle_s, grace_s)
        except BaseException:
            # Interrupted: nobody knows where the ranks are.
            _end_all(workers)
            raise
        if any(one.state != "returned" or failed(one.value) for one in ended.values()):
            reusable.clear()
        if capture:
            for rank, worker in enumerate(workers):
                out, err = worker.files.written()
                ended[rank] = replace(ended[rank], out=out, err=err)
        self._idle.update({rank: workers[rank] for rank in sorted(reusable)})
        _end_all([worker for rank, worker in enumerate(workers) if rank not in reusable])
        return [ended[rank] for rank in range(ranks)]

    def close(self) -> None:
        """End every rank."""
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
            files = Files(self.folder / f"rank{self._started}")
            self._started += 1
            process = self._context.Process(target=serve, args=(theirs, files), daemon=True)
            process.start()
            theirs.close()
            taken.append(_Worker(process, ours, files))
            fresh.append(taken[-1])
        for worker in fresh:
            # The first ones wait until the fork server has loaded torch; no test's time runs yet.
            if not worker.pipe.poll(_START_S) or not _says_ready(worker):
                _end_all(taken)
                raise RankFailure({0: f"a rank did not start within {_START_S:g} s"}, count)
        return taken

    def _collect(
        self,
        workers: list[_Worker],
        timeout_s: float,
        failed: Callable[[Any], bool],
        settle_s: float,
        grace_s: float,
    ) -> tuple[dict[int, Ended], set[int]]:
        ended: dict[int, Ended] = {}
        stacks: dict[int, str] = {}
        reusable: set[int] = set()
        waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready and not stacks:
                late = list(waiting.values())
                texts = dump([(workers[rank].process.pid or 0, workers[rank].files.stacks) for rank in late])
                stacks = dict(zip(late, texts, strict=True))
                deadline = time.monotonic() + grace_s
                continue
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                one, again = _ended(workers[rank])
                ended[rank] = replace(one, stack=stacks.get(rank, one.stack))
                if again:
                    reusable.add(rank)
                if not stacks and (one.state != "returned" or failed(one.value)):
                    # The others often wait for this one; give them a moment, then take stacks.
                    deadline = min(deadline, time.monotonic() + settle_s)
        for rank in waiting.values():
            said = stacks[rank].partition("\n")[2]
            text = f"did not return within {timeout_s:g} s\n{said}"
            ended[rank] = Ended("late", TimeoutError(text), text, stacks[rank])
        return ended, reusable


def _ended(worker: _Worker) -> tuple[Ended, bool]:
    """How the rank that has something to say ended, and whether it can take another call."""
    try:
        answer: Answer = worker.pipe.recv()
    except (EOFError, ConnectionResetError):
        worker.process.join(5)
        stack = worker.files.stacks.read_text() if worker.files.stacks.exists() else ""
        text = how_it_died(worker.process.exitcode)
        return Ended("died", ChildProcessError(text), text, stack), False
    state: Literal["returned", "raised"] = "returned" if answer.good else "raised"
    return Ended(state, answer.value, answer.text), answer.reusable


def _says_ready(worker: _Worker) -> bool:
    try:
        return bool(worker.pipe.recv() == READY)
    except (EOFError, ConnectionResetError):
        return False


def how_it_died(code: int | None) -> str:
    """An exit code in words.

    >>> how_it_died(-9), how_it_died(3)
    ('was killed by SIGKILL', 'ended with exit code 3')
    """
    if code is None:
        return "closed its connection to the test"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _end_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.pipe.close()
        worker.process.kill()
    for worker in workers:
        worker.process.join()
