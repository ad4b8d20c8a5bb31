"""Every way in which processes can find each other, tried with real ones."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import meshcomm
from meshcomm.config import Config, MeshConfig, ProcessConfig
from meshcomm.testing import Pool

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def total(config: Any, **arguments: Any) -> list[int]:
    with meshcomm.init(config, **arguments) as mesh:
        x: list[int] = mesh.all_gather("dp", torch.tensor([mesh.rank])).tolist()
        return x


def mesh_of(process: ProcessConfig) -> Config:
    return Config(mesh=MeshConfig(dims={"dp": 4}, device="cpu", timeout_s=30), process=process)


def without_launcher() -> int:
    """What remains when nothing but the config says how to meet: the rank is told by the test."""
    rank = int(os.environ["RANK"])
    for name in (*LAUNCHER, "TORCHELASTIC_USE_AGENT_STORE"):
        os.environ.pop(name, None)
    return rank


def by_file(path: str) -> list[int]:
    rank = without_launcher()
    return total(mesh_of(ProcessConfig(init="file", path=path, rank=rank, world_size=4)))


def test_file(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(by_file, str(tmp_path / "rendezvous"), ranks=4) == [[0, 1, 2, 3]] * 4


def by_tcp(port: int) -> list[int]:
    rank = without_launcher()
    return total(mesh_of(ProcessConfig(init="tcp", address=f"127.0.0.1:{port}", rank=rank, world_size=4)))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def test_tcp(pool: Pool) -> None:
    assert pool.run(by_tcp, free_port(), ranks=4) == [[0, 1, 2, 3]] * 4


def by_store() -> list[int]:
    port = int(os.environ["MASTER_PORT"])
    rank = without_launcher()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    config = MeshConfig(dims={"dp": 4}, device="cpu", timeout_s=30)
    return total(config, store=dist.PrefixStore("mine", store), rank=rank, world_size=4)


def test_explicit_store(pool: Pool) -> None:
    assert pool.run(by_store, ranks=4) == [[0, 1, 2, 3]] * 4


def by_slurm(port: int) -> list[int]:
    rank = without_launcher()
    os.environ |= {
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": "4",
        "SLURM_LOCALID": str(rank),
        "SLURM_NNODES": "1",
        "SLURM_STEP_NODELIST": "localhost",
        "MASTER_PORT": str(port),
    }
    return total(MeshConfig(dims={"dp": 4}, device="cpu", timeout_s=30))


def test_slurm(pool: Pool) -> None:
    assert pool.run(by_slurm, free_port(), ranks=4) == [[0, 1, 2, 3]] * 4


def by_mpi(port: int) -> list[int]:
    rank = without_launcher()
    os.environ |= {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        "MASTER_PORT": str(port),
    }
    return total(MeshConfig(dims={"dp": 4}, device="cpu", timeout_s=30))


def test_mpi(pool: Pool) -> None:
    assert pool.run(by_mpi, free_port(), ranks=4) == [[0, 1, 2, 3]] * 4


def in_initialised() -> tuple[list[int], bool]:
    dist.init_process_group("gloo")
    seen = total(MeshConfig(dims={"dp": 4}, device="cpu", timeout_s=30))
    alive = dist.is_initialized()
    dist.destroy_process_group()
    return seen, alive


def test_an_initialised_torch_distributed_is_joined_and_left_alone(pool: Pool) -> None:
    assert pool.run(in_initialised, ranks=4) == [([0, 1, 2, 3], True)] * 4


def alone() -> list[int]:
    without_launcher()
    with meshcomm.init(dims={"dp": -1}, device="cpu") as mesh:
        x: list[int] = mesh.all_gather("dp", torch.tensor([mesh.rank])).tolist()
        return x


def test_a_single_process(pool: Pool) -> None:
    assert pool.run(alone, ranks=1) == [[0]]


def told_nothing() -> str:
    without_launcher()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "2"}
    try:
        meshcomm.init(dims={"dp": 2}, device="cpu")
    except meshcomm.MeshcommError as error:
        return str(error)
    return "nothing"


def test_nobody_to_meet(pool: Pool) -> None:
    assert pool.run(told_nothing, ranks=1) == [
        "rank 0 of 2 has no address at which to meet the others\n"
        "  given:    launcher torchrun, no MASTER_ADDR and MASTER_PORT\n"
        "  expected: MASTER_ADDR and MASTER_PORT in the environment, or [process] init and address\n"
        '  try:      [process] init = "tcp", address = "HOST:PORT" of rank 0; or start with torchrun'
    ]


def network() -> dict[str, str | None]:
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    config = {
        "mesh": {"dims": {"dp": 2}, "device": "cpu", "timeout_s": 30.0},
        "network": {"interfaces": ["lo"]},
    }
    with meshcomm.init(config) as mesh:
        inside = os.environ.get("GLOO_SOCKET_IFNAME")
        mesh.barrier("dp")
    return {"before": before, "inside": inside, "after": os.environ.get("GLOO_SOCKET_IFNAME")}


def test_network_settings_are_set_before_and_put_back_after(pool: Pool) -> None:
    assert pool.run(network, ranks=2) == [{"before": None, "inside": "lo", "after": None}] * 2


def two_values() -> str:
    try:
        network()
    except meshcomm.MeshcommError as error:
        return f"{type(error).__name__}: {error.what}"
    return "nothing"


def test_an_interface_that_is_set_twice_is_refused(pool: Pool) -> None:
    assert (
        pool.run(two_values, ranks=2, env={"GLOO_SOCKET_IFNAME": "eth7"})
        == ["LaunchError: GLOO_SOCKET_IFNAME is set twice, differently"] * 2
    )
