"""A handle: two threads wait for it, an error ends every wait, a wait may have a time limit, and what became of the call."""

from __future__ import annotations

import gc
import threading
import time
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import meshcomm
from meshcomm.comm.handle import UnwaitedHandle
from meshcomm.errors import (
    CallMismatchError,
    CollectiveTimeout,
    MeshClosed,
    MeshcommError,
    ShapeError,
    UnsupportedOp,
)
from meshcomm.mesh import Mesh
from meshcomm.testing import Pool


class Slow:
    """A Work that completes when the test sets `over`."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.asked = threading.Event()

    def wait(self, timeout: object = None) -> bool:
        self.asked.set()
        return self.over.wait()

    def is_completed(self) -> bool:
        return self.over.is_set()


class By:
    """The owner of the handles in these tests."""

    recorder = SimpleNamespace(ordered=True)
    transport = SimpleNamespace(timeout_s=0.0)

    def where(self, call: str) -> str:
        return call

    def failed(self, call: str, error: BaseException) -> MeshcommError:
        return ShapeError(call)

    def confirm(self, call: str) -> None:
        pass

    def has_completed(self, work: Any) -> bool:
        return bool(work.is_completed())

    def wait_within(self, work: Any, timeout_s: float, last: bool) -> None:
        work.wait(timeout_s)


def test_two_threads_wait_for_one_handle() -> None:
    work, made = Slow(), []

    def finish() -> str:
        made.append(1)
        return "result"

    handle = meshcomm.Handle([work], By(), "a call", finish)
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(handle.wait())) for _ in range(2)]
    threads[0].start()
    assert work.asked.wait(60)
    threads[1].start()
    assert not handle.is_success() and not found
    work.over.set()
    for thread in threads:
        thread.join(60)
    assert found == ["result", "result"] and made == [1]


def test_what_ended_a_wait_ends_every_wait() -> None:
    work = Slow()
    work.over.set()

    def finish() -> None:
        raise ShapeError("no room", given="a", expected="b", hint="c")

    handle = meshcomm.Handle([work], By(), "a call", finish)
    for wait in (handle.wait, handle.wait, handle.result):
        with pytest.raises(ShapeError, match="no room"):
            wait()
    assert isinstance(handle.exception(), ShapeError) and not handle.is_success()


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), "5", True])
def test_a_handle_waits_for_a_time(timeout_s: Any) -> None:
    work = Slow()
    work.over.set()
    handle = meshcomm.Handle([work], By(), "a call", lambda: 3)
    with pytest.raises(UnsupportedOp, match="not a valid timeout"):
        handle.wait(timeout_s)
    assert handle.wait(float("inf")) == 3


@pytest.mark.mesh(dp=2, tp=2, via="gloo", not_via={"emulated_nccl": "irecv behind isend is refused"})
def test_handles_say_what_became_of_the_call(mesh: Mesh) -> None:
    x = torch.ones(3)
    handle = mesh.all_reduce("dp", x, async_op=True)
    with pytest.raises(meshcomm.MeshcommError, match="the result was asked for before wait"):
        handle.result()
    assert handle.wait() is x
    assert handle.wait() is x
    assert handle.result() is x
    assert handle.is_completed()
    assert handle.is_success()
    assert handle.exception() is None
    with pytest.raises(meshcomm.MeshcommError, match="the call has no source"):
        _ = handle.source
    peer = 1 - mesh.coord("tp")
    sent = mesh.isend("tp", x, dst=peer)
    received = mesh.irecv("tp", torch.zeros(3), src=peer)
    assert received.wait().tolist() == [2.0] * 3
    assert received.source == peer
    sent.wait()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dropped = mesh.all_reduce("dp", torch.ones(1), async_op=True)
        del dropped
        gc.collect()
    texts = [str(each.message) for each in caught if each.category is UnwaitedHandle]
    assert len(texts) == 1
    assert f'all_reduce along "dp" on {mesh.label}: the handle made at {__file__}:' in texts[0]
    mesh.barrier("dp")
    late = mesh.barrier("tp", async_op=True)
    assert late.wait() is None


@pytest.mark.mesh(dp=2, timeout_s=20, via="gloo", not_via={"emulated_nccl": "a message stays queued there"})
@pytest.mark.parametrize("before", [0, 5], ids=["compared", "no longer compared"])
@pytest.mark.parametrize("call", ["irecv", "isend", "exchange", "all_reduce", "list", "reduce_scatter"])
def test_a_limited_wait_keeps_to_its_limit_and_the_next_one_goes_on(
    mesh: Mesh, call: str, before: int
) -> None:
    """Gloo closes all connections of a message whose wait times out, and the first messages are compared through the store."""
    me, other = mesh.coord("dp"), 1 - mesh.coord("dp")
    large = torch.full((3_000_000,), 4.0)
    for _ in range(before):
        mesh.exchange("dp", [(large[:2], other)], [(torch.zeros(2), other)])
    calls: dict[str, Any] = {
        "irecv": lambda: mesh.irecv("dp", torch.zeros(2), src=1),
        "isend": lambda: mesh.isend("dp", large, dst=1),
        "exchange": lambda: mesh.exchange(
            "dp", [], [(torch.zeros(2), 1, tag) for tag in (1, 2)], async_op=True
        ),
        "all_reduce": lambda: mesh.all_reduce("dp", torch.ones(2), async_op=True),
        "list": lambda: mesh.all_reduce(
            "dp", [torch.ones(2), torch.ones(2, dtype=torch.int32)], async_op=True
        ),
        "reduce_scatter": lambda: mesh.reduce_scatter("dp", torch.ones(2), async_op=True),
    }
    answers: dict[str, Any] = {
        "irecv": lambda: mesh.isend("dp", torch.full((2,), 4.0), dst=0),
        "isend": lambda: mesh.irecv("dp", torch.zeros(3_000_000), src=0),
        "exchange": lambda: mesh.exchange("dp", [(large[:2], 0, tag) for tag in (1, 2)], async_op=True),
    }
    if me == 0:
        handle = calls[call]()
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(meshcomm.errors.CollectiveTimeout, match=r"wait\(\) again") as raised:
                handle.wait(0.1)
            assert type(raised.value) is meshcomm.errors.CollectiveTimeout
            assert time.monotonic() - began < 2
        assert handle.exception() is None and not handle.is_success()
    mesh.store.set(f"over/{me}", b"")
    if me == 1:
        mesh.store.wait(["over/0"], timeout_s=15)
        handle = answers.get(call, calls[call])()
    found = handle.wait(10) if before else handle.wait()
    if me == 0:
        values = {"irecv": [4.0, 4.0], "all_reduce": [2.0, 2.0], "reduce_scatter": [2.0]}
        assert call not in values or found.tolist() == values[call]
        assert (
            call not in ("exchange", "list")
            or [x.sum() for x in found] == [{"list": 4, "exchange": 8}[call]] * 2
        )
    assert handle.is_success() and mesh.all_reduce("dp", torch.ones(1)).item() == 2


@pytest.mark.mesh(
    dp=2, timeout_s=20, via="gloo", not_via={"emulated_nccl": "its calls are not compared first"}
)
def test_a_list_that_fails_leaves_no_handles_behind(mesh: Mesh) -> None:
    """What the ranks pass is compared as a whole, before any of it is sent."""
    me = mesh.coord("dp")
    f, d, i = (torch.full((2,), me + 1, dtype=kind) for kind in (torch.float32, torch.float64, torch.int64))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for xs, op in (([f, i], "avg"), ([f, d, i], "avg"), ([i, f], "band"), ([i, d, f], "bor")):
            with pytest.raises(UnsupportedOp, match=f"{op} of .* is not possible"):
                mesh.all_reduce("dp", xs, op=op)
            assert all(x.tolist() == [me + 1] * 2 for x in xs)
        one: list[torch.Tensor] = [f]
        empty = "list of no tensors"
        for xs, text in (
            ([f, i][: 1 + me], r"float32, int64"),
            ([[f, d, i], [f, i, d]][me], r"float32, int64, float64"),
            (one * me, empty),
            ([f, d, i] * me, empty),
        ):
            with pytest.raises(CallMismatchError, match=rf"nothing was sent(.|\n)*{text}"):
                mesh.all_reduce("dp", xs)
            assert mesh.all_reduce("dp", torch.ones(1)).item() == 2
        assert mesh.all_reduce("dp", []) == []
        gc.collect()
    assert not caught


@pytest.mark.mesh(dp=2, timeout_s=20, via="gloo")
@pytest.mark.parametrize("before", [0, 5], ids=["compared", "no longer compared"])
def test_a_message_completes_while_the_program_asks(mesh: Mesh, before: int) -> None:
    """torch's own Work for a message of Gloo completes only in wait()."""
    me, other = mesh.coord("dp"), 1 - mesh.coord("dp")
    for _ in range(before):
        mesh.exchange("dp", [(torch.ones(3), other)], [(torch.zeros(3), other)])
    for numel in (3, 3_000_000):
        out = torch.zeros(numel)
        received = mesh.irecv("dp", out, src=other)
        if me == 0:
            assert not received.is_completed()
        mesh.barrier("dp")
        sent = mesh.isend("dp", torch.full((numel,), 4.0 + me), dst=other)
        for handle in (received, sent):
            until = time.monotonic() + 15
            while not handle.is_completed() and time.monotonic() < until:
                time.sleep(0.001)
            assert handle.is_success()
        assert received.wait().eq(4.0 + other).all() and received.source == other
        sent.wait()


@pytest.mark.mesh(dp=2, timeout_s=20, via="gloo")
def test_a_message_that_was_asked_for_names_who_did_not_send(mesh: Mesh) -> None:
    received = mesh.irecv("dp", torch.zeros(3), src=1 - mesh.coord("dp"), tag=3)
    assert not received.is_completed() and received.exception() is None
    with pytest.raises(CollectiveTimeout, match="recv from"):
        received.wait(0.2)
    mesh.send("dp", torch.ones(3), dst=1 - mesh.coord("dp"), tag=3) if mesh.coord("dp") else None
    if mesh.coord("dp") == 0:
        assert received.wait().tolist() == [1.0] * 3
        mesh.send("dp", torch.ones(3), dst=1, tag=3)
    else:
        assert received.wait().tolist() == [1.0] * 3


@pytest.mark.mesh(dp=2, timeout_s=5, via="gloo")
def test_a_receive_that_is_dropped_on_both_ends_breaks_no_later_call(mesh: Mesh) -> None:
    other = 1 - mesh.coord("dp")
    handle = mesh.irecv("dp", torch.empty(1000), src=other)
    with pytest.warns(UnwaitedHandle):
        del handle
    time.sleep(0.2 * mesh.coord("dp"))
    mesh.send("dp", torch.ones(1000), dst=other)
    assert mesh.all_reduce("dp", torch.ones(1)).item() == 2


def waits_after_close() -> str:
    with meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=3) as mesh:
        mesh.all_reduce("dp", torch.ones(2))
        handle = mesh.irecv("dp", torch.zeros(3), src=1 - mesh.coord("dp"))
    with pytest.raises(MeshClosed) as caught:
        handle.wait()
    return str(caught.value)


def test_a_wait_after_the_mesh_was_closed_blames_no_peer(pool: Pool) -> None:
    for text in pool.run(waits_after_close, ranks=2):
        assert "was under way when this rank closed the mesh" in text and __file__ in text


def test_a_handle_that_is_alive_at_the_end_of_python_says_nothing() -> None:
    handle = meshcomm.Handle([Slow()], By(), "a call")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle.__del__(lambda: True)
    handle._abandon()


def test_a_program_that_only_asks_learns_of_lost_ranks() -> None:
    """A backend does not end a receive from any source if no rank is left that could send."""

    class Lost(By):
        transport = SimpleNamespace(timeout_s=0.05, tells_unwaited=True)

        def wait_within(self, work: Any, timeout_s: float, last: bool) -> None:
            raise RuntimeError("no rank is left")

    owner: Any = Lost()
    handle = meshcomm.Handle([Slow()], owner, "a call")
    assert not handle.is_completed()
    time.sleep(0.1)
    assert handle.is_completed() and isinstance(handle.exception(), ShapeError)
