"""A handle: two threads wait for it, an error ends every wait, and a wait may have a time limit."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import meshcomm
from meshcomm.errors import MeshcommError, ShapeError, UnsupportedOp


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
