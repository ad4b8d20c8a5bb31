"""Messages that were checked once, and the memory that is kept for the next one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshcomm
from meshcomm.comm.p2p import Messages
from meshcomm.errors import ShapeError, UnsupportedOp


def test_messages_that_were_checked_once_are_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """exchange and shift check one message per direction. Overlapping memory is refused every time."""
    checked, seen = Messages._checked, list[str]()

    def counted(self: Messages, direction: Any, call: str, *given: Any) -> Any:
        seen.append(call)
        return checked(self, direction, call, *given)

    monkeypatch.setattr(Messages, "_checked", counted)

    def body(mesh: Any) -> None:
        peer, x, out = 1 - mesh.coord("dp"), torch.full((4,), float(mesh.rank)), torch.empty(4)
        for _ in range(5):
            assert mesh.exchange("dp", [(x, peer)], [(out, peer)])[0] is out
            handle = mesh.exchange("dp", [(x, peer)], [(out, peer)], async_op=True)
            assert handle.wait()[0][0] == peer
            assert mesh.shift("dp", x)[0] == peer
        assert len(seen) <= 4
        mesh.barrier()
        for sends, recvs in (([(x, peer)], [(x, peer)]), ([], [(out, peer), (out[2:], peer)])):
            with pytest.raises(ShapeError, match="receive into memory that another of its messages uses"):
                mesh.exchange("dp", sends, recvs)
        assert (
            mesh.exchange("dp", [(x[:2], peer), (x[2:], peer)], [(out[:2], peer), (out[2:], peer)])[1][1]
            == peer
        )

    meshcomm.simulate(body, dims={"dp": 2})
    assert seen.count("exchange") == 4 + 8


@pytest.mark.mesh(dp=2, via="gloo")
def test_the_memory_of_a_message_is_kept_until_the_next_one_if_it_is_small(mesh: meshcomm.Mesh) -> None:
    def alive_after(elements: int) -> bool:
        x = torch.ones(elements)
        # A Work keeps the memory alive, but not the tensor's Python object.
        storage = x.untyped_storage()._weak_ref()
        mesh.shift("dp", x[:1])
        del x
        gone = bool(torch.UntypedStorage._expired(storage))
        torch.UntypedStorage._free_weak_ref(storage)
        return not gone

    for _ in range(2):
        assert alive_after(1)
        # A view of a large tensor would keep all of its memory alive.
        assert not alive_after(1 << 21)


@pytest.mark.mesh(dp=2, timeout_s=20, via="gloo")
@pytest.mark.parametrize("before", [0, 5], ids=["checked", "checked before"])
def test_a_receive_from_one_rank_behind_one_from_any_rank_is_refused(
    mesh: meshcomm.Mesh, before: int
) -> None:
    """Gloo would give the first message to the later receive."""
    me, other = mesh.coord("dp"), 1 - mesh.coord("dp")
    for _ in range(before):
        mesh.exchange("dp", [(torch.ones(1), other)], [(torch.zeros(1), other)])
        mesh.send("dp", torch.ones(1), dst=1) if me == 0 else mesh.recv("dp", torch.zeros(1), src=0)
        mesh.recv("dp", torch.zeros(1), src=1) if me == 0 else mesh.send("dp", torch.ones(1), dst=0)
    waits = mesh.irecv("dp", torch.zeros(1), src=None)
    for call in (
        lambda: mesh.irecv("dp", torch.zeros(1), src=other),
        lambda: mesh.recv("dp", torch.zeros(1), src=other),
        lambda: mesh.shift("dp", torch.ones(1)),
    ):
        with pytest.raises(UnsupportedOp, match="a receive from any source with tag 0 is under way"):
            call()
    tagged = mesh.irecv("dp", torch.zeros(1), src=other, tag=1)
    for value in (1.0, 2.0):
        mesh.isend("dp", torch.full((1,), value), dst=other, tag=int(value) - 1).wait()
    assert (waits.wait().item(), tagged.wait().item()) == (1.0, 2.0)
    assert mesh.shift("dp", torch.full((1,), float(me))).item() == other
