"""Modes of torch, handles that two threads wait for, outputs in the memory of the input: results stay right."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import meshcomm
from meshcomm.errors import MeshcommError, ShapeError, UnsupportedOp
from meshcomm.mesh import Mesh


@pytest.mark.mesh(dp=3, via=("simulator", "gloo", "emulated_nccl"))
def test_a_mode_of_torch_changes_nothing(mesh: Mesh) -> None:
    """Calls made in one mode of torch and waited for in another give the same results."""
    weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    with torch.no_grad():
        begun = mesh.all_reduce("dp", [weight, weight.new_ones(2)], async_op=True)
        turned = mesh.all_reduce("dp", weight.detach().t(), async_op=True)
    begun.wait()
    turned.wait()
    with torch.inference_mode():
        columns = torch.arange(6.0).view(2, 3).t()
    mesh.all_reduce("dp", columns)
    with torch.inference_mode():
        row = torch.arange(2.0)
    mesh.all_reduce("dp", row, algorithm="ring")
    negative = torch.tensor([0 + 2j, 0 + 3j]).conj().imag
    mesh.all_reduce("dp", [negative])
    with torch.device("meta"):  # as around a model that is built without memory
        summed = mesh.all_reduce("dp", torch.arange(1.0, 4.0, device="cpu").to(torch.bfloat16))
        received = mesh.shift("dp", summed)
        told = mesh.objects.all_gather("dp", mesh.coord("dp"))
    assert received is not None
    # One element of a slice is contiguous, whatever its stride.
    lone = torch.tensor([0, 1 + mesh.coord("dp"), 0], dtype=torch.int16)[1::2]
    assert lone.is_contiguous() and lone.stride() == (2,)
    mesh.broadcast("dp", lone, src=2)
    assert row.tolist() == [0, 3] and lone.tolist() == [3]
    assert columns.tolist() == [[0.0, 9.0], [3.0, 12.0], [6.0, 15.0]]
    assert negative.tolist() == [-6.0, -9.0]
    assert summed.tolist() == received.tolist() == [3, 6, 9]
    assert told == [0, 1, 2]


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


@pytest.mark.mesh(dp=3, validate_calls=0, via="gloo")
def test_a_prepared_all_to_all_does_not_overwrite_what_is_still_to_leave(mesh: Mesh) -> None:
    """The call has x itself as out, before and after it has been prepared."""
    coord, length = mesh.coord("dp"), 600_000
    everyones = [torch.arange(length) + length * c for c in range(3)]
    expected = torch.cat([x.chunk(3)[coord] for x in everyones])
    for _ in range(6):
        mesh.all_to_all("dp", everyones[coord])
        x = everyones[coord].clone()
        assert mesh.all_to_all("dp", x, out=x) is x and torch.equal(x, expected)
