"""What a mesh takes from torch as it comes: backends, levels of debugging, errors, launchers. On Gloo processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshcomm
from meshcomm.config import NetworkConfig, ProcessConfig
from meshcomm.errors import CollectiveTimeout, LaunchError
from meshcomm.mesh import Mesh
from meshcomm.mesh.environment import Launch, network_variables
from meshcomm.mesh.rendezvous import meet
from meshcomm.testing import Pool
from tests.forked_jobs import Job
from tests.ranks import on_ranks

# -- backends, levels of debugging, errors ----------------------------------------------------------


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


@pytest.mark.parametrize("level", ["INFO", "DETAIL"])
def test_torchs_own_checks_may_be_on(pool: Pool, level: str) -> None:
    environment = {"TORCH_DISTRIBUTED_DEBUG": level, "TORCH_SHOW_CPP_STACKTRACES": "1"}
    assert pool.run(in_detail, ranks=4, env=environment) == [[2.0, 2.0]] * 4


@pytest.mark.mesh(
    dp=2, via="gloo", timeout_s=12, not_via={"emulated_nccl": "a receive that gives up stays queued"}
)
def test_what_torch_raised_is_the_cause(mesh: Mesh) -> None:
    """DistError and its kinds are RuntimeErrors; ours say where and which rank, and keep torch's behind them."""
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


# -- interfaces and devices -------------------------------------------------------------------------


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


# -- torch's own launcher of processes --------------------------------------------------------------

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
    """By its general form, as forked children need no second import. torchrun: tests/launch/test_orphans.py."""
    code, out, err = Job(pool, tmp_path, "-c", JOB).finish()
    assert code == 0, err
    assert sorted(out.splitlines()) == ["rank 0 (dp=0): [0, 1]", "rank 1 (dp=1): [0, 1]"]
