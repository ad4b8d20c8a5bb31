"""Follow the processes of a job: replace those that are lost, until all have completed or one has failed for good."""

from __future__ import annotations

import math
import os
import secrets
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from math import prod
from typing import Any, Final

from meshcomm.config import Config
from meshcomm.errors import MeshcommError, parts_of
from meshcomm.job.replacing import Replacing
from meshcomm.layout.sizes import rank_text, ranks_text
from meshcomm.mesh.source import with_sizes
from meshcomm.rendezvous.generation import VARIABLE
from meshcomm.rendezvous.meeting import of_this_attempt
from meshcomm.rendezvous.processes import is_claimed
from meshcomm.rendezvous.signed import SECRET_VARIABLE, SignedStore
from meshcomm.watching.ending import Failure, root_cause, without_error

# How long to wait for the original error after errors that it may have caused.
_CAUSE_S: Final = 5.0
STORE_TIMEOUT: Final = timedelta(seconds=60)
LOOPBACK: Final = "127.0.0.1"

Label = Callable[[int, Mapping[str, int]], str]
"""A function that names a rank with its coords. It receives the mesh's sizes if they differ from the configuration."""


def labels_of(settings: Config | None, world_size: int) -> Label:
    """Return the function that names the ranks of a job with this configuration, if it has one."""

    def label(rank: int, dims: Mapping[str, int]) -> str:
        if settings is not None:
            with suppress(MeshcommError):
                layout = with_sizes(settings, dims).layout(prod(dims.values()) if dims else world_size)
                return rank_text(rank, layout.coords(rank))
        return rank_text(rank, None)

    return label


class Supervisor(ABC):
    """The processes of a job, each identified by its initial rank. A subclass starts and ends them.

    replacing: the policy for lost processes.
    running: the processes that have been started and not seen ended.
    completed: the processes that have ended with exit code 0. saved: those that were asked to end, and have saved their state.
    common: the environment variables of all processes.
    cause: the root cause as plain data, once it is told; see `told`.
    """

    def __init__(self, replacing: Replacing, label: Label) -> None:
        self.replacing, self.label = replacing, label
        self.running: set[int] = set()
        self.completed: set[int] = set()
        self.saved: set[int] = set()
        self.common: dict[str, str] = {}
        self.cause: dict[str, Any] = {}

    @abstractmethod
    def start(self, process: int) -> None:
        """Start a process in place of a lost one, and call `Replacing.started`."""

    @abstractmethod
    def look(self) -> dict[int, Failure]:
        """Wait for a moment. Return how the processes that have failed meanwhile ended."""

    @abstractmethod
    def end(self, process: int) -> None:
        """End what is left of a lost process, which must not run at the same time as the process that replaces it."""

    @abstractmethod
    def forget_errors(self, process: int) -> None:
        """Remove the errors that a lost process has left. The process that replaces it has the same number."""

    def loses_nothing(self, failure: Failure) -> bool:
        """Return whether all work is done, so that the end of a process that did not fail by itself loses nothing.

        The process then counts as completed.
        """
        if not self.replacing.has_ended:
            return False
        print(f"meshcomm: {failure.summary} after the end; nothing is lost", file=sys.stderr, flush=True)
        self.completed.add(failure.rank)
        return True

    def explained(self, failures: Mapping[int, Failure]) -> dict[int, Failure]:
        """Return the failures with the errors that the ranks have reported until now."""
        return dict(failures)

    def raised(self) -> Mapping[int, Failure]:
        """Return the errors that were seen on completed processes, as in a thread."""
        return {}

    def expects_cause(self, failures: Collection[Failure]) -> bool:
        """Return whether a rank that has not ended may report the cause of these failures."""
        return all(failure.follows for failure in failures)

    def hopeless(self) -> Mapping[int, Failure]:
        """Return the failures of processes that cannot be replaced for a reason of the launcher's own."""
        return {}

    def name(self, process: int) -> str:
        """Return the name of a process, by its rank in the current mesh."""
        places = self.replacing.places
        if process in places.processes:
            return self.label(places.processes.index(process), places.dims)
        return self.label(process, {})

    def meet_at(self, address: str, port: int, run: str, store: Any = None) -> None:
        """Set the variables that say where the processes meet. run: the job's name. store: the launcher's own store at this
        address; None if rank 0 serves it, so that lost ranks cannot be replaced.
        """
        secret = secrets.token_hex(16)
        self.common |= {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": run,
            SECRET_VARIABLE: secret,
        }
        self.common.pop(VARIABLE, None)
        if store is not None:
            self.common["TORCHELASTIC_USE_AGENT_STORE"] = "True"
            if self.replacing.is_elastic:
                # After a loss, torch's store prints a C++ trace from each rank.
                self.common.setdefault("TORCH_CPP_LOG_LEVEL", os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"))
                self.common[VARIABLE] = "0"
                self.replacing.store = SignedStore(of_this_attempt(store, self.common), secret)

    def follow(self) -> dict[int, Failure]:
        """Wait until all processes of the mesh have completed, or one has failed and is not replaced. Return the failures."""
        replacing, failures, until = self.replacing, dict[int, Failure](), math.inf
        while True:
            for process in replacing.starts():
                self.start(process)
            lost = self.look()
            hung = {process: what for process, what in replacing.hung().items() if process in self.running}
            for process, what in hung.items():
                killed = without_error(process, -signal.SIGKILL, time.time(), self.name)
                lost[process] = replace(killed, what=what)
            explained = self.explained(lost) if lost else {}
            for process in hung:
                # Before a new generation is announced: the process may go on, and would meet the others in it.
                self.end(process)
                if self.loses_nothing(lost[process]):
                    del lost[process]
            members = {*replacing.places.processes}
            completed = (self.completed | self.saved) & members
            replaced = (
                not failures
                and bool(lost)
                and replacing.lost({process: explained[process] for process in lost}, bool(completed))
            )
            if replaced:
                for process in lost:
                    self.end(process)
                    self.forget_errors(process)
                continue
            lost |= {process: explained[process] for process in hung if process in lost}
            if lost and not failures:
                until = time.monotonic() + _CAUSE_S
            failures |= lost
            if failures:
                explained = self.explained(failures)
                waits = self.expects_cause([explained[process] for process in failures])
                if not waits or time.monotonic() > until or not self.running & members:
                    return failures
                continue
            if in_vain := replacing.unmet(completed) or self.hopeless():
                return {**in_vain}
            if completed == members:
                return {}
            replacing.lose_patience()
            replacing.grow(bool(completed))

    def told(self, failures: Mapping[int, Failure], end: str = "") -> tuple[int, str]:
        """Return the job's exit code, and the lines that name the root cause of `failures` and what followed.

        `cause` is then the error as in `parts_of`, with the rank, its name, its line and these lines. Called after all processes have ended. end: the end of the line about the root cause.
        """
        replacing, members = self.replacing, self.replacing.places.processes
        failures = self.explained(failures)
        if all(failure.follows for failure in failures.values()):
            # Processes whose loss the others have not recovered from.
            failures = {**replacing.recent, **failures}
        # In the current mesh, as in the ranks' own messages.
        ranks = {process: rank for rank, process in enumerate(members)}
        failed = [
            replace(failure, rank=ranks[process]) for process, failure in failures.items() if process in ranks
        ]
        ended = sorted(ranks[process] for process in self.completed & {*members})
        root, consequences = root_cause(
            failed or failures.values(),
            len(members),
            (lambda rank: self.name(members[rank])) if failed else self.name,
            ended,
            {ranks[process]: error for process, error in self.raised().items() if process in ranks},
        )
        # Why the job ended instead of continuing.
        if replacing.is_elastic and ended and root.rank not in ended:
            # If a loss was announced, no rank had completed before.
            completed = (
                "completed without mesh.elastic.reopen" if replacing.recent else "had already completed"
            )
            consequences.append(
                f"{ranks_text(ended)} {completed}, so new processes can no longer meet all ranks"
            )
        if by_loss := sorted(failure.rank for failure in failed if failure.what.startswith("RankLost")):
            way = "a program continues with mesh.elastic.reopen(error), and a Trainer continues automatically"
            consequences.append(f"{ranks_text(by_loss)} ended by RankLost: {way}")
        if replacing.number and not any(
            is_claimed(replacing.store, process) for process in range(replacing.places.count)
        ):
            consequences.append(
                "no rank had opened a mesh: only a Trainer, or a program that reopens its mesh, can continue"
            )
        lines = [root.summary + end, *consequences]
        error = (
            root.error if root.raised and root.error else parts_of(MeshcommError(root.what)) | {"type": None}
        )
        self.cause = {**error, "rank": root.rank, "name": root.who, "at": root.frame or None, "lines": lines}
        text = [root.text] if root.text else []
        return root.code, "\n".join([*text, *(f"meshcomm: {line}" for line in lines)])
