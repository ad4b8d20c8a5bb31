"""The backend that emulates NCCL: its calls are queued, ordered and lost as on a GPU; see docs/design/emulated_nccl.md."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import meshcomm
from meshcomm.errors import CollectiveTimeout, CommunicationError, UnsupportedOp
from meshcomm.mesh import Mesh, state
from meshcomm.testing import Pool, RankFailure
from meshcomm.testing.emulated_nccl import (
    NAME,
    HostSync,
    UnorderedAccess,
    capture,
    emulated_nccl,
    host_syncs,
    no_host_sync,
)

pytestmark = pytest.mark.long


def on_a_mesh(check: Callable[[Mesh], None], timeout_s: float = 30.0) -> None:
    dims = {"dp": 2, "tp": 2}
    with emulated_nccl(), meshcomm.init(dims=dims, backend=NAME, device="cpu", timeout_s=timeout_s) as mesh:
        check(mesh)


def every_call(mesh: Mesh, rounds: int = 70) -> None:
    """Every call is right along both dims: first and prepared calls, meshcomm's and torch's."""
    for _ in range(rounds):
        for dim in ("dp", "tp"):
            ranks = mesh.ranks(dim)
            x = torch.full((4, 2), float(mesh.rank))
            assert mesh.all_reduce(dim, x.clone()).sum() == 8 * sum(ranks)
            assert mesh.all_gather(dim, x[:1, :1]).view(-1).tolist() == ranks
            assert mesh.reduce_scatter(dim, x)[0, 0] == sum(ranks)
            assert mesh.all_to_all(dim, x)[::2, 0].tolist() == ranks
            assert mesh.broadcast(dim, x.clone(), src=1)[0, 0] == ranks[1]
            came = mesh.shift(dim, x, 1)
            assert came is not None and came[0, 0] == ranks[(mesh.coord(dim) - 1) % 2]
    assert mesh.objects.all_gather("dp", {"rank": mesh.rank}) == [{"rank": rank} for rank in mesh.ranks("dp")]
    group = mesh.group("tp")
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [2, 2, 2]
    assert (functional.all_reduce(x, "sum", group) + 1).tolist() == [5, 5, 5]
    mesh.barrier()


def order_and_host(mesh: Mesh) -> None:
    """A call returns when it is queued, and a wait does not block. Reading blocks; a read before the wait is a race."""
    for _ in range(65):
        mesh.all_reduce("dp", torch.ones(1))
    mesh.barrier()
    if mesh.coord("dp") == 1:
        time.sleep(1.0)
    began = time.monotonic()
    x, y = torch.ones(4), torch.ones(4)
    handle = mesh.all_reduce("dp", x, async_op=True)
    if mesh.coord("dp") == 0:
        # Only the early rank checks the race: the late rank's call may be done by now.
        with pytest.raises(
            UnorderedAccess, match="aten::add touches memory of ALLREDUCE, which has not been waited for"
        ):
            x + 1
    assert y.sum() == 4
    handle.wait()
    mesh.all_reduce("dp", y)
    queued_s = time.monotonic() - began
    assert x.tolist() == [2, 2, 2, 2]
    blocked_s = time.monotonic() - began
    if mesh.coord("dp") == 0:
        assert queued_s < 0.5 < blocked_s
    syncs = host_syncs()
    assert y[0] == 2
    assert host_syncs() == syncs + 1
    # Two groups may read one tensor at once.
    z = torch.ones(2)
    reads = [mesh.all_gather(dim, z, async_op=True) for dim in ("dp", "tp")]
    assert [handle.wait().tolist() for handle in reads] == [[1, 1, 1, 1]] * 2
    # Queueing a call does not tell how long it takes.
    assert {row.seconds for row in mesh.stats().rows} == {None}
    with no_host_sync(), pytest.raises(HostSync, match="the host waits"):
        y.max().item()
    mesh.barrier()


def messages(mesh: Mesh) -> None:
    """Messages in both directions need one call. With two calls in a row, ranks that do the same would wait forever."""
    peer, x = 1 - mesh.coord("dp"), torch.full((2,), float(mesh.rank))
    sent = mesh.isend("dp", x, dst=peer) if peer else None
    out = torch.empty(2)
    if sent is not None:
        with pytest.raises(UnsupportedOp, match="ranks that all do this wait forever") as refused:
            mesh.irecv("dp", out, src=peer)
        assert "mesh.exchange" in refused.value.hint
        sent.wait()
    else:
        assert mesh.recv("dp", out, src=peer)[0] == mesh.ranks("dp")[0]
    received = mesh.exchange("dp", sends=[(x, peer)], recvs=[(out, peer)])
    assert received[0][0] == mesh.ranks("dp")[peer]


def captured(mesh: Mesh) -> None:
    """A capture records calls, which run at each replay; first calls on a group are not compared inside a capture."""
    x = torch.ones(2)
    with capture() as graph:
        mesh.all_reduce("tp", x)
        with pytest.raises(HostSync):
            x.tolist()
    assert x.tolist() == [1, 1]
    graph.replay()
    graph.replay()
    assert x.tolist() == [4, 4]


def limited_wait(mesh: Mesh) -> None:
    """A wait that times out leaves the communicator intact."""
    x = torch.ones(2)
    for _ in range(65):
        mesh.all_reduce("dp", torch.ones(1))
    mesh.barrier()
    if mesh.coord("dp"):
        mesh.store.wait(["gave up/0", "gave up/1"])
    handle = mesh.all_reduce("dp", x, async_op=True)
    if mesh.coord("dp") == 0:
        with pytest.raises(CollectiveTimeout):
            handle.wait(timeout_s=0.3)
        mesh.store.set(f"gave up/{mesh.rank}", b"")
        mesh.all_reduce("dp", torch.ones(1))
    else:
        assert handle.wait() is x
        mesh.all_reduce("dp", torch.ones(1))
    assert mesh.all_reduce("dp", torch.ones(1)).item() == 2


def compiled(mesh: Mesh) -> None:
    """torch.compile does not trace the emulation, but compiled code uses it."""
    whole = [torch.full((3,), float(rank)) for rank in mesh.ranks("dp")]

    def body(x: torch.Tensor) -> torch.Tensor:
        return mesh.functional.all_gather("dp", x * 2, 0, grad="slice") + 1

    for turn in range(2):
        if turn and mesh.coord("dp"):
            time.sleep(0.2)
        x = whole[mesh.coord("dp")].clone().requires_grad_()
        result = torch.compile(body, fullgraph=True, backend="aot_eager")(x)
        assert torch.equal(result, torch.cat(whole) * 2 + 1)
        assert torch.equal(torch.autograd.grad(result.sum(), x)[0], torch.full((3,), 2.0))


def compiled_step(mesh: Mesh) -> None:
    """Forward, backward, sums of gradients and the update, in one graph, give the same as one process."""
    torch.manual_seed(0)
    up, down = torch.randn(8, 6, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    batches = torch.randn(3, 2, 4, 8, dtype=torch.float64)
    tp, dp = mesh.coord("tp"), mesh.coord("dp")

    def loss_of(weights: tuple[torch.Tensor, ...], x: torch.Tensor) -> torch.Tensor:
        x = mesh.functional.identity("tp", x)
        y = mesh.functional.all_reduce("tp", (x @ weights[0]).tanh() @ weights[1], grad="identity")
        return y.square().mean()

    def step(weights: tuple[torch.Tensor, ...], x: torch.Tensor) -> tuple[Any, torch.Tensor]:
        gradients, loss = torch.func.grad_and_value(loss_of)(weights, x)
        summed = [mesh.functional.all_reduce("dp", each, "avg", grad="sum") for each in gradients]
        return tuple(w - 0.1 * g for w, g in zip(weights, summed, strict=True)), loss

    weights: Any = (up.chunk(2, 1)[tp].clone(), down.chunk(2, 0)[tp].clone())
    whole = [up.clone().requires_grad_(), down.clone().requires_grad_()]
    made = torch.compile(step, fullgraph=True, backend="aot_eager")
    for batch in batches:
        weights, loss = made(weights, batch[dp])
        losses = [((x @ whole[0]).tanh() @ whole[1]).square().mean() for x in batch]
        torch.testing.assert_close(loss, losses[dp].detach())
        gradients = torch.autograd.grad(sum(losses) / 2, whole)
        whole = [(w - 0.1 * g).detach().requires_grad_() for w, g in zip(whole, gradients, strict=True)]
    torch.testing.assert_close(weights[0], whole[0].detach().chunk(2, 1)[tp])
    torch.testing.assert_close(weights[1], whole[1].detach().chunk(2, 0)[tp])


@pytest.mark.parametrize(
    "check",
    [every_call, order_and_host, messages, captured, limited_wait, compiled, compiled_step],
    ids=lambda check: check.__name__,
)
@pytest.mark.deep_cases(r"\[compiled(_step)?\]")
def test_emulated(pool: Pool, check: Callable[[Mesh], None]) -> None:
    pool.run(on_a_mesh, check, ranks=4)


def aborted() -> None:
    """`abort` releases a queued call without an error and refuses the next one; destroying then waits for nothing."""
    dims = {"dp": 2}
    with emulated_nccl(), meshcomm.init(dims=dims, backend=NAME, device="cpu", validate_calls=1) as mesh:
        group = mesh.group("dp")
        mesh.all_reduce("dp", torch.ones(1)).item()
        dist.group.WORLD.abort()  # no call has connected it
        dist.barrier()
        if mesh.rank == 0:
            x = torch.ones(2)
            works = [group.allreduce([x]), dist.all_reduce(torch.ones(2), async_op=True)]
            assert not any(work.is_completed() for work in works)
            began = time.monotonic()
            # Aborting one group alone waits for the kernels of the other group.
            alone = threading.Thread(target=group.abort)
            alone.start()
            alone.join(0.5)
            assert alone.is_alive() and works[0].is_completed() and not works[1].is_completed()
            dist.group.WORLD.abort()
            alone.join(5)
            assert not alone.is_alive() and time.monotonic() - began < 5
            for work in works:
                assert work.wait() and work.is_completed() and work.exception() is None
            assert x.tolist() == [1, 1]
            with pytest.raises(dist.DistBackendError, match="aborted"):
                group.allreduce([torch.ones(2)])


def test_abort(pool: Pool) -> None:
    pool.run(aborted, ranks=2)


def closed_before_a_graph() -> None:
    """A communicator must outlive the graphs of its calls. A mesh that closes too early raises after a short wait."""
    with emulated_nccl():
        mesh = meshcomm.init(dims={"dp": 2}, backend=NAME, device="cpu", validate_calls=0)
        x = torch.ones(1)
        mesh.all_reduce("dp", x)
        with capture() as graph:
            mesh.all_reduce("dp", x)
        state._GRAPHS_S = 1.0  # type: ignore[misc]
        with pytest.raises(CommunicationError, match="closes while a CUDA graph still contains") as held:
            mesh.close()
        assert "graph.reset()" in held.value.hint
        graph.reset()
        # The closing thread can now complete.
        for thread in threading.enumerate():
            if thread.name == "meshcomm-store":
                thread.join(20)


def test_a_mesh_that_closes_before_a_graph_of_its_calls(pool: Pool) -> None:
    pool.run(closed_before_a_graph, ranks=2)


def batch_on_a_dropped_group() -> None:
    """A batch of messages that cannot start is still ended; otherwise NCCL would hold back all later calls of the thread."""
    with emulated_nccl(), meshcomm.init(dims={"dp": 2, "tp": 2}, backend=NAME, device="cpu") as mesh:
        x, out, peer = torch.ones(2), torch.zeros(2), 1 - mesh.coord("dp")

        def swap() -> None:
            mesh.exchange("dp", sends=[(x, peer)], recvs=[(out, peer)])

        swap()
        assert out.tolist() == [1, 1]
        mesh.group("dp").abort()
        with pytest.raises(CommunicationError, match="aborted"):
            swap()
        assert mesh.all_reduce("tp", x).tolist() == [2, 2]


def open_line(mesh: Mesh) -> None:
    """The ranks at the edges have one message and the others two, all on one communicator."""
    for offset in (1, -1):
        came = mesh.shift("dp", torch.full((2,), float(mesh.rank)), offset, wrap=False)
        source = mesh.rank - offset
        assert (None if came is None else came.tolist()) == ([source] * 2 if 0 <= source < 4 else None)


def on_a_line() -> None:
    with emulated_nccl(), meshcomm.init(dims={"dp": 4}, backend=NAME, device="cpu", timeout_s=20) as mesh:
        open_line(mesh)


def test_the_edges_of_an_open_line(pool: Pool) -> None:
    pool.run(on_a_line, ranks=4)


def test_a_batch_on_a_dropped_group_holds_back_no_other_call(pool: Pool) -> None:
    pool.run(batch_on_a_dropped_group, ranks=4)


def compiled_after_a_call() -> None:
    """Compiled code reads memory without operators, but still runs after the calls before it."""
    with emulated_nccl(), meshcomm.init(dims={"dp": 2}, backend=NAME, device="cpu", validate_calls=0) as mesh:
        add = torch.compile(lambda x: x * 2 + 1, fullgraph=True)
        for late in (False, True):
            if late and mesh.rank:
                time.sleep(0.5)
            x = mesh.functional.all_reduce("dp", torch.ones(64, 64), grad="sum")
            assert add(x).eq(5).all()


@pytest.mark.deep
def test_compiled_code_runs_after_the_calls_before_it(pool: Pool) -> None:
    pool.run(compiled_after_a_call, ranks=2)


def overdue() -> None:
    """Makes a call that the other rank never makes, on a group that no mesh watches."""
    with emulated_nccl(dump_s=0.2):
        dist.init_process_group(NAME, timeout=timedelta(seconds=1))
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x.item() == 2
        if dist.get_rank() == 0:
            dist.all_reduce(x)
            x.item()
        time.sleep(20)


@pytest.mark.faults
def test_the_watchdog_aborts(pool: Pool) -> None:
    with pytest.raises(RankFailure, match=r"rank 0 of 2:\n(.*\n)*was killed by SIGABRT"):
        pool.run(overdue, ranks=2)
