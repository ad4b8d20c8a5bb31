"""Every way in which processes can meet, tried with real processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshcomm
from meshcomm.config import Config, MeshConfig, NetworkConfig, ProcessConfig
from meshcomm.errors import (
    CollectiveTimeout,
    CommunicationError,
    LaunchError,
    MeshcommError,
    MeshMismatchError,
)
from meshcomm.mesh import Mesh, agree
from meshcomm.mesh.agree import leave_together
from meshcomm.mesh.rank_failure import _speaks_first
from meshcomm.rendezvous.job_store import _elsewhere, find_job, find_tcp_store
from meshcomm.rendezvous.launcher import Launch
from meshcomm.rendezvous.meeting import meet
from meshcomm.rendezvous.processes import blame, claim, is_running, process_name
from meshcomm.testing import Pool
from meshcomm.transport.variables import network_variables
from meshcomm.watching.ending import failure_of, root_cause
from tests.forked_jobs import Job
from tests.ports import free_port
from tests.ranks import on_ranks

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def total(config: Any, **arguments: Any) -> list[int]:
    with meshcomm.init(config, **arguments) as mesh:
        x: list[int] = mesh.all_gather("dp", torch.tensor([mesh.rank])).tolist()
        return x


MESH = MeshConfig(dims={"dp": 2}, device="cpu", timeout_s=30)


def by_process(**keys: Any) -> list[int]:
    return total(Config(mesh=MESH, process=ProcessConfig(world_size=2, **keys)))


def alone(variables: dict[str, str] | None = None) -> int:
    """Set only `variables` of a launcher, so that these or the config determine how to meet. Return the rank, set by the test."""
    rank = int(os.environ["RANK"])
    for name in (*LAUNCHER, "TORCHELASTIC_USE_AGENT_STORE"):
        os.environ.pop(name, None)
    os.environ.update({name: value.replace("RANK", str(rank)) for name, value in (variables or {}).items()})
    return rank


def by_file(path: str, port: int) -> list[int]:
    return by_process(init="file", path=path, rank=alone())


def by_another_file(path: str, port: int) -> list[int]:
    """A restarted job uses a new file instead of the file that its first attempt left."""
    Path(path).write_bytes(b"what the first attempt left")
    os.environ |= {"GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "2"}
    return by_process(init="file", path=path, rank=int(os.environ["RANK"]))


def by_tcp(path: str, port: int) -> list[int]:
    return by_process(init="tcp", address=f"127.0.0.1:{port}", rank=alone())


def by_tcp_under_an_agent(path: str, port: int) -> list[int]:
    """The agent's store is at another address."""
    assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    return by_process(init="tcp", address=f"127.0.0.1:{port}", rank=int(os.environ["RANK"]))


def by_store(path: str, port: int) -> list[int]:
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    return total(MESH, store=dist.PrefixStore("mine", store), rank=alone(), world_size=2)


def by_arguments(path: str, port: int) -> list[int]:
    """As in Ray actors: the address is in the environment, as for `init_process_group(rank=..., world_size=...)`."""
    rank = alone({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    return total(MESH, rank=rank, world_size=2)


def by_slurm(path: str, port: int) -> list[int]:
    # The name cannot be resolved. On one node, no host has to be found.
    variables = {"SLURM_PROCID": "RANK", "SLURM_LOCALID": "RANK", "SLURM_NTASKS": "2", "SLURM_NNODES": "1"}
    alone(
        {
            **variables,
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": "nowhere.invalid",
            "MASTER_PORT": str(port),
        }
    )
    return total(MESH)


def by_mpi(path: str, port: int) -> list[int]:
    world = "OMPI_COMM_WORLD_"
    sizes = {f"{world}SIZE": "2", f"{world}LOCAL_SIZE": "2", "MASTER_PORT": str(port)}
    alone({f"{world}RANK": "RANK", f"{world}LOCAL_RANK": "RANK", **sizes})
    return total(MESH)


def in_initialised(path: str, port: int) -> list[int]:
    dist.init_process_group("gloo")
    seen = total(MESH)
    assert dist.is_initialized(), "it is left alone"
    dist.destroy_process_group()
    return seen


def in_initialised_by_another_launcher(path: str, port: int) -> list[int]:
    """As under Lightning's own launcher: half of torchrun's variables, and only torch knows the rank."""
    dist.init_process_group("gloo")
    rank = os.environ.pop("RANK")
    os.environ |= {"LOCAL_RANK": rank, "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    with meshcomm.init(MESH) as mesh:
        assert (mesh.rank, mesh.local_rank) == (int(rank), int(rank))
        seen: list[int] = mesh.all_gather("dp", torch.tensor([mesh.rank])).tolist()
    dist.destroy_process_group()
    return seen


WAYS = [
    by_file,
    by_another_file,
    by_tcp,
    by_tcp_under_an_agent,
    by_store,
    by_arguments,
    by_slurm,
    by_mpi,
    in_initialised,
    in_initialised_by_another_launcher,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_each_way_to_meet(pool: Pool, tmp_path: Path, way: Any) -> None:
    assert pool.run(way, str(tmp_path / "rendezvous"), free_port(), ranks=2) == [[0, 1]] * 2


def test_what_the_program_says_is_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    nobody = Launch("single", rank=0, world_size=1, local_rank=0, local_size=1)
    met = meet(ProcessConfig(), nobody, 5, store=dist.HashStore(), rank=1, world_size=2)
    assert (met.launch.kind, met.launch.rank, met.launch.world_size) == ("given", 1, 2)


def by_oneself() -> list[list[int]]:
    alone()
    process = ProcessConfig(init="tcp", address=f"127.0.0.1:{free_port()}", rank=0, world_size=1)
    given = total(Config(mesh=MeshConfig(dims={"dp": -1}, device="cpu"), process=process))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("multiprocessing.parent_process", lambda: None)
        return [given, total(MeshConfig(dims={"dp": -1}, device="cpu"))]


def test_a_single_process(pool: Pool) -> None:
    assert pool.run(by_oneself, ranks=1) == [[[0], [0]]]


def refused(dims: dict[str, int], variables: dict[str, str]) -> str:
    if "RANK" in os.environ:
        alone(variables)
    with pytest.raises(LaunchError) as caught:
        meshcomm.init(dims=dims, device="cpu")
    return str(caught.value)


IN_EACH = "try:      set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each process before init"


def test_nobody_to_meet(pool: Pool) -> None:
    (text,) = pool.run(refused, {"dp": 2}, {"RANK": "RANK", "WORLD_SIZE": "2"}, ranks=1)
    assert text.startswith("rank 0 of 2 has no address to meet the others at\n")
    assert 'process] init = "tcp", address = "HOST:PORT" of rank 0; or start with torchrun' in text
    # Processes of multiprocessing must not each open a mesh of one process.
    for text in pool.run(refused, {"dp": -1}, {}, ranks=2):
        assert text.startswith(
            "the number of processes is unknown, and dims = { dp = -1 } uses all of them\n"
        )
        assert IN_EACH in text


def test_a_process_that_no_launcher_started(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    dims = {"dp": -1, "tp": 4}
    (text,) = pool.run(refused, dims, {}, ranks=1)
    assert text.startswith("the mesh needs 4 processes, and no launcher has started this one\n")
    assert IN_EACH in text and "or init(rank=..., world_size=4, ...)" in text
    monkeypatch.setattr("multiprocessing.parent_process", lambda: None)
    for argv, script in ((["a/hello.py", "x.py"], "a/hello.py"), (["-c"], "script.py"), ([], "script.py")):
        monkeypatch.setattr(sys, "argv", argv)
        told = f"try:      torchrun --nproc-per-node 4 {script}; srun and mpirun work too"
        assert told in refused(dims, {})
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    simulated = "try:      meshcomm.simulate(function, dims={'dp': -1, 'tp': 4}): every rank is a thread"
    assert simulated in refused(dims, {})


def scattered(hosts: str, order: list[int] | None = None) -> tuple[int | None, list[str], list[str]]:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    rank = int(os.environ["RANK"])
    # The placement of `srun -m cyclic` on two hosts.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agree, "socket", SimpleNamespace(gethostname=lambda: hosts[rank]))
        dims = {"dp": 2, "tp": 2}
        with (
            warnings.catch_warnings(record=True) as caught,
            meshcomm.init(dims=dims, device="cpu", timeout_s=30, rank_order=order) as mesh,
        ):
            rows = [row.split() for row in str(mesh).splitlines()]
            links = [row[-1] for row in rows if row[1:2] == ["dim"] or row[:1] == ["node"]]
            return mesh.topology.ranks_per_node, links, [str(each.message) for each in caught]


def test_which_ranks_share_a_node_is_asked_of_the_ranks(pool: Pool) -> None:
    assert pool.run(scattered, "aabb", ranks=4) == [(2, ["network", "node", rank], []) for rank in "1133"]
    (first, *others) = pool.run(scattered, "abab", ranks=4)
    assert [first[:2], *others] == [
        (2, ["node", "network", "2"]),
        *((2, ["node", "network", r], []) for r in "323"),
    ]
    (warning,) = first[2]
    assert warning.startswith(
        "scattered-ranks: tp crosses nodes, because the ranks of a node are not consecutive\n"
    )
    assert "node 0: ranks 0 2; node 1: ranks 1 3" in warning
    assert warning.endswith("or mesh.rank_order = [0, 2, 1, 3]")
    # The rank order that the warning proposes.
    cured = pool.run(scattered, "abab", [0, 2, 1, 3], ranks=4)
    assert cured == [(2, ["network", "node", rank], []) for rank in "2323"]
    # In one half of the groups along either dim, ranks 2 3 and 1 3, all ranks share a node.
    assert pool.run(scattered, "abbb", ranks=4)[1][:2] == (3, ["50%", "50%", "3"])


def stale_file(path: str) -> str:
    with pytest.raises(LaunchError) as caught:
        meet(ProcessConfig(init="file", path=path, rank=alone(), world_size=2), SINGLE, 5)
    return str(caught.value)


SINGLE = Launch("single", 0, 1, 0, 1)


def test_a_file_of_an_earlier_job_is_refused(pool: Pool, tmp_path: Path) -> None:
    path = str(tmp_path / "rendezvous")
    # The same process may meet again.
    for _ in range(2):
        meet(ProcessConfig(init="file", path=path, rank=0, world_size=2), SINGLE, 5)
    _, ended = processes()
    path = f"{path}2"
    dist.FileStore(path, 2).set("meshcomm/process/0", ended)
    lines = pool.run(stale_file, path, ranks=1)[0].splitlines()
    assert lines[0] == f"the rendezvous file {path} was left by an earlier job"
    assert lines[1].startswith(f"  given:    rank 0 is in it as {ended}; ")
    assert lines[3] == f"  try:      rm {path}, or another process.path"


def network() -> list[str | None]:
    seen = [os.environ.get("GLOO_SOCKET_IFNAME")]
    config = {
        "mesh": {"dims": {"dp": 2}, "device": "cpu", "timeout_s": 30.0},
        "network": {"interfaces": ["lo"]},
    }
    with meshcomm.init(config) as mesh:
        seen.append(os.environ.get("GLOO_SOCKET_IFNAME"))
        mesh.barrier("dp")
    return [*seen, os.environ.get("GLOO_SOCKET_IFNAME")]


def test_network_settings_are_set_before_and_put_back_after(pool: Pool) -> None:
    assert pool.run(network, ranks=2) == [[None, "lo", None]] * 2


def test_an_interface_that_is_set_twice_is_refused(pool: Pool) -> None:
    for error in pool.run(network, ranks=2, env={"GLOO_SOCKET_IFNAME": "eth7"}, allow=True):
        assert isinstance(error, LaunchError)
        assert error.what == "GLOO_SOCKET_IFNAME is set twice, to different values"


# -- backends, and a default group that is there already ---------------------------------------------


def on_a_fake_group(backend: str | None) -> str:
    dist.init_process_group("fake", rank=0, world_size=4)
    try:
        with meshcomm.init(dims={"dp": 4}, device="cpu", backend=backend, timeout_s=5) as mesh:
            mesh.all_reduce("dp", torch.ones(1))
            return mesh.plan.defaults.backend
    except meshcomm.MeshcommError as error:
        return error.what
    finally:
        dist.destroy_process_group()


def test_the_backend_of_the_default_group_is_followed(pool: Pool) -> None:
    assert pool.run(on_a_fake_group, None, ranks=1, timeout_s=30) == ["fake"]
    refused = ["torch's default group uses the fake backend: the other ranks do not exist"]
    assert pool.run(on_a_fake_group, "gloo", ranks=1, timeout_s=30) == refused


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has what is missing elsewhere")
def test_the_missing_part_of_a_composite_backend_is_named() -> None:
    with pytest.raises(
        LaunchError,
        match=r"this (torch has no backend|host has no cuda device for the backend) nccl\n"
        r"  given:    cpu:gloo,cuda:nccl for the default group",
    ):
        meshcomm.init(
            dims={"dp": 1},
            device="cpu",
            backend="cpu:gloo,cuda:nccl",
            store=dist.HashStore(),
            rank=0,
            world_size=1,
        )
    assert not dist.is_initialized()


DIFFERS = """
import os, sys, meshcomm
size = 4 if os.environ["RANK"] == "2" else 2
try:
    meshcomm.init(dims={"a": size, "b": -1}, device="cpu", timeout_s=60)
except meshcomm.MeshcommError as error:
    print(type(error).__name__, error.what)
"""


def test_rank_0_keeps_the_store_until_all_know_why_they_differ(pool: Pool, tmp_path: Path) -> None:
    # Rank 0 hosts the store, as in env:// without torchrun, and its program ends with the error.
    env = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        Job(pool, tmp_path, "-c", DIFFERS, env={**env, "RANK": str(rank)}, name=f"{rank}-")
        for rank in range(4)
    ]
    said = [rank.finish()[1] for rank in ranks]
    assert said == ["MeshMismatchError the mesh differs between ranks: rank 2 of 4 is mismatched\n"] * 4


@pytest.mark.parametrize(
    ("sizes", "blamed", "given"),
    [
        ((2, 4), "ranks 0 1 do not agree", "rank 1: dp = 4; rank 0: 2"),
        ((4, 2, 4, 2), "ranks 0 1 2 3 do not agree", "ranks 1 3: dp = 2; ranks 0 2: 4"),
        ((4, 2, 2, 2), "rank 0 of 4 is mismatched", "rank 0: dp = 4; the others: 2"),
    ],
)
def test_without_a_majority_no_rank_is_blamed(sizes: tuple[int, ...], blamed: str, given: str) -> None:
    store, ranks = dist.HashStore(), range(len(sizes))

    def told(rank: int) -> MeshMismatchError:
        with pytest.raises(MeshMismatchError) as caught:
            agree.agree(store, rank, ranks, {"dp": sizes[rank]}, 20.0)
        return caught.value

    with ThreadPoolExecutor(len(sizes)) as threads:
        errors = list(threads.map(told, ranks, timeout=30))
    named = (0,) if "is mismatched" in blamed else tuple(ranks)
    for error in errors:
        assert error.what == f"the mesh differs between ranks: {blamed}"
        assert (error.given, error.mismatched_ranks) == (given, named)


def test_a_rank_that_holds_the_store_leaves_last() -> None:
    store = dist.HashStore()
    store.add("come", 3)  # one of them has died before it announced itself
    for rank in range(2):
        store.append("here", f"{rank} fingerprint 4 host\n")
    threading.Timer(0.3, lambda: leave_together(store, stays=False)).start()
    began = time.monotonic()
    leave_together(store, stays=True)
    assert store.add("left", 0) == 2 and time.monotonic() - began < 2.0


# -- two processes of one rank ----------------------------------------------------------------------


def name_of(process: int) -> str:
    started = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    mine = process_name()
    assert f"process {os.getpid()} of " in mine
    return (
        mine.replace(f"process {os.getpid()} of ", f"process {process} of ").rpartition(" ")[0]
        + f" {started}"
    )


def processes() -> tuple[str, str]:
    """The name of a running process, and the name of one that has ended."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        ended = name_of(other.pid)
        assert is_running(ended)
    return name_of(os.getppid()), ended


def twice(store: Any, first: str, kept: bool) -> str:
    store.set("meshcomm/owner/1", first)
    try:
        claim(store, 1, kept=kept)
    except LaunchError as error:
        assert store.get("meshcomm/owner/1").decode() == first
        return str(error)
    assert store.get("meshcomm/owner/1").decode() == process_name()
    return "taken over"


def test_a_rank_that_comes_twice(tmp_path: Path) -> None:
    running, ended = processes()
    assert is_running(process_name())
    assert is_running(running)
    assert is_running(ended) is False
    elsewhere = "process 7 of another-host, started at 1"
    assert is_running(elsewhere) is None
    stores = {
        "TCPStore": dist.PrefixStore("job", dist.TCPStore("127.0.0.1", 0, is_master=True)),
        "HashStore": dist.HashStore(),
        "FileStore": dist.FileStore(str(tmp_path / "store"), 2),
    }
    for kind, store in stores.items():
        missing = MeshMismatchError("rank 2 never arrived", given="ranks 0 1", expected="", hint="")
        missing.missing = (2,)
        blame(missing, store)
        assert (missing.given, missing.mismatched_ranks) == ("ranks 0 1", ()), kind
        # The same process claims its rank again: it opens several meshes, at once or in turn.
        for _ in range(2):
            claim(store, 1, kept=False)
        # The rank of an ended process is claimed again, as by an agent or script that restarts the rank.
        assert twice(store, ended, kept=False) == twice(store, ended, kept=True) == "taken over", kind
        assert twice(store, elsewhere, kept=True) == "taken over", kind
        for first, kept in ((running, True), (elsewhere, False)):
            text = twice(store, first, kept)
            assert text.startswith("rank 1 exists twice: another process has already claimed rank 1"), kind
            assert f"{first}\n            {process_name()} (this one)" in text, kind
        blame(missing, store)
        assert missing.mismatched_ranks == (1,), kind
        assert missing.missing == (2,), kind
        # The note about the ended process is ignored, because that process no longer owns the rank.
        assert missing.given == f"ranks 0 1\nrank 1 exists twice: {elsewhere}; and {process_name()}", kind


def test_a_rank_that_comes_twice_by_file(tmp_path: Path) -> None:
    path = str(tmp_path / "rendezvous")
    running, _ = processes()
    file = dist.FileStore(path, 2)
    file.set("meshcomm/process/0", running)
    with pytest.raises(LaunchError, match=f"rank 0 exists twice.*\n *given: *{running}\n"):
        meet(ProcessConfig(init="file", path=path, rank=0, world_size=2), SINGLE, 5)


def test_ranks_that_come_after_the_timeout_say_the_same_as_the_others() -> None:
    """The texts must be equal, because a launcher prints an error that many ranks have only once."""
    world, store = range(12), dist.HashStore()
    said = []
    for rank in world:
        # Each rank arrives after the ranks before it have given up.
        with pytest.raises(MeshMismatchError) as caught:
            agree.agree(store, rank, world, {}, 0.05)
        said.append(caught.value)
    assert {error.what for error in said} == {
        "ranks 1 2 3 4 .. 11 (11) of 12 never arrived to agree on the mesh"
    }
    for rank, error in enumerate(said):
        assert error.missing == tuple(range(1, 12))
        late = f"rank {rank} has arrived since, after the others had given up"
        assert (late in str(error.given)) is (rank > 0) and ("longer timeout_s" in str(error.hint)) is (
            rank > 0
        )
    # Of twelve equal errors, the launcher prints one, and one line for the others.
    failures = [failure_of(error, rank, f"rank {rank}") for rank, error in enumerate(said)]
    root, others = root_cause(failures, 12, "rank {}".format)
    assert (
        "11 (11) of 12 never arrived" in root.what
        and others[0] == "ranks 1-11: the same"
        and len(others) == 2
    )


# -- an address where something else is -------------------------------------------------------------


def test_a_program_that_says_nothing_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(
            TimeoutError,
            match=r"^a program listens, but no torch store answers: another program has the port, or",
        ):
            find_tcp_store("127.0.0.1", port, hosts=False, timeout=timedelta(seconds=0.1))
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("meshcomm.mesh.rank_failure._ASK_S", 0.0)
        assert _speaks_first(Launch("torchrun", 1, 2, 1, 2, "127.0.0.1", port), 0.0)


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


RETURNS_LATE = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from meshcomm.rendezvous.store import within

class Slow:
    # A program's object that takes long to go: Python shuts down meanwhile.
    def __del__(self, sleep=time.sleep):
        sleep(0.9)

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
sys.slow = Slow()
try:
    within(0.01, lambda: store.wait(["never"], timedelta(seconds=0.5)))
except TimeoutError as error:
    sys.exit(str(error))
"""


@pytest.mark.faults
def test_a_call_that_returns_while_python_shuts_down_aborts_nothing() -> None:
    ended = subprocess.run([sys.executable, "-c", RETURNS_LATE], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and "no answer within 0.01 s" in ended.stderr, ended.stderr


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"backend": "glo"},
            'this installation of torch has no backend glo\n.*one of gloo.*mesh.backend = "gloo"',
        ),
        ({"backend": "ucc"}, 'no backend ucc\n.*a torch that was built with ucc.*mesh.backend = "auto"'),
        (
            {"config": {"mesh": {"dims": {"dp": 1}, "device": "cpu"}, "network": {"interfaces": ["none7"]}}},
            r"this host has no interface none7\n.*none7 in \[network\] interfaces\n.*remove it from \[network\]",
        ),
        (
            # The name resembles nccl, but this device has no nccl.
            {"options": {"dp": {"backend": "ncl"}}},
            r'no backend ncl\n.*ncl for dp.*one of gloo, fake\n.*mesh\.options\.dp\.backend = "auto"',
        ),
        ({"options": {"dp": {"backend": "nonsense"}}}, "this installation of torch has no backend nonsense"),
        ({"world_size": "2"}, "world_size is not an integer: '2'"),
        ({"rank": True}, "rank is not an integer: True"),
        ({"store": 5}, "not a torch store: 5"),
        ({"config": {"mesh": {"dims": {"dp": 1}}}, "overrides": 5}, "overrides must be strings"),
    ],
)
def test_what_cannot_be_met_by(given: dict[str, Any], said: str) -> None:
    with pytest.raises(MeshcommError, match=f"(?s){said}"):
        meshcomm.init(**given if "config" in given else {"dims": {"dp": 1}, "device": "cpu", **given})
    assert not dist.is_initialized()


def test_what_cannot_be_created_by() -> None:
    with meshcomm.init(dims={"dp": 1, "tp": 1}, device="cpu") as mesh:
        with pytest.raises(LaunchError, match="this installation of torch has no backend nonsense"):
            mesh.create_group("both", ("dp", "tp"), backend="nonsense")
        mesh.create_group("both", ("dp", "tp"), backend="gloo")


def test_a_store_that_ends_while_the_default_group_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise dist.DistNetworkError("Connection reset by peer")

    monkeypatch.setattr("meshcomm.mesh.groups.default_store", lost)
    with pytest.raises(CommunicationError, match=r"(?s)could not start torch's default group.*reset by peer"):
        meshcomm.init(dims={"dp": 1}, device="cpu")
    assert not dist.is_initialized()


# -- torch's backends, levels of debugging, errors and launcher -------------------------------------------------


@on_ranks(2)
def test_a_registered_backend_and_one_named_by_device() -> None:
    def make(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    dist.Backend.register_backend("mine", make, devices=["cpu"])
    dims = {"dp": 2}
    with meshcomm.init(dims=dims, device="cpu", backend="mine", timeout_s=30) as mesh:
        assert mesh.all_reduce("dp", torch.ones(2)).tolist() == [2.0, 2.0]
        assert mesh.plan.defaults.backend == "mine"
    of_device = {"dp": {"backend": "cpu:gloo"}}
    with meshcomm.init(dims=dims, device="cpu", options=of_device, timeout_s=30) as mesh:
        assert mesh.all_reduce("dp", torch.ones(2)).tolist() == [2.0, 2.0]
        assert mesh.plan.family("dp").options.backend == "cpu:gloo"


def in_detail() -> list[float]:
    with meshcomm.init(dims={"dp": 2, "tp": 2}, device="cpu", timeout_s=30) as mesh:
        dist.set_debug_level(dist.DebugLevel.INFO)
        x = mesh.all_reduce("dp", torch.ones(1))
        y = mesh.shift("tp", x)
        assert y is not None
        return [x.item(), y.item()]


def test_torchs_own_checks_may_be_on(pool: Pool) -> None:
    environment = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_SHOW_CPP_STACKTRACES": "1"}
    assert pool.run(in_detail, ranks=4, env=environment) == [[2.0, 2.0]] * 4


@pytest.mark.faults
@pytest.mark.mesh(
    dp=2, via="gloo", timeout_s=12, not_via={"emulated_nccl": "a receive that gives up stays queued"}
)
def test_what_torch_raised_is_the_cause(mesh: Mesh) -> None:
    """torch's DistError and its subclasses are RuntimeErrors. Our errors name the place and rank, with torch's as cause."""
    for kind in (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError):
        assert issubclass(kind, RuntimeError) and issubclass(kind, dist.DistError)
    rank, nowhere = mesh.rank, ProcessConfig(init="tcp", address="127.0.0.1:1", rank=1, world_size=2)
    with pytest.raises(CollectiveTimeout) as caught:
        mesh.irecv("dp", torch.zeros(1), src=1 - rank).wait(timeout_s=0.2)
    assert caught.value.what.startswith(f'recv from {1 - rank} along "dp" on rank {rank} (dp={rank})')
    assert isinstance(caught.value.__cause__, (RuntimeError, OSError))
    with pytest.raises(LaunchError, match="rank 1 of 2 could not meet the others at ") as unmet:
        meet(nowhere, Launch("single", 1, 2, 1, 2), 0.2)
    assert isinstance(unmet.value.__cause__, (RuntimeError, OSError))


def test_interfaces_and_sockets_become_variables() -> None:
    network = NetworkConfig(
        interfaces=("eth0", "eth1"),
        nccl_debug="INFO",
        nccl_debug_subsys=("INIT", "NET"),
        nccl_socket_nthreads=4,
        nccl_nsocks_perthread=2,
    )
    assert network_variables(network) == {
        "GLOO_SOCKET_IFNAME": "eth0,eth1",
        "NCCL_SOCKET_IFNAME": "=eth0,eth1",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET",
        "NCCL_SOCKET_NTHREADS": "4",
        "NCCL_NSOCKS_PERTHREAD": "2",
    }


JOB = """\
import socket
import sys
import torch
import meshcomm


def work(index, config):
    with meshcomm.init(config | {"process": config["process"] | {"rank": index}}) as mesh:
        x = mesh.all_gather("dp", torch.tensor([mesh.rank]))
        # One write: both ranks have one pipe, and print may write its newline apart.
        sys.stdout.write(f"{mesh.label}: {x.tolist()}\\n")
        sys.stdout.flush()


with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
process = {"init": "tcp", "address": f"127.0.0.1:{port}", "world_size": 2}
config = {"mesh": {"dims": {"dp": -1}, "device": "cpu", "timeout_s": 60.0}, "process": process}
torch.multiprocessing.start_processes(work, (config,), nprocs=2, start_method="fork")
"""


def test_torchs_spawn(pool: Pool, tmp_path: Path) -> None:
    """Uses start_processes with fork, because forked children need no second import. torchrun: tests/job/test_reaper.py."""
    code, out, err = Job(pool, tmp_path, "-c", JOB).finish()
    assert code == 0, err
    assert sorted(out.splitlines()) == ["rank 0 (dp=0): [0, 1]", "rank 1 (dp=1): [0, 1]"]


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
