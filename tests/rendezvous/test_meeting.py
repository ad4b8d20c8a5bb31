"""Every way in which processes can meet, tried with real processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshcomm
from meshcomm.config import Config, MeshConfig, ProcessConfig
from meshcomm.errors import CollectiveTimeout, CommunicationError, LaunchError, MeshcommError
from meshcomm.mesh import Mesh
from meshcomm.mesh.rank_failure import _speaks_first
from meshcomm.rendezvous.job_store import find_tcp_store
from meshcomm.rendezvous.launcher import Launch
from meshcomm.rendezvous.meeting import meet
from meshcomm.rendezvous.processes import is_running, process_name
from meshcomm.testing import Pool
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
    # Another test may have loaded it.
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    for argv, script in ((["a/hello.py", "x.py"], "a/hello.py"), (["-c"], "script.py"), ([], "script.py")):
        monkeypatch.setattr(sys, "argv", argv)
        told = f"try:      torchrun --nproc-per-node 4 {script}; srun and mpirun work too"
        assert told in refused(dims, {})
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    simulated = "try:      meshcomm.simulate(function, dims={'dp': -1, 'tp': 4}): every rank is a thread"
    assert simulated in refused(dims, {})


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
