"""A handle: two threads wait for it, an error ends every wait, a wait may have a time limit, and what became of the call."""

from __future__ import annotations

import gc
import threading
import warnings
from typing import Any

import pytest
import torch

import meshcomm
from meshcomm.comm.handle import UnwaitedHandle
from meshcomm.errors import MeshcommError, ShapeError, UnsupportedOp
from meshcomm.mesh import Mesh


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

    def where(self, call: str) -> str:
        return call

    def failed(self, call: str, error: BaseException) -> MeshcommError:
        return ShapeError(call)

    def confirm(self, call: str) -> None:
        pass

    def wait_within(self, work: Any, timeout_s: float) -> None:
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
