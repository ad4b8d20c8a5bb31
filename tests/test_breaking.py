"""A call that Gloo would hold for minutes fails at once when its connections are ended from outside."""

from __future__ import annotations

import socket
import struct
import threading
import time
from typing import Any

import pytest
import torch

import meshcomm
from meshcomm.comm.handle import broken
from meshcomm.errors import CommunicationError
from meshcomm.testing import Pool
from meshcomm.transport.gloo_waits import address_in, by_nearness
from tests.faults.late_rows import connecting


def test_rings_and_trees_come_first() -> None:
    assert by_nearness(0, 2) == [1]
    assert by_nearness(5, 6) == [0, 4, 1, 3, 2]
    assert sorted(by_nearness(3, 50)) == [coord for coord in range(50) if coord != 3]


def test_an_address_as_gloo_publishes_it() -> None:
    def published(address: bytes) -> bytes:
        return struct.pack("=Q", 3) + b"vm1" + struct.pack("=Q", len(address)) + address + b"\xff" * 8

    four = struct.pack("=H", socket.AF_INET) + struct.pack("!H", 4711) + bytes([127, 0, 0, 1]) + bytes(120)
    six = (
        struct.pack("=H", socket.AF_INET6)
        + struct.pack("!H", 17)
        + bytes(4)
        + bytes(15)
        + b"\x01"
        + bytes(99)
    )
    assert address_in(published(four)) == ("127.0.0.1", 4711)
    assert address_in(published(six)) == ("::1", 17)
    for bad in (b"", b"short", published(b""), published(bytes(128)), struct.pack("=QQ", 1 << 63, 5)):
        with pytest.raises(ValueError):
            address_in(bad)


def broken_off(call: str, connected: bool) -> list[tuple[str, bool, float]]:
    """One of two ranks is blocked in `call`, whose timeout is far, until another thread breaks it off; twice."""
    own = {"timeout_s": 100.0, "validate_calls": 0, "reports": ""}
    with meshcomm.init({"mesh": {"dims": {"dp": 2}, "device": "cpu", **own}}) as mesh:
        mesh.barrier("dp", timeout_s=100)
        late = connecting(mesh, "dp")
        if connected:
            mesh.all_reduce("dp", torch.ones(1))
        found = []
        if mesh.coord("dp") != late:
            recorder: Any = mesh._at["dp"].recorder
            transport = mesh._transports["dp"]
            calls: dict[str, Any] = {
                "all_reduce": lambda: mesh.all_reduce("dp", torch.ones(3)),
                "recv": lambda: mesh.recv("dp", torch.ones(3), src=late),
            }

            def blocked() -> bool:
                return recorder.inside or recorder.messages.waiting is not None

            def break_off() -> None:
                while not blocked():
                    time.sleep(0.01)
                transport.break_off([late], connected, lambda: not blocked())

            for _ in range(2):
                breaking = threading.Thread(target=break_off)
                breaking.start()
                began = time.monotonic()
                with pytest.raises(CommunicationError) as failed:
                    calls[call]()
                breaking.join()
                cause = failed.value.__cause__
                assert isinstance(cause, RuntimeError)
                found.append((str(cause), broken(cause), time.monotonic() - began))
        mesh.barrier(timeout_s=100)
    return found


@pytest.mark.parametrize("call", ["all_reduce", "recv"])
@pytest.mark.parametrize("connected", [False, True])
def test_a_blocked_call_fails_as_for_a_lost_peer(pool: Pool, call: str, connected: bool) -> None:
    found = [each for rank in pool.run(broken_off, call, connected, ranks=2) for each in rank]
    assert len(found) == 2
    assert all(lost and took < 30 for _, lost, took in found), found
