"""The device of this process, and errors before a group exists. The GPUs are patched in."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import meshcomm
from meshcomm.comm import Communicator
from meshcomm.config.mesh import MeshConfig
from meshcomm.errors import LaunchError, MeshcommError, ShapeError
from meshcomm.mesh.desync import period_s
from meshcomm.mesh.devices import check_host, choose_device, refuse_shared
from meshcomm.mesh.source import MeshOnly
from meshcomm.mesh.watchdog import look_interval_s
from meshcomm.rendezvous.launcher import Launch, find_launch
from meshcomm.testing import Pool
from meshcomm.transport import ProcessGroupTransport
from meshcomm.transport.variables import nccl_defaults


def pretend(
    patch: pytest.MonkeyPatch, visible: int, current: int = 0, uuid: Callable[[], str] = lambda: "GPU-0"
) -> None:
    """Show `visible` GPUs to this process; the program has already selected `current`."""
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: visible)
    patch.setattr(torch.cuda, "is_initialized", lambda: current > 0)
    patch.setattr(torch.cuda, "current_device", lambda: current)
    patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuid()))


SLURM = {"RANK": "5", "WORLD_SIZE": "8", "SLURM_LOCALID": "1"}
MPI = {"RANK": "5", "WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}


@pytest.mark.parametrize(
    ("env", "visible", "current", "index"),
    [
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}, 4, 0, 3),
        (SLURM, 4, 0, 1),
        (MPI, 4, 0, 2),
        ({"RANK": "5", "WORLD_SIZE": "8"}, 1, 0, 0),  # one visible device per process
        (SLURM, 1, 0, 0),
        ({"RANK": "5", "WORLD_SIZE": "8"}, 4, 2, 2),  # after torch.cuda.set_device(2)
    ],
)
def test_the_device_is_the_local_rank_s_or_the_program_s(
    env: dict[str, str], visible: int, current: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, visible, current)
    assert choose_device("auto", find_launch(env)) == torch.device("cuda", index)


def test_what_no_rank_could_use_is_refused_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may register a backend or a device that torch does not know; it is not looked for."""

    def check(**keys: Any) -> None:
        check_host(MeshOnly(MeshConfig(dims={"dp": -1}, **keys)), 4)

    check(device="cpu", backend="mine")
    check(device="mine")
    with pytest.raises(LaunchError, match="torch has no backend mpi"):
        check(device="cpu", backend="mpi")
    if not torch.cuda.is_available():
        with pytest.raises(LaunchError, match="this host has no cuda device"):
            check(device="cuda")
    pretend(monkeypatch, visible=4)
    check(device="cuda", backend="nccl")
    pretend(monkeypatch, visible=2)
    with pytest.raises(LaunchError, match=r"4 ranks on a host with 2 cuda device"):
        check(device="cuda", backend="nccl")


def test_without_a_local_rank_nobody_guesses_among_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, visible=4)
    with pytest.raises(LaunchError, match="which of 4 cuda devices is for this process") as refused:
        choose_device("auto", find_launch({"RANK": "5", "WORLD_SIZE": "8"}))
    assert "rank 5 of 8" in refused.value.given and "LOCAL_RANK" in refused.value.expected


def test_the_default_group_s_device_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, visible=4)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr("meshcomm.mesh.devices.bound_device", lambda: torch.device("cuda", 3))
    assert choose_device("cuda", Launch("torchrun", 1, 4, 1, 4)) == torch.device("cuda", 3)


def refused(visible: int, shared: bool, environment: dict[str, str]) -> str:
    """The error of init on a rank that sees `visible` GPUs. With `shared`, all ranks see the same GPU."""
    rank = os.environ["RANK"]
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch, visible, uuid=lambda: "GPU-a" if shared else f"GPU-{rank}")
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        for name, value in environment.items():
            patch.setenv(name, value)
        try:
            meshcomm.init(dims={"dp": 4}, timeout_s=30)
        except MeshcommError as error:
            return f"{type(error).__name__}: {error}\ninitialised: {dist.is_initialized()}"
    return "nothing"


def test_more_ranks_than_devices_are_refused_before_a_group_exists(pool: Pool) -> None:
    for rank, text in enumerate(pool.run(refused, 2, False, {}, ranks=4)):
        assert text.startswith("LaunchError: 4 ranks on a host with 2 cuda device(s)")
        assert f"local rank {rank} of 4, backend nccl" in text and "--nproc-per-node 2" in text
        assert text.endswith("initialised: False")


def test_ranks_that_share_their_only_visible_device_are_refused(pool: Pool) -> None:
    texts = pool.run(refused, 1, True, {}, ranks=4)
    first = [text for text in texts if text.startswith("MeshMismatchError")]
    own = [text for text in texts if text.startswith("LaunchError")]
    assert len(first) == 1 and len(own) == 3
    for text in own:
        assert "share one cuda device" in text and "GPU-a" in text and "initialised: False" in text
    assert "share one cuda device" in first[0]


@pytest.mark.parametrize(
    ("uuids", "environment", "sharing"),
    [
        ("abcd", {}, []),
        ("abca", {}, [3]),
        ("aaaa", {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, []),
        ("aaaa", {"NCCL_HOSTID": "h1"}, []),
    ],
)
def test_who_shares_is_known_by_the_device_and_not_by_its_number(
    uuids: str, environment: dict[str, str], sharing: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    plan = MeshOnly(MeshConfig(dims={"dp": 4})).plan(4).on("cuda", "nccl")
    store, found = dist.HashStore(), list[str]()
    for rank, uuid in enumerate(uuids):
        pretend(monkeypatch, visible=1, uuid=lambda uuid=uuid: uuid)
        try:
            refuse_shared(store, rank, plan, torch.device("cuda", 0))
        except LaunchError as error:
            found.append(error.what)
    assert found == [f"ranks 0 and {rank} share one cuda device" for rank in sharing]


def test_blocking_wait_is_refused(pool: Pool) -> None:
    for text in pool.run(refused, 4, False, {"TORCH_NCCL_BLOCKING_WAIT": "1"}, ranks=4):
        assert "LaunchError: TORCH_NCCL_BLOCKING_WAIT" in text and "unset TORCH_NCCL_BLOCKING_WAIT" in text


@pytest.mark.parametrize("world", [8, 1_024, 16_384, 131_072])
def test_what_the_store_of_a_job_hears_does_not_grow_with_the_world(world: int) -> None:
    looks = world / look_interval_s(world)
    steps = 3 * world / period_s(world)
    nccl = world * 1_000 / int(nccl_defaults(world)["TORCH_NCCL_COORD_CHECK_MILSEC"])
    assert looks + steps + nccl <= 5_000


@pytest.mark.parametrize(
    ("backend", "kinds", "message_kinds", "any_source", "ordered"),
    [
        ("nccl", ("cuda",), ("cuda",), False, True),
        ("gloo", ("cuda", "cpu"), ("cpu",), True, False),
        ("cpu:gloo,cuda:nccl", ("cuda", "cpu"), ("cuda", "cpu"), False, True),
    ],
)
def test_each_device_s_tensors_go_by_the_backend_that_serves_them(
    backend: str,
    kinds: tuple[str, ...],
    message_kinds: tuple[str, ...],
    any_source: bool,
    ordered: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The fake tensor below takes the place of a real one.
    monkeypatch.setattr("meshcomm.comm.checks.is_wrapper", lambda x: False)
    group: Any = SimpleNamespace(group_name="dp", size=lambda: 2, rank=lambda: 0)
    transport = ProcessGroupTransport(group, backend, torch.device("cuda", 0), owned=False, timeout_s=1.0)
    assert (transport.kinds, transport.message_kinds) == (kinds, message_kinds)
    assert (transport.any_source, transport.ordered) == (any_source, ordered)
    messages = Communicator("dp", transport, "rank 0").messages
    with FakeTensorMode():
        on_gpu = torch.ones(2, device="cuda")
    if "cuda" not in message_kinds:
        # Otherwise, the device's address would be read as a host address.
        with pytest.raises(ShapeError, match="cannot carry this tensor") as refused:
            messages.send(on_gpu, 1)
        assert refused.value.expected == "a dense tensor on cpu"
