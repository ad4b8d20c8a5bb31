"""Both ends of a message are compared before its data moves, whichever comes second."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshcomm
from meshcomm.comm.p2p_log import MessageCheck
from meshcomm.errors import CallMismatchError, CollectiveTimeout, CommunicationError
from meshcomm.testing import Pool

CASES: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
    "shorter": (torch.ones(4), torch.zeros(8)),
    "longer": (torch.ones(8), torch.zeros(4)),
    "dtype": (torch.ones(4), torch.zeros(4, dtype=torch.int32)),
}


def wait_for_the_other_end(mesh: meshcomm.Mesh, number: int) -> None:
    """Until it has said what it is about to do with message `number` of tag 0 from rank 0 to rank 1."""
    check = mesh._at["pp"].recorder.messages._check
    assert check is not None
    while not check._store.check([check.key(0, 1, 0, number)]):
        time.sleep(0.02)


def ends(case: str, late: int, validate: int | str) -> tuple[str, str, tuple[int, ...]]:
    """Rank 0 sends to rank 1; coord `late` comes second."""
    x, out = CASES[case]
    options = {"pp": {"timeout_s": 2.0}}
    config = {
        "dims": {"pp": 2},
        "device": "cpu",
        "options": options,
        "validate_calls": validate,
        "reports": "",
    }
    with meshcomm.init({"mesh": config}) as mesh:
        for _ in range(5 if validate == "always" else 1):
            mesh.shift("pp", torch.ones(2))  # tag 0, and equal at both ends
        mesh.barrier()
        if mesh.coord("pp") == late:
            wait_for_the_other_end(mesh, 6 if validate == "always" else 2)
        try:
            if mesh.coord("pp") == 0:
                mesh.send("pp", x, dst=1)
            else:
                mesh.recv("pp", out, src=0)
        except (CallMismatchError, CollectiveTimeout) as error:
            found = type(error).__name__, str(error), getattr(error, "mismatched_ranks", ())
        else:
            found = "none", "", ()
        mesh.store.set(f"over/{mesh.rank}", b"")
        while not mesh.store.check(["over/0", "over/1"]):  # stay while the other asks
            time.sleep(0.02)
        return found


@pytest.mark.parametrize(
    ("case", "late", "validate"), [("shorter", 0, 64), ("longer", 1, "always"), ("dtype", 1, 64)]
)
def test_both_ends_of_a_mismatched_message_are_told_at_once(
    pool: Pool, case: str, late: int, validate: Any
) -> None:
    x, out = CASES[case]
    number = 6 if validate == "always" else 2
    # Whoever came first waits for the answer, and so is told before its own timeout.
    for kind, text, odd in pool.run(ends, case, late, validate, ranks=2):
        assert (kind, odd) == ("CallMismatchError", (0, 1))
        assert (
            f"message {number} with tag 0 from rank 0 to rank 1 on pp means two things; nothing was sent"
            in text
        )
        assert f"rank 0 sends float32 ({x.numel()}) at {__file__}:" in text
        dtype = str(out.dtype).removeprefix("torch.")
        assert f"rank 1 has room for {dtype} ({out.numel()}) at {__file__}:" in text


def unread(validate: int) -> float:
    with meshcomm.init(dims={"pp": 2}, device="cpu", timeout_s=20, validate_calls=validate) as mesh:
        out = torch.zeros(8)
        for _ in range(6):
            if mesh.coord("pp") == 0:
                mesh.send("pp", torch.ones(8), dst=1)
            else:
                mesh.recv("pp", out, src=0)
        return out.sum().item()


def test_equal_ends_pass(pool: Pool) -> None:
    assert pool.run(unread, 64, ranks=2)[1] == 8.0


def received_twice() -> float:
    with meshcomm.init(dims={"pp": 2}, device="cpu", timeout_s=20) as mesh:
        me, out = mesh.coord("pp"), torch.zeros(2)
        handle = mesh.irecv("pp", torch.zeros(2), me)
        with pytest.raises(CommunicationError, match=f"sent itself nothing(.|\n)*own coord {me}, tag 0"):
            handle.wait()
        mesh.send("pp", torch.ones(2), me)
        return mesh.recv("pp", out, src=me).sum().item()


def test_a_receive_from_itself_that_failed_takes_no_later_message(pool: Pool) -> None:
    assert pool.run(received_twice, ranks=2) == [2.0, 2.0]


def test_an_end_that_stays_silent_is_waited_for_within_the_timeout() -> None:
    store = dist.HashStore()
    first, second = (MessageCheck(store, "pp", [0, 1], rank, 64, timeout_s=0.2) for rank in (0, 1))
    (frame, x), key = (sys._getframe(), torch.zeros(2)), ("send", 1, 0, 1)
    unanswered = first.meet(*key, x, frame)
    left_s = first.confirm(unanswered)
    # Half of it was waited at least; the rest is what the backend gets.
    assert left_s is not None and left_s <= 0.1
    assert second.meet("recv", 0, 0, 1, x, frame) == []
    assert first.confirm(unanswered) is None
