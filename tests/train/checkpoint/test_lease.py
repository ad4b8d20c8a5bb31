"""Only one job writes into `train.out`, in every order of starting, and if a holder is killed, stopped, or on another host."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import meshcomm
from meshcomm.errors import MeshcommError, TrainingError
from meshcomm.rendezvous.processes import process_name
from meshcomm.testing import Pool
from meshcomm.train import Attempt, Callback, Checkpoints, run
from meshcomm.train.checkpoint import lease
from meshcomm.train.checkpoint.lease import EXPIRES_S, Lease, LeaseLost, find_attempt
from tests.train.checkpoint.test_checkpoints import TWO, content, tiny
from tests.train.checkpoint.test_writer import lock, settings


def _serve(pipe: Connection, folder: Path, job: str, env: dict[str, str]) -> None:
    """Make the lease of a folder. Then call each method of it whose name comes through the pipe, and send the outcome."""
    os.environ.update(env)
    with meshcomm.init(dims={"one": 1}) as mesh:
        made = Lease(folder, Attempt(job))
        pipe.send("ready")
        while True:
            word = pipe.recv()
            try:
                getattr(made, word)(*([mesh] if word == "hold" else []))
                pipe.send("done")
            except TrainingError as error:
                pipe.send(f"{type(error).__name__} {' '.join(str(error).split())}")


@dataclass
class Holder:
    """Another process that may hold the lease."""

    process: BaseProcess
    pipe: Connection

    def __call__(self, word: str) -> str:
        """Call a method of its lease, and return the outcome."""
        self.pipe.send(word)
        return str(self.pipe.recv())


@pytest.fixture(autouse=True)
def _torch_is_loaded_once(pool: Pool) -> None:
    """Holders are forked from the server of the pool."""


@contextmanager
def holder(folder: Path, job: str = "", **env: str) -> Iterator[Holder]:
    ours, theirs = Pipe()
    process = get_context("forkserver").Process(target=_serve, args=(theirs, folder, job, env), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.recv() == "ready"
        yield Holder(process, ours)
    finally:
        process.kill()
        process.join()
        ours.close()


def hold(folder: Path, attempt: Attempt | None = None) -> Lease:
    with meshcomm.init(dims={"one": 1}) as mesh:
        made = Lease(folder, attempt or Attempt())
        made.hold(mesh)
        return made


def facts_in(folder: Path) -> dict[str, str]:
    (path,) = folder.glob("lease.*.json")
    found: dict[str, str] = json.loads(path.read_text())
    return found


def test_a_second_job_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    with holder(tmp_path, "Slurm job 7") as first:
        assert first("hold") == "done"
        (path,) = tmp_path.iterdir()
        with pytest.raises(TrainingError, match=f"another job writes into {tmp_path}") as caught:
            hold(tmp_path)
        given = caught.value.given or ""
        assert given.startswith(f"{path}: process {first.process.pid} of {socket.gethostname()}, started at ")
        assert ", user " in given and ", of Slurm job 7, since 20" in given and ", renewed " in given
        assert caught.value.hint == (
            "set another train.out, or end that job first: its process runs on this host"
        )
        # The first job has noticed nothing, and holds the lease again without a delay.
        assert first("check") == first("hold") == "done"
        assert first("release") == "done" and not [*tmp_path.iterdir()]
        made = hold(tmp_path)
        assert "LeaseLost" not in first("hold") and first("hold").startswith("TrainingError another job")
        made.release()
        assert first("hold") == "done"


def test_of_two_that_start_at_the_same_moment_one_wins(tmp_path: Path) -> None:
    """One wins even if all find the same lease of a process that has ended."""
    with holder(tmp_path) as gone:
        gone("hold")
    begun = [holder(tmp_path) for _ in range(3)]
    tells = [each.__enter__() for each in begun]
    try:
        for number in range(5):
            for each in tells:
                each.pipe.send("hold")
            said = [each.pipe.recv().split()[0] for each in tells]
            assert sorted(said) == ["TrainingError", "TrainingError", "done"], (number, said)
            winner = tells[said.index("done")]
            assert winner("check") == "done"
            assert facts_in(tmp_path)["process"].startswith(f"process {winner.process.pid} of")
            if number % 2:
                winner("release")
            else:
                winner.process.kill()
                winner.process.join()
                again = holder(tmp_path)
                begun[tells.index(winner)].__exit__(None, None, None)
                begun[tells.index(winner)], tells[tells.index(winner)] = again, again.__enter__()
    finally:
        for each in begun:
            each.__exit__(None, None, None)


def test_the_lease_of_a_killed_job_is_taken_over(tmp_path: Path) -> None:
    with holder(tmp_path) as first:
        assert first("hold") == "done"
    assert len([*tmp_path.iterdir()]) == 1
    made = hold(tmp_path)
    assert facts_in(tmp_path)["process"] == process_name()
    # The next number: a slow starter that saw the old one cannot create it again.
    assert [path.name for path in tmp_path.iterdir()] == ["lease.2.json"]
    made.release()


def test_a_stopped_job_keeps_its_lease(tmp_path: Path) -> None:
    with holder(tmp_path) as first:
        assert first("hold") == "done"
        os.kill(first.process.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 5
        while True:
            with pytest.raises(TrainingError, match="another job writes") as caught:
                hold(tmp_path)
            if "its process is stopped, but has not ended" in (caught.value.hint or ""):
                break
            assert time.monotonic() < deadline
        os.kill(first.process.pid, signal.SIGCONT)
        assert first("check") == "done"


def of_another_host(folder: Path, age_s: float, job: str = "", launcher: str = "") -> Path:
    """A lease as written by a process of another host."""
    at = lease._text_of(time.time() - age_s)
    who = {
        "user": "ann",
        "process": "process 5 of elsewhere, started at 9",
        "launcher": launcher,
        "job": job,
    }
    path = folder / "lease.4.json"
    path.write_text(json.dumps({**who, "since": at, "renewed": at, "token": "another"}, indent=2))
    return path


def test_the_lease_of_another_host_expires(tmp_path: Path) -> None:
    of_another_host(tmp_path, EXPIRES_S - 20)
    with pytest.raises(TrainingError, match="another job writes") as caught:
        hold(tmp_path)
    assert "process 5 of elsewhere, started at 9, user ann, since" in (caught.value.given or "")
    assert "if its host is gone, the lease expires in " in (caught.value.hint or "")
    of_another_host(tmp_path, EXPIRES_S + 5)
    made = hold(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lease.5.json"]
    made.check()
    made.release()


def test_a_restart_keeps_the_lease_of_its_job(tmp_path: Path) -> None:
    """On another host, the job's name decides. On this host, the process must have ended; its launcher may be starting it again."""
    of_another_host(tmp_path, 0, "Slurm job 7")
    for attempt in (Attempt("Slurm job 8", 1), Attempt("Slurm job 7", 0), Attempt("", 1)):
        with pytest.raises(TrainingError, match="another job writes"):
            hold(tmp_path, attempt)
    hold(tmp_path, Attempt("Slurm job 7", 1)).release()
    with holder(tmp_path, "job 1", TORCHELASTIC_RUN_ID="x") as first:
        assert first("hold") == "done"
        launcher = process_name(psutil.Process(first.process.pid).ppid())
    with pytest.raises(TrainingError, match="another job writes") as caught:
        hold(tmp_path, Attempt("job 2", 1))
    assert f"its launcher still runs, {launcher}" in (caught.value.hint or "")
    hold(tmp_path, Attempt("job 1", 1)).release()


def test_a_job_that_has_lost_its_lease_stops(tmp_path: Path) -> None:
    """While the job was stopped for long, a job of another host has taken over."""
    made = hold(tmp_path)
    made.check()
    (own,) = tmp_path.iterdir()
    other = of_another_host(tmp_path, 0)
    own.unlink()
    with pytest.raises(LeaseLost, match=f"this job no longer holds the lease of {tmp_path}") as caught:
        made.check()
    assert (caught.value.given or "").startswith(f"{other}: process 5 of elsewhere, started at 9, user ann")
    # The job would renew its own old file only, and it releases nothing.
    before = other.read_text()
    made.release()
    assert other.read_text() == before and [*tmp_path.iterdir()] == [other]


def test_a_rank_that_was_outside_the_mesh_takes_the_lease_back(tmp_path: Path) -> None:
    with (
        meshcomm.init(dims={"one": 1}) as mesh,
        Lease(tmp_path, Attempt()) as first,
        Lease(tmp_path, Attempt()) as second,
    ):
        first.hold(mesh)
        # A smaller mesh does not include that rank, so another rank of the job is the first one.
        second._token = first._token
        second.hold(mesh)
        with pytest.raises(LeaseLost):
            first.check()
        first.hold(mesh)
        first.check()
        with pytest.raises(LeaseLost):
            second.check()
    assert not list(tmp_path.iterdir())


def test_a_lease_is_renewed_and_read_by_people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEWED_S", 0.05)
    made = hold(tmp_path, Attempt("job 1"))
    began = facts_in(tmp_path)
    assert began["job"] == "job 1" and began["since"] == began["renewed"]
    deadline = time.monotonic() + 10
    while (now := facts_in(tmp_path))["renewed"] == began["renewed"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert {**now, "renewed": began["renewed"]} == began
    made.release()
    assert not [*tmp_path.iterdir()]


def test_a_lease_that_says_nothing_is_one_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_WRITTEN_S", 0.1)
    path = tmp_path / "lease.1.json"
    path.write_text("{")
    with pytest.raises(TrainingError, match="another job writes"):
        hold(tmp_path)
    os.utime(path, (0, time.time() - EXPIRES_S - 5))
    hold(tmp_path).release()


# -- a run ------------------------------------------------------------------------------------------------


class Intrudes(Callback):
    """Another job takes the folder over while a checkpoint is written, or just before."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.before: dict[str, bytes] = {}

    def on_save(self, step: int, folder: Path) -> None:
        if not self.before and self.trainer.mesh.rank == 0:
            (own,) = self._folder.glob("lease.*.json")
            of_another_host(self._folder, 0)
            own.unlink()
            self.before = files(self._folder)


def files(folder: Path) -> dict[str, bytes]:
    """All files except a draft, which a job removes when it starts here."""
    return {name: value for name, value in content(folder).items() if ".saving" not in name}


def intruded(config: Any) -> tuple[str, bool]:
    folder = Path(config.train.out)
    callback = Intrudes(folder)
    try:
        with meshcomm.init(config) as mesh:
            run(mesh, config, callback)
    except MeshcommError as error:
        return str(error), mesh.rank > 0 or files(folder) == callback.before
    return "", False


@pytest.mark.parametrize(
    ("more", "saved"),
    [
        # Only the first rank writes metrics.
        ((), ["step-000002"]),
        (("train.log_every=100",), ["step-000002"]),
        (("train.log_every=100", "train.checkpoint_async=true"), []),
    ],
)
def test_a_run_that_has_lost_its_folder_writes_nothing_more(
    pool: Pool, tmp_path: Path, more: tuple[str, ...], saved: list[str]
) -> None:
    """The run writes no metrics, no run.json and no checkpoint."""
    config = tiny(tmp_path / "run", TWO, "train.checkpoint_every=2", *more)
    (first, unchanged), (second, _) = pool.run(intruded, config, ranks=2)
    assert "no longer holds the lease" in first and "no longer holds the lease" in second and unchanged
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*[0-9]"))
    assert names == saved


def begun(config: Any) -> str:
    with meshcomm.init(config) as mesh:
        try:
            run(mesh, config, Callback())
        except TrainingError as error:
            return str(error)
    return "trained"


def test_a_run_into_the_folder_of_a_living_one_changes_nothing(pool: Pool, tmp_path: Path) -> None:
    out = tmp_path / "run"
    config = tiny(out, TWO, "train.checkpoint_every=5")
    assert pool.run(begun, config, ranks=2) == ["trained"] * 2
    assert not [*out.glob("lease.*")]
    with holder(out) as other:
        assert other("hold") == "done"
        before = content(out)
        for resume in ("false", "true"):
            for said in pool.run(begun, tiny(out, TWO, f"train.resume={resume}"), ranks=2):
                assert f"another job writes into {out}" in said
        assert content(out) == before
        assert other("release") == "done"
    assert pool.run(begun, config, ranks=2) == ["trained"] * 2


def saved_twice(train: Any) -> list[str]:
    """In a user's own loop, `Checkpoints` holds the folder from `begin` on, or from the first save."""
    said = []
    with meshcomm.init(dims={"one": 1}) as mesh:
        with Checkpoints(mesh, train) as checkpoints:
            checkpoints.begin(Attempt(), lock(0))
            with holder(Path(train.out)) as other:
                said.append(other("hold"))
            checkpoints.save(lock(1), {"w": torch.ones(2)})
        with holder(Path(train.out)) as other:
            said.append(other("hold"))
            with Checkpoints(mesh, train) as checkpoints, pytest.raises(TrainingError) as caught:
                checkpoints.save(lock(2), {"w": torch.ones(2)})
            said.append(str(caught.value))
    return said


def test_checkpoints_in_a_loop_of_ones_own(tmp_path: Path) -> None:
    first, second, third = saved_twice(settings(tmp_path / "run"))
    assert first.startswith("TrainingError another job") and second == "done" and "another job" in third
    assert not (tmp_path / "run" / "checkpoints" / "step-000002.saving").exists()


SLURM = {"SLURM_JOB_ID": "7"}


AGENT = {"TORCHELASTIC_RUN_ID": "x1", "TORCHELASTIC_RESTART_COUNT": "1"}


@pytest.mark.parametrize(
    ("env", "attempt"),
    [
        ({}, Attempt("", 0)),
        ({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "2"}, Attempt("", 2)),
        ({"TORCHELASTIC_RUN_ID": "x1", "TORCHELASTIC_RESTART_COUNT": "1"}, Attempt("x1", 1)),
        # A requeued job keeps its number, but a torchrun in its script gets a new name.
        ({**SLURM, "SLURM_STEP_ID": "0"}, Attempt("Slurm job 7, step 0", 0)),
        ({**SLURM, "SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "2"}, Attempt("Slurm job 7, step 0", 2)),
        ({**SLURM, **AGENT, "SLURM_RESTART_COUNT": "2"}, Attempt("Slurm job 7", 3)),
    ],
)
def test_the_launcher_says_which_attempt_this_is(env: dict[str, str], attempt: Attempt) -> None:
    assert find_attempt(env) == attempt
