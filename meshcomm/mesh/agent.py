"""torch's elastic agent for one host: on the loopback alone, and it ends what will not end by itself."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, final

import torch.distributed as dist
from torch.distributed.elastic.agent.server import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.launcher.api import LaunchConfig

from meshcomm.errors import LaunchError
from meshcomm.mesh.exposure import serve_on_loopback

_LOOPBACK: Final = "127.0.0.1"
_MEET: Final = timedelta(seconds=60)

# What ranks get between being asked to end and SIGKILL, unless torch's own variable says otherwise.
_GRACE_S: Final = 10
_GRACE_VARIABLE: Final = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


@final
class LoopbackRendezvous(RendezvousHandler):
    """One agent, and for each attempt a new store that only this host reaches.

    The stores of torch's own handlers listen on every address, and keep the keys of the attempts
    before.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._server: dist.TCPStore | None = None

    def get_backend(self) -> str:
        """The name of this kind of rendezvous."""
        return "meshcomm-loopback"

    @property
    def use_agent_store(self) -> bool:
        """The ranks use the agent's store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """A new store at a port that the system chooses. Raises LaunchError where there is none."""
        self._server = serve_on_loopback(_LOOPBACK, 0, _MEET)
        if self._server is None:
            raise LaunchError(
                f"no store can listen on {_LOOPBACK}",
                given=f"no free port of {_LOOPBACK}, or too many open files",
                expected="a free port, chosen by the system",
                hint="meshcomm doctor shows the limits of this host",
            )
        store = dist.PrefixStore("agent", self._server)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(_LOOPBACK, self._server.port))

    def is_closed(self) -> bool:
        """Never: there is nobody else to close it."""
        return False

    def set_closed(self) -> None:
        """Nothing: there is nobody else to tell."""

    def num_nodes_waiting(self) -> int:
        """0: no other agent will come."""
        return 0

    def get_run_id(self) -> str:
        """What makes this job unique."""
        return self._run_id

    def shutdown(self) -> bool:
        """Let go of the store."""
        self._server = None
        return True


@final
class Agent(LocalElasticAgent):
    """LocalElasticAgent that knows who failed first, and waits for nobody who cannot end.

    torch documents the methods that begin with an underscore as those for agents of one's own.

    Args:
        folder: the job's own, whose name is the run's id; torch's agent makes a folder for logs in it,
            which stays empty, and leaves it behind.
        failed: called when all ranks of a failed attempt have ended, with the exit codes (negative:
            signals) of those that had ended by themselves, and the time when all were last alive.
        restarts: called before the ranks are started again, with the number of the restart.
    """

    def __init__(
        self,
        command: list[str],
        world_size: int,
        max_restarts: int,
        folder: Path,
        failed: Callable[[Mapping[int, int], float], None],
        restarts: Callable[[int], None],
    ) -> None:
        run_id = folder.name
        # Where ranks are bound to cores beside their GPU, and where they write, is torch's own choice.
        logs = DefaultLogsSpecs(log_dir=str(folder / "logs"))
        usual = LaunchConfig(1, 1, world_size, run_id=run_id, rdzv_backend="c10d", logs_specs=logs)
        spec = WorkerSpec(
            role=usual.role,
            local_world_size=world_size,
            rdzv_handler=LoopbackRendezvous(run_id),
            entrypoint=sys.executable,
            args=tuple(command),
            max_restarts=max_restarts,
            local_addr=_LOOPBACK,
            **_known(WorkerSpec, numa_options=getattr(usual, "numa_options", None)),
        )
        self._grace_s = _GRACE_S if _GRACE_VARIABLE not in os.environ else usual.shutdown_timeout or 0
        super().__init__(
            spec=spec,
            logs_specs=logs,
            start_method=usual.start_method,
            **_known(LocalElasticAgent, shutdown_timeout=self._grace_s),
        )
        self._failed = failed
        self._restarts = restarts
        self._restarted = 0
        self._alive_at = time.time()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # torch reaps, and then waits half a minute for ranks that are stopped or will not end.
        looked = time.time()
        codes = {worker.global_rank: exit_code(worker.id) for worker in worker_group.workers}
        ended = {rank: code for rank, code in codes.items() if code}
        if ended:
            self._end(worker_group, signal.SIGTERM)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            self._failed(ended or _unasked(result), self._alive_at)
        self._alive_at = looked
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._restarted += 1
        self._restarts(self._restarted)
        super()._restart_workers(worker_group)
        self._alive_at = time.time()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._end(self.get_worker_group(), death_sig)
        super()._shutdown(death_sig, timeout)

    def _end(self, worker_group: WorkerGroup, how: signal.Signals) -> None:
        if not hasattr(os, "waitid"):
            return
        pids = [worker.id for worker in worker_group.workers if worker.id is not None]
        # Only processes that have not been reaped: the number of another may have been given away.
        for pid in filter(_runs, pids):
            _signal_group(pid, how)
            # One that is stopped takes the signal when it goes on.
            _signal_group(pid, signal.SIGCONT)
        deadline = time.monotonic() + self._grace_s
        while any(map(_runs, pids)) and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in filter(_runs, pids):
            _signal_group(pid, signal.SIGKILL)


def _unasked(result: RunResult) -> dict[int, int]:
    """The exit codes of ranks that torch has not asked to end, as far as they tell."""
    codes = {rank: int(failure.exitcode) for rank, failure in result.failures.items()}
    return {rank: code for rank, code in codes.items() if code != -signal.SIGTERM} or codes


def exit_code(pid: int) -> int | None:
    """The exit code of a child of this process, negative for a signal; the child stays to be reaped.

    None while it runs, once it has been reaped, and where the system cannot tell.
    """
    if not hasattr(os, "waitid"):
        return None
    try:
        state = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if state is None:
        return None
    return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status


def _runs(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def _signal_group(pid: int, how: signal.Signals) -> None:
    # A rank leads a process group of its own; one that was just forked does not yet.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, how)


def _known(made: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Those arguments that this version of torch knows."""
    names = inspect.signature(made).parameters
    return {name: value for name, value in arguments.items() if name in names}
