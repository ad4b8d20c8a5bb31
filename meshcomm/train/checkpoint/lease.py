"""The lease of a run's folder, so that two jobs never write into one `train.out`.

    <train.out>/lease.3.json    who writes here: user, host, process, job, since when, and when the lease was last renewed

The lease with the highest number counts. To take it over, a job creates the file with the next number, which the file system
lets only one process do. The holder checks its own file before each write, so a holder that has lost its lease stops.
"""

from __future__ import annotations

import contextlib
import errno
import getpass
import json
import os
import re
import threading
import time
import uuid
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Self, final

from meshcomm.errors import TrainingError
from meshcomm.mesh import Mesh
from meshcomm.mesh.all_ranks import is_first, of_every_rank, on_all_ranks
from meshcomm.rendezvous.processes import is_running, is_stopped, process_name
from meshcomm.train.checkpoint.folder import read
from meshcomm.train.run_files import check_folder

RENEWED_S: Final = 10.0
EXPIRES_S: Final = 60.0
"""The age after which a lease of another host may be taken over. Processes of this host are looked at instead."""

_NAME: Final = re.compile(r"lease\.(\d+)\.json")
# How long a file may be empty after its creation.
_WRITTEN_S: Final = 1.0
_PAUSE_S: Final = 0.05


@dataclass(frozen=True)
class Attempt:
    """The job that this process is part of, and how many times its launcher has restarted it.

    job: a unique name for the job, the same in all attempts; "" if unknown.
    """

    job: str = ""
    restarts: int = 0


def find_attempt(env: Mapping[str, str]) -> Attempt:
    """Return the attempt that the variables of torchrun or Slurm in `env` describe.

    A job that Slurm requeues keeps its job ID. torchrun and `meshcomm train` may choose a new name in each attempt.
    """
    counts = (env.get(name, "") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    restarts = sum(int(count) for count in counts if count.isdecimal())
    if job := env.get("SLURM_JOB_ID"):
        step = env.get("SLURM_STEP_ID")
        return Attempt(f"Slurm job {job}" + (f", step {step}" if step else ""), restarts)
    # torchrun's id is "none" if none was given.
    run = env.get("TORCHELASTIC_RUN_ID", "none")
    return Attempt("" if run == "none" else run, restarts)


class LeaseLost(TrainingError):
    """Another job, or a newer process of this job, has taken over the folder."""


@final
class Lease:
    """The right to write into `folder`, which the first rank of a mesh holds. Every rank has a Lease object.

    The right outlives a loss of ranks, also if another rank is then the first one. It ends with `release`, with the end of the
    process, or with this object.
    """

    def __init__(self, folder: Path, attempt: Attempt) -> None:
        self.folder, self._attempt = folder, attempt
        # The same on all ranks of the job.
        self._token = ""
        self._path: Path | None = None
        self._stop = threading.Event()
        self._end: weakref.finalize[..., Lease] | None = None

    def hold(self, mesh: Mesh) -> None:
        """Take the lease, or check that this job still holds it. Every rank calls this, before it writes.

        Raises TrainingError on every rank if another job holds the lease.
        """
        proposed = of_every_rank(mesh, [self._token, uuid.uuid4().hex])
        self._token = next((token for token, _ in proposed if token), proposed[0][1])

        def take() -> None:
            if is_first(mesh):
                self._take()
            else:
                # After a loss of ranks, another rank may be the first one. It takes over the file of this rank.
                self._let_go()

        on_all_ranks(mesh, f"write into {self.folder}", take)

    def check(self) -> None:
        """Raise LeaseLost if this rank has held the lease and holds it no longer."""
        if self._path is not None and _read(self._path).get("token") != self._token:
            path, facts = _newest(self.folder)[1:]
            raise LeaseLost(
                f"this job no longer holds the lease of {self.folder}",
                given=f"{path}: {_described(facts)}" if facts else f"{self._path} is gone",
                expected=f"the lease of this job, {self._path}",
                hint="start this job again with another train.out, or with train.resume = true once the other job has ended",
            )

    def release(self) -> None:
        """Let other jobs write into the folder."""
        if self._end is not None:
            self._end()
        self._let_go()

    def _let_go(self) -> None:
        self._stop.set()
        if self._end is not None:
            self._end.detach()
        self._path = self._end = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _take(self) -> None:
        if self._path is not None:
            # While this rank was outside the mesh, another rank of the job may have taken over its file.
            if _newest(self.folder)[2].get("token") != self._token:
                self.check()
            if _read(self._path):
                return
            self._let_go()
        check_folder(self.folder)
        while True:
            number, path, facts = _newest(self.folder)
            if number and (why := self._held(path, facts)):
                raise TrainingError(
                    f"another job writes into {self.folder}",
                    given=f"{path}: {_described(facts)}",
                    expected="one job at a time in train.out",
                    hint=f"set another train.out, or end that job first: {why}",
                )
            mine = self.folder / f"lease.{number + 1}.json"
            try:
                file = os.open(mine, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:
                continue
            facts = self._facts()
            _write(file, facts)
            # A job that was slow here may have created a number that was free again.
            if _newest(self.folder)[0] == number + 1:
                break
            os.close(file)
            mine.unlink()
        for lease_number, path in _leases(self.folder).items():
            if lease_number <= number:
                path.unlink(missing_ok=True)
        self._path, self._stop = mine, threading.Event()
        renewing = (file, facts, self._stop)
        threading.Thread(target=_renew, args=renewing, name="meshcomm-lease", daemon=True).start()
        self._end = weakref.finalize(self, _release, mine, self._token, os.getpid(), self._stop)

    def _facts(self) -> dict[str, str]:
        try:
            user = getpass.getuser()
        except (KeyError, OSError):
            user = f"with the number {os.getuid()}"
        # A launcher may start this job's ranks again, so the lease outlives this process for as long as its launcher runs.
        launcher = process_name(os.getppid()) if "TORCHELASTIC_RUN_ID" in os.environ else ""
        now = _text_of(time.time())
        who = {"user": user, "process": process_name(), "launcher": launcher, "job": self._attempt.job}
        return {**who, "since": now, "renewed": now, "token": self._token}

    def _held(self, path: Path, facts: Mapping[str, str]) -> str:
        """Return why the lease is still valid, as advice; "" if this job may take it over."""
        if facts and facts["token"] == self._token:
            return ""
        same = bool(facts and self._attempt.job and facts["job"] == self._attempt.job)
        runs = is_running(facts["process"]) if facts else None
        if runs:
            stopped = is_stopped(facts["process"])
            return f"its process {'is stopped, but has not ended' if stopped else 'runs on this host'}"
        if runs is not None:
            again = not same and bool(is_running(facts["launcher"]))
            return f"its launcher still runs, {facts['launcher']}" if again else ""
        if same and self._attempt.restarts:
            return ""
        age_s = time.time() - (_seconds_of(facts["renewed"]) if facts else path.stat().st_mtime)
        left_s = EXPIRES_S - age_s
        return f"if its host is gone, the lease expires in {left_s:.0f} s" if left_s > 0 else ""


def _leases(folder: Path) -> dict[int, Path]:
    return {
        int(name[1]): folder / name[0] for entry in os.listdir(folder) if (name := _NAME.fullmatch(entry))
    }


def _newest(folder: Path) -> tuple[int, Path, dict[str, str]]:
    """Return the number, the path and the content of the lease that counts; the number 0 if there is none."""
    leases = _leases(folder)
    number = max(leases, default=0)
    if not number:
        return 0, folder, {}
    until = time.monotonic() + _WRITTEN_S
    # The holder may be writing it.
    while not (facts := _read(leases[number])) and leases[number].exists() and time.monotonic() < until:
        time.sleep(_PAUSE_S)
    return (number, leases[number], facts) if leases[number].exists() else _newest(folder)


def _read(path: Path) -> dict[str, str]:
    """Return the content of a lease; {} if it is gone or incomplete."""
    try:
        facts: Any = json.loads(read(path))
    except ValueError:
        return {}
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return {}
        raise
    names = ("user", "process", "launcher", "job", "since", "renewed", "token")
    return facts if isinstance(facts, dict) and all(type(facts.get(name)) is str for name in names) else {}


def _described(facts: Mapping[str, str]) -> str:
    if not facts:
        return "a lease that says nothing"
    job = f", of {facts['job']}" if facts["job"] else ""
    age_s = max(0.0, time.time() - _seconds_of(facts["renewed"]))
    since = f"since {facts['since']}, renewed {age_s:.0f} s ago"
    return f"{facts['process']}, user {facts['user']}{job}, {since}"


def _text_of(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _seconds_of(text: str) -> float:
    with contextlib.suppress(ValueError):
        return datetime.fromisoformat(text).timestamp()
    return 0.0


def _write(file: int, facts: Mapping[str, str]) -> None:
    # All texts of one lease have the same length. The number of the file is kept, so a lost lease is never written over another.
    os.pwrite(file, (json.dumps(facts, indent=2) + "\n").encode(), 0)
    os.fsync(file)


def _renew(file: int, facts: Mapping[str, str], stop: threading.Event) -> None:
    while not stop.wait(RENEWED_S):
        with contextlib.suppress(OSError):
            _write(file, {**facts, "renewed": _text_of(time.time())})
    os.close(file)


def _release(path: Path, token: str, process: int, stop: threading.Event) -> None:
    if os.getpid() != process:
        return  # a fork of the holder
    stop.set()
    with contextlib.suppress(OSError):
        if _read(path).get("token") == token:
            path.unlink()
