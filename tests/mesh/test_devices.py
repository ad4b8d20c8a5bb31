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
from meshcomm.collectives import BARRIER
from meshcomm.comm import Communicator
from meshcomm.config.mesh import DimOptions, MeshConfig
from meshcomm.errors import LaunchError, MeshcommError, ShapeError, UnsupportedOp
from meshcomm.mesh import groups
from meshcomm.mesh.desync import period_s
from meshcomm.mesh.devices import choose_device, refuse_shared
from meshcomm.mesh.source import MeshOnly
from meshcomm.mesh.watchdog import look_interval_s
from meshcomm.rendezvous.launcher import Launch, find_launch
from meshcomm.testing import Pool
from meshcomm.transport import ProcessGroupTransport, SoloTransport
from meshcomm.transport.base import Call
from meshcomm.transport.variables import nccl_defaults
from meshcomm.watching.exceptions import Reason, reason_of


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


def test_a_barrier_names_the_device_of_the_mesh() -> None:
    # Without a device, NCCL guesses one from the rank and creates a context there.
    told: list[Any] = []
    group: Any = SimpleNamespace(
        group_name="dp", size=lambda: 2, rank=lambda: 0, barrier=told.append, allreduce=lambda *given: None
    )
    transport = ProcessGroupTransport(group, "nccl", torch.device("cuda", 3), owned=False, timeout_s=1.0)
    transport.start(Call(BARRIER, blocking=True))
    assert told[0].device == torch.device("cuda", 3)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=8, "
            "NumelOut=8, Timeout(ms)=10000) ran for 10031 milliseconds before timing out.",
            Reason.TIMEOUT,
        ),
        (
            "NCCL error in: ProcessGroupNCCL.cpp:2090, remote process exited or there was a network error, NCCL "
            "version 2.27.5\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting.",
            Reason.CLOSED,
        ),
        ("NCCL communicator was aborted on rank 1.", Reason.CLOSED),
        (
            "NCCL error in: NCCLUtils.cpp:94, invalid usage, NCCL version 2.27.5\nncclInvalidUsage: This usually "
            "reflects invalid usage of NCCL library.",
            Reason.DATA,
        ),
        ("ncclUnhandledCudaError: Call to CUDA function failed.", Reason.OTHER),
    ],
)
def test_what_nccl_says_is_understood(text: str, reason: Reason) -> None:
    assert reason_of(dist.DistBackendError(text)) == reason


@pytest.mark.parametrize(
    ("default", "bound", "splits"),
    [("nccl", "cuda:0", True), ("gloo", "cuda:0", False), ("nccl", None, False)],
)
def test_only_a_bound_default_group_of_nccl_is_split(
    default: str, bound: str | None, splits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "default_group", lambda: None)
    monkeypatch.setattr(groups, "backend_of", lambda group: default)
    monkeypatch.setattr(groups, "bound_device", lambda: bound and torch.device(bound))
    plan = MeshOnly(MeshConfig(dims={"dp": 2, "tp": 2})).plan(4).on("cuda", "nccl")
    made: list[bool] = []
    solo = SoloTransport(torch.device("cpu"), "gloo")
    monkeypatch.setattr(groups.GroupMaker, "open", lambda maker, group, split: made.append(split) or solo)
    meeting: Any = SimpleNamespace(world_size=4)
    held: Any = None
    maker = groups.GroupMaker(meeting, torch.device("cuda"), "m", None, held)
    maker.transports(plan, plan.for_rank(0), {})
    assert made == [splits] * 2


def test_options_of_a_dim_reach_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gets the options of a dim for its NCCL group; a torch without NCCL refuses them."""
    own = {"high_priority": True, "min_ctas": 2, "max_ctas": 4, "cga_cluster_size": 1, "split_share": True}
    config = MeshConfig(
        dims={"dp": 2, "tp": 2}, device="cuda", backend="nccl", options={"tp": DimOptions(**own)}
    )
    plan, given = config.plan(4), list[Any]()
    monkeypatch.setattr(groups, "create_group", lambda *, options, **_: given.append(options))
    monkeypatch.setattr(groups, "ProcessGroupTransport", lambda *_, **__: None)

    def opened(name: str, split: bool) -> None:
        group = next(each for each in plan.for_rank(0).groups if each.name == name)
        groups.open_group(group, 0, dist.HashStore(), "m", torch.device("cuda", 0), True, split)

    if not hasattr(dist, "ProcessGroupNCCL"):
        with pytest.raises(UnsupportedOp, match=r"high_priority and min_ctas .* has no effect on nccl"):
            opened("tp", True)
        return
    opened("dp", True)
    opened("tp", True)
    assert given[0] is None and given[1].is_high_priority_stream
    assert [getattr(given[1].config, name) for name in list(own)[1:]] == [2, 4, 1, 1]
    with pytest.raises(UnsupportedOp, match="split_share has no effect: the group has its own communicator"):
        opened("tp", False)
