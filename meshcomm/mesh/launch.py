"""Start one process per rank on this host, by torch's own agent, on a free port of the loopback."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import final

from torch.distributed.elastic.multiprocessing import SignalException

from meshcomm.errors import LaunchError
from meshcomm.mesh.agent import Agent
from meshcomm.mesh.failures import collect
from meshcomm.mesh.guard import JOB_VARIABLE, LAUNCHER_VARIABLE, Guard, end_all
from meshcomm.mesh.judge import Verdict, judge

INTERRUPTED = 130


def launch(
    arguments: Sequence[str],
    world_size: int,
    max_restarts: int = 0,
    label: Callable[[int], str] = "rank {}".format,
) -> int:
    """Run `python ARGUMENTS` as `world_size` ranks; return the job's exit code.

    label: the name of a rank, with its coords; only called after a failure.

    The code is 0 when all ranks ended well, that of the rank whose failure caused the others'
    (128 + signal where a signal ended it), or 130 after Ctrl-C. No process of the job outlives the
    call, nor this process, however it ends: ranks that do not end within ten seconds of SIGTERM (or
    TORCH_ELASTIC_SHUTDOWN_TIMEOUT) are killed, and so is all that ranks have started. The ranks write to this process's own stdout and
    stderr; the last lines on stderr name the failure that was the cause, with its rank's coords and
    line, and in one line those that followed. Where one fails, all are ended and started again, up
    to `max_restarts` times, each time after the same lines; the code is that of the last time.
    """
    if world_size > 4096:
        raise LaunchError(
            f"{world_size} processes on one host",
            given=f"a mesh of {world_size} ranks, started outside a launcher",
            expected="at most 4096 ranks on one host",
            hint="torchrun --nnodes N --nproc-per-node M -m meshcomm ... on every host",
        )
    threads = max(1, (os.cpu_count() or 1) // world_size)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    # The agent logs every rank that fails, with its own traceback; what there is to say is said here.
    logging.disable(logging.CRITICAL)
    folder = Path(tempfile.mkdtemp(prefix="meshcomm-"))
    guard = Guard(folder)
    # The ranks inherit these; they are how a rank, and all that it starts, is known.
    os.environ |= {JOB_VARIABLE: str(folder), LAUNCHER_VARIABLE: str(os.getpid())}
    teller = _Teller(folder, world_size, max_restarts, label)
    agent = Agent(list(arguments), world_size, max_restarts, folder, teller.failed, teller.restarts)
    try:
        result = agent.run()
    except (SignalException, KeyboardInterrupt) as stop:
        received = getattr(stop, "sigval", signal.SIGINT)
        return INTERRUPTED if received == signal.SIGINT else 128 + int(received)
    finally:
        end_all(folder)
        guard.dismiss()
        del os.environ[JOB_VARIABLE], os.environ[LAUNCHER_VARIABLE]
        shutil.rmtree(folder, ignore_errors=True)
    return teller.last() if result.is_failed() else 0


@final
class _Teller:
    """Says on stderr why an attempt failed, and that there is another."""

    def __init__(self, folder: Path, world_size: int, max_restarts: int, label: Callable[[int], str]) -> None:
        self._folder = folder
        self._world_size = world_size
        self._max_restarts = max_restarts
        self._label = label
        self._attempt = 0
        self._verdict: Verdict | None = None

    def failed(self, ended: Mapping[int, int], alive_at: float) -> None:
        """All ranks of this attempt have ended: see to what they started, and find the cause."""
        end_all(self._folder)
        left = collect(self._folder, self._attempt)
        self._verdict = judge(left, ended, alive_at, self._world_size, self._label)

    def restarts(self, number: int) -> None:
        """They are started again."""
        self._tell(f"; restart {number} of {self._max_restarts}")
        self._attempt = number

    def last(self) -> int:
        """They are not: the exit code."""
        return self._tell("")

    def _tell(self, then: str) -> int:
        # An agent that fails without a word of any rank is not a job that ended well.
        verdict = self._verdict or Verdict("", "the job failed, and no rank has said why", (), 1)
        self._verdict = None
        # After Ctrl-C the ranks fail because they are ended: nothing to say.
        if verdict.code != INTERRUPTED or then:
            lines = [verdict.text] if verdict.text else []
            lines += [f"meshcomm: {line}" for line in (verdict.cause + then, *verdict.rest)]
            print("\n".join(lines), file=sys.stderr, flush=True)
        return verdict.code
