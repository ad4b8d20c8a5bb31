"""A pool of warm ranks: processes forked once with torch loaded, used by one test after another."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, final


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


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    stacks: Path


@final
class Pool:
    """Warm ranks. `run` gives each of them one function call and returns what they returned.

    The ranks see what torchrun would show them: RANK, WORLD_SIZE, LOCAL_RANK, and a store that
    outlives them, at a port chosen by the system. After a failure the ranks that took part are
    ended and replaced.
    """

    def __init__(self, preload: tuple[str, ...] = ("torch", "torch.distributed", "meshcomm.mesh")) -> None:
        # torch's store looks up the name of every address that connects; a name server that does
        # not answer must not cost each test five seconds.
        os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
        # A process that has run threads cannot be forked safely; the fork server never runs any.
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload([*preload, "meshcomm.testing.pool"])
        self._idle: list[_Worker] = []
        self._folder = tempfile.TemporaryDirectory(prefix="meshcomm-pool-")
        self._started = 0

    def run(
        self,
        function: Callable[..., Any],
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
        from meshcomm.mesh.exposure import serve_on_loopback

        store = serve_on_loopback("127.0.0.1", 0, timedelta(seconds=timeout_s))
        assert store is not None
        workers = self._take(ranks)
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
            worker.pipe.send((function, args, variables))
        results, failures = self._collect(workers, timeout_s)
        if failures:
            for worker in workers:
                _end(worker)
            if not allow:
                raise RankFailure({rank: failures[rank][1] for rank in sorted(failures)}, ranks)
            return [failures[r][0] if r in failures else results[r] for r in range(ranks)]
        self._idle.extend(workers)
        return [results[rank] for rank in range(ranks)]

    def close(self) -> None:
        """End every rank."""
        for worker in self._idle:
            _end(worker)
        self._idle.clear()
        self._folder.cleanup()

    def _take(self, count: int) -> list[_Worker]:
        alive = [worker for worker in self._idle if worker.process.is_alive()]
        taken, self._idle = alive[:count], alive[count:]
        while len(taken) < count:
            ours, theirs = self._context.Pipe()
            stacks = Path(self._folder.name, f"stacks{self._started}")
            self._started += 1
            process = self._context.Process(target=_serve, args=(theirs, str(stacks)), daemon=True)
            process.start()
            theirs.close()
            taken.append(_Worker(process, ours, stacks))
        return taken

    def _collect(
        self, workers: list[_Worker], timeout_s: float
    ) -> tuple[dict[int, Any], dict[int, tuple[Any, str]]]:
        results: dict[int, Any] = {}
        failures: dict[int, tuple[Any, str]] = {}
        waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in waiting.values():
                    text = f"did not return within {timeout_s:g} s\n{_stacks(workers[rank])}"
                    failures[rank] = (TimeoutError(text), text)
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    good, value, text = pipe.recv()
                except (EOFError, ConnectionResetError):
                    workers[rank].process.join(5)
                    text = f"died with exit code {workers[rank].process.exitcode}"
                    good, value = False, ChildProcessError(text)
                if good:
                    results[rank] = value
                else:
                    failures[rank] = (value, text)
                    # The others often wait for this one; give them a moment, then take stacks.
                    deadline = min(deadline, time.monotonic() + 15.0)
        return results, failures


def _stacks(worker: _Worker) -> str:
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker.process.pid or 0, signal.SIGUSR1)
    time.sleep(0.2)
    return worker.stacks.read_text() if worker.stacks.exists() else ""


def _end(worker: _Worker) -> None:
    worker.pipe.close()
    worker.process.kill()
    worker.process.join()


def _serve(pipe: Connection, stacks: str) -> None:
    """One rank's life: take a call, make it, answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    file = open(stacks, "w")  # noqa: SIM115 - faulthandler needs it open for life
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    import torch

    torch.set_num_threads(1)
    # A collection would touch, and so copy, every page that the ranks share since the fork.
    gc.freeze()
    clean = dict(os.environ)
    while True:
        try:
            function, args, variables = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        os.environ.clear()
        os.environ.update({**clean, **variables})
        try:
            answer = (True, function(*args), "")
        except BaseException as error:
            answer = (False, error, traceback.format_exc())
        sys.stdout.flush()
        try:
            pipe.send(answer)
        except Exception as error:  # what was returned or raised cannot be pickled
            _, value, text = answer
            note = f"{type(value).__name__} cannot cross to the test: {error}\n{text}"
            pipe.send((False, RuntimeError(note), note))
