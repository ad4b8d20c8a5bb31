"""Two jobs at once on one host: the ranks of each job meet, or the error names the other job."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest
import torch.distributed as dist

from meshcomm.errors import LaunchError
from meshcomm.rendezvous.exposure import serve_on_loopback
from meshcomm.rendezvous.job_store import _elsewhere, find_job, find_tcp_store, ports_of
from meshcomm.testing import Pool
from tests.forked_jobs import Job
from tests.ports import free_port

pytestmark = pytest.mark.long

_TWO: Final = range(2)
_SHORT: Final = timedelta(seconds=2)

ADDS_UP = """
import os, sys, meshcomm, torch
tag = float(os.environ["TAG"])
try:
    with meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=30) as mesh:
        found = {mesh.all_reduce("dp", torch.tensor([tag])).item() for _ in range(5)}
    # In one piece, as both ranks write to one pipe.
    print(f"{found == {2 * tag} or f'{found} for {tag}'}\\n", end="")
except meshcomm.MeshcommError as error:
    print(error)
"""

# Like MPICH's mpirun: a process on the host starts the ranks, and does not name the job.
MPIRUN = """
import os
for rank in range(2):
    if os.fork() == 0:
        os.environ.update(PMI_RANK=str(rank), PMI_SIZE="2", MPI_LOCALRANKID=str(rank), MPI_LOCALNRANKS="2")
        exec(os.environ["PROGRAM"])
        sys.stdout.flush()
        os._exit(0)
for rank in range(2):
    os.wait()
"""

# A rank of a job that a user starts by hand: it adds up until the file "enough" exists, for at most 20 seconds.
BY_HAND = """
import os, time, meshcomm, torch
tag = float(os.environ["TAG"])
with meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=float(os.environ.get("TIMEOUT_S", 30))) as mesh:
    print("open", flush=True)
    for _ in range(200):
        found = mesh.all_reduce("dp", torch.tensor([tag])).item()
        if mesh.objects.broadcast("dp", os.path.exists("enough"), src=0):
            break
        time.sleep(0.1)
    print("right" if found == 2 * tag else f"{found} for {tag}", flush=True)
"""

# Like a script that starts both ranks of its job.
BOTH_RANKS = """
import os, sys
for rank in range(2):
    if os.fork() == 0:
        os.environ["RANK"] = str(rank)
        exec(os.environ["PROGRAM"])
        os._exit(0)
sys.exit(max(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(2)))
"""


def open_mpi(job: int, rank: int) -> Mapping[str, str]:
    world = "OMPI_COMM_WORLD_"
    sizes = {f"{world}SIZE": "2", f"{world}LOCAL_SIZE": "2", "PMIX_NAMESPACE": f"1329{job}"}
    return {**sizes, f"{world}RANK": str(rank), f"{world}LOCAL_RANK": str(rank)}


def intel_mpi(job: int, rank: int) -> Mapping[str, str]:
    sizes = {
        "PMI_SIZE": "2",
        "MPI_LOCALNRANKS": "2",
        "I_MPI_HYDRA_UUID": f"9d260000-7c26-e807-8fb4-05000043{job}",
    }
    return {**sizes, "PMI_RANK": str(rank), "MPI_LOCALRANKID": str(rank)}


def slurm_steps(job: int, rank: int) -> Mapping[str, str]:
    step = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": str(job), "SLURM_STEP_NUM_NODES": "1", "SLURM_NNODES": "1"}
    return {**step, "SLURM_NTASKS": "2", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}


def flux(job: int, rank: int) -> Mapping[str, str]:
    sizes = {"FLUX_JOB_SIZE": "2", "FLUX_JOB_NNODES": "1", "FLUX_JOB_ID": f"f{job}", "PMI_SIZE": "2"}
    return {**sizes, "FLUX_TASK_RANK": str(rank), "FLUX_TASK_LOCAL_ID": str(rank), "PMI_RANK": str(rank)}


def torchrun(job: int, rank: int) -> Mapping[str, str]:
    """Two runs at one endpoint."""
    sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    return {**sizes, **ranks, "TORCHELASTIC_RUN_ID": f"run{job}"}


def outputs(pool: Pool, folder: Path, variables: Any, more: Mapping[str, str]) -> list[str]:
    """The output of the ranks of two jobs, started so that rank 0 of the first job first meets rank 1 of the second."""
    jobs = {
        (job, rank): Job(
            *(pool, folder, "-c", ADDS_UP),
            env={**variables(job, rank), "TAG": str(10**job), **more},
            name=f"{job}.{rank}-",
        )
        for job, rank in ((0, 0), (1, 1), (1, 0), (0, 1))
    }
    return [job.finish()[1].strip() for _, job in sorted(jobs.items())]


@pytest.mark.parametrize(
    "variables", [open_mpi, intel_mpi, slurm_steps, flux, torchrun], ids=lambda v: v.__name__
)
def test_two_jobs_at_once(pool: Pool, tmp_path: Path, variables: Any) -> None:
    agent = serve_on_loopback("127.0.0.1", 0, timedelta(seconds=60))
    assert agent is not None
    more = {"MASTER_PORT": str(agent.port)} if variables is torchrun else {}
    assert outputs(pool, tmp_path, variables, more) == ["True"] * 4


def test_two_jobs_at_once_whose_launcher_does_not_name_them(pool: Pool, tmp_path: Path) -> None:
    jobs = [
        Job(pool, tmp_path, "-c", MPIRUN, env={"PROGRAM": ADDS_UP, "TAG": str(10**job)}, name=f"{job}-")
        for job in _TWO
    ]
    assert [job.finish()[1].split() for job in jobs] == [["True"] * 2] * 2


@pytest.mark.faults
def test_two_jobs_that_are_given_one_port_name_each_other(pool: Pool, tmp_path: Path) -> None:
    # The first job has the port. Both ranks of the second job raise, and they leave nothing in the first one's store.
    port = free_port()
    first, second = (f"Slurm step 17.{job}" for job in _TWO)
    store = find_job("127.0.0.1", [port], first, 0, 2, _SHORT)
    for rank in _TWO:
        with pytest.raises(LaunchError, match="another job uses this address") as caught:
            find_job("127.0.0.1", [port], second, rank, 2, _SHORT)
        given = caught.value.given
        assert f"127.0.0.1:{port}: the store of {first}, whose rank 0 is process {os.getpid()} of " in given
        assert f"\nthis is {second}" in given
    assert [key for key in ("meshcomm/owner/0", "meshcomm/owner/1") if store.check([key])] == []
    # Through init, the error is the same.
    said = outputs(pool, tmp_path, slurm_steps, {"MASTER_PORT": str(port)})
    assert (
        len(
            [text for text in said if f": the store of {first}" in text and "this is Slurm step 17.1" in text]
        )
        == 2
    )


def by_hand(job: int, port: int) -> dict[str, str]:
    """The variables that a user sets by hand; they do not tell two jobs apart."""
    ranks = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**ranks, "TAG": str(10**job)}


def test_mixed_ranks_of_jobs_without_a_name_all_end_in_the_error(pool: Pool, tmp_path: Path) -> None:
    port = free_port()

    def start(job: int, rank: int, timeout_s: str) -> Job:
        env = {**by_hand(job, port), "RANK": str(rank), "TIMEOUT_S": timeout_s}
        return Job(pool, tmp_path, "-c", BY_HAND, env=env, name=f"{job}.{rank}-")

    mixed = [start(0, 0, "30"), start(1, 1, "30")]
    mixed[1].until_printed("open")
    # The second of these ranks may find that the store of the first job is gone.
    late = [start(0, 1, "3"), start(1, 0, "3")]
    ended = [job.finish() for job in (*mixed, *late)]
    assert all(code != 0 and out in ("", "open\n") for code, out, _ in ended), ended
    errors = [err for _, _, err in ended]
    assert any("the ranks of both jobs may be mixed" in err for err in errors[:2]), errors
    assert any(f"process {job.pid} of " in err for job in late for err in errors[:2]), errors
    assert all("Error: " in err for err in errors), errors


def test_a_job_that_has_all_its_ranks_goes_on_when_another_one_comes(pool: Pool, tmp_path: Path) -> None:
    port = free_port()

    def start(job: int) -> Job:
        env = {**by_hand(job, port), "PROGRAM": BY_HAND}
        return Job(pool, tmp_path, "-c", BOTH_RANKS, env=env, name=f"{job}-")

    first = start(0)
    first.until_printed("open")
    code, out, err = start(1).finish()
    assert (code, out) == (1, "") and "another job uses this address" in err and "rank 1 exists twice" in err
    (tmp_path / "enough").touch()
    code, out, err = first.finish()
    assert (code, out.count("open"), out.count("right")) == (0, 2, 2), (out, err)


@pytest.mark.faults
def test_a_port_that_another_job_or_program_has_is_passed_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ports = [free_port(), silent.getsockname()[1], free_port()]
        held = [find_job("127.0.0.1", ports[:1], "another job", 0, 2, _SHORT)]
        held.append(find_job("127.0.0.1", ports, "mine", 0, 2, timedelta(seconds=30)))
        assert held[1].port == ports[2]
        held[1].set("from", "rank 0")
        found = find_job("127.0.0.1", ports, "mine", 1, 2, timedelta(seconds=30))
        assert (found.port, found.get("from"), found.timeout) == (ports[2], b"rank 0", timedelta(seconds=30))
        # Another mesh of the same process uses the server that it already has.
        assert find_job("127.0.0.1", ports, "mine", 0, 2, timedelta(seconds=30)).port == ports[2]
        # If every port is taken, each one is named.
        for rank in _TWO:
            with pytest.raises(LaunchError) as caught:
                find_job("127.0.0.1", ports[:2], "mine", rank, 2, _SHORT)
            assert f"{ports[0]}: the store of another job, whose rank 0 is process " in caught.value.given
            assert (
                f"{ports[1]}: a program listens, but no torch store answers: another program has the port, or "
                in caught.value.given
            )


def test_a_further_mesh_keeps_the_server_of_the_first() -> None:
    port = free_port()
    first = find_job("127.0.0.1", [port], "mine", 0, 2, _SHORT)
    second = find_job("127.0.0.1", [port], "mine", 0, 2, _SHORT)
    del first
    second.set("key", "value")
    assert find_job("127.0.0.1", [port], "mine", 1, 2, _SHORT).get("key") == b"value"


def test_stores_that_take_long_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of torch's store waits for the name server, for 5 s and more if none answers."""
    ports = [free_port(), free_port()]
    made = dist.TCPStore

    def late(*given: Any, **more: Any) -> dist.TCPStore:
        time.sleep(0.7)
        return made(*given, **more)

    first = find_job("127.0.0.1", ports[1:], "mine", 0, 2, _SHORT)
    monkeypatch.setattr(dist, "TCPStore", late)
    for name, value in {"_ANSWERS_S": 0.1, "_GRACE_S": 0.1, "_SILENT_S": 0.1}.items():
        monkeypatch.setattr(f"meshcomm.rendezvous.job_store.{name}", value)
    first.set("key", "value")
    assert find_job("127.0.0.1", ports[1:], "mine", 0, 2, _SHORT).get("key") == b"value"
    assert find_job("127.0.0.1", ports, "mine", 1, 2, timedelta(seconds=30)).get("key") == b"value"


def test_a_store_of_torch_is_no_job_of_meshcomm() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(
        LaunchError, match=f"127.0.0.1:{store.port}: a store of torch that belongs to no meshcomm job"
    ):
        find_job("127.0.0.1", [store.port], "mine", 1, 2, _SHORT)
    assert not store.check(["meshcomm/owner/1"])


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun on the PATH")
@pytest.mark.faults
def test_two_jobs_of_the_mpirun_of_this_host(tmp_path: Path) -> None:
    script = tmp_path / "adds_up.py"
    script.write_text(ADDS_UP)
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment = {**os.environ, **allowed, "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMP_NUM_THREADS": "1"}
    jobs = [
        subprocess.Popen(
            ["mpirun", "-n", "2", sys.executable, str(script)],
            env={**environment, "TAG": str(10**job)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for job in _TWO
    ]
    assert [job.communicate(timeout=100)[0].split() for job in jobs] == [["True"] * 2] * 2


def test_what_is_wrong_with_an_address_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshcomm.rendezvous.job_store._UNKNOWN_S", 0.3)
    short = timedelta(seconds=0.4)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        taken, free = silent.getsockname()[1], free_port()
        for host, port, agents, said in (
            ("127.0.0.1", free, False, "no program listens there\n"),
            ("127.0.0.1", free, True, "no program listens there\n"),
            ("127.0.0.1", taken, False, "a program listens, but no torch store answers: another program"),
            ("127.0.0.1", taken, True, "a program listens, but no torch store answers: another program"),
            ("host.invalid", free, False, "the name host.invalid is unknown: .*\n *for 0.3 s\n"),
            ("host.invalid", free, True, "the name host.invalid is unknown: .*\n *for 0.3 s\n"),
        ):
            with pytest.raises(LaunchError, match=f"given: +{host}:{port}: {said}") as caught:
                find_job(host, [port], "", 1, 2, short, agents=agents)
            assert ("another program has the port" in str(caught.value)) is (port == taken)
        with pytest.raises(LaunchError, match="a program listens, but no torch store answers"):
            find_job("127.0.0.1", [taken], "", 0, 2, short)
        # The name cannot be resolved, not even on the host of rank 0.
        with pytest.raises(LaunchError, match=r"this host does not know the name host\.invalid\n"):
            find_job("host.invalid", [free], "", 0, 2, timedelta(seconds=30))
    # An address reserved for documentation, which no host has.
    assert _elsewhere("192.0.2.7") == "; 192.0.2.7 is not an address of this host, where rank 0 runs"
    assert _elsewhere("127.0.0.1") == ""


def test_a_name_may_appear_while_a_rank_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    port, resolve, asked = free_port(), socket.getaddrinfo, []

    def appears(host: Any, *given: Any, **more: Any) -> Any:
        if host != "rank-0.job":
            return resolve(host, *given, **more)
        asked.append(host)
        if len(asked) < 4:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve("127.0.0.1", *given, **more)

    store = find_job("127.0.0.1", [port], "", 0, 2, timedelta(seconds=30))
    monkeypatch.setattr(socket, "getaddrinfo", appears)
    monkeypatch.setattr(
        "meshcomm.rendezvous.job_store.find_tcp_store",
        lambda host, *given, **more: find_tcp_store("127.0.0.1", *given, **more),
    )
    assert find_job("rank-0.job", [port], "", 1, 2, timedelta(seconds=30)).port == store.port
    assert len(asked) == 4


@pytest.mark.parametrize("rank", [0, 1])
def test_a_port_whose_program_never_answers_is_told_to_each_rank(rank: int) -> None:
    """The hint to look for rank 0 is only in the errors of the other ranks."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(LaunchError, match=f"rank {rank} of 2 could not meet the others at ") as unmet:
            find_job("127.0.0.1", [port], "a job", rank, 2, timedelta(seconds=0.3))
    hint = unmet.value.hint or ""
    assert hint.startswith("check whether rank 0 is running" if rank else "look which program has the port")
    assert f"ss -ltnp 'sport = :{port}'" in hint


def test_each_job_looks_at_other_ports() -> None:
    first, second = (ports_of(f"Slurm step 7.{step}") for step in (0, 1))
    assert first == ports_of("Slurm step 7.0")
    assert first != second
    # Operating systems use ports from 32768 on for outgoing connections.
    assert all(20_000 <= port < 32_000 for port in (*first, *second))
