"""The first calls on a group and both ends of first messages are compared: a difference raises before data moves."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshcomm
from meshcomm import collectives
from meshcomm.errors import CallMismatchError, CollectiveTimeout
from meshcomm.mesh import Mesh
from meshcomm.testing import Pool
from meshcomm.transport import P2P
from meshcomm.watching.compare import MessageCheck

Call = Callable[[Mesh, bool], object]

# name -> (the call, with `odd` true on rank 3 only; the words for the odd call; the words for the usual call)
CALLS: dict[str, tuple[Call, str, str]] = {
    "shape": (
        lambda m, odd: m.all_reduce("dp", torch.ones(6 if odd else 4)),
        "all_reduce(shape (6), dtype float32, op sum)",
        "all_reduce(shape (4), dtype float32, op sum)",
    ),
    "dtype": (
        lambda m, odd: m.all_reduce("dp", torch.ones(4, dtype=torch.float64 if odd else torch.float32)),
        "all_reduce(shape (4), dtype float64, op sum)",
        "all_reduce(shape (4), dtype float32, op sum)",
    ),
    "reduce op": (
        lambda m, odd: m.all_reduce("dp", torch.ones(4), "max" if odd else "sum"),
        "all_reduce(shape (4), dtype float32, op max)",
        "all_reduce(shape (4), dtype float32, op sum)",
    ),
    "operation": (
        lambda m, odd: m.broadcast("dp", torch.ones(4), src=0) if odd else m.all_reduce("dp", torch.ones(4)),
        "broadcast(shape (4), dtype float32, src 0)",
        "all_reduce(shape (4), dtype float32, op sum)",
    ),
    "root": (
        lambda m, odd: m.broadcast("dp", torch.ones(4), src=1 if odd else 0),
        "broadcast(shape (4), dtype float32, src 1)",
        "broadcast(shape (4), dtype float32, src 0)",
    ),
    "axis": (
        lambda m, odd: m.all_gather("dp", torch.ones(4, 4), axis=1 if odd else 0),
        "all_gather(shape (4, 4), dtype float32, axis 1)",
        "all_gather(shape (4, 4), dtype float32, axis 0)",
    ),
    "other axes of uneven": (
        lambda m, odd: m.all_gather("dp", torch.ones(m.rank, 3 if odd else 2), uneven=True),
        "all_gather(shape (0, 3), dtype float32, uneven True, axis 0)",
        "all_gather(shape (0, 2), dtype float32, uneven True, axis 0)",
    ),
    "barrier": (
        lambda m, odd: m.barrier("dp") if odd else m.reduce_scatter("dp", torch.ones(6)),
        "barrier()",
        "reduce_scatter(shape (6), dtype float32, op sum, axis 0)",
    ),
    "scatter's buffer": (
        lambda m, odd: m.scatter("dp", torch.ones(6), 0, out=torch.ones(2) if odd else None),
        "scatter(shape (2), dtype float32, src 0)",
        "scatter(src 0, out False)",
    ),
    "list": (
        lambda m, odd: m.all_reduce("dp", [torch.ones(2), torch.ones(3 if odd else 2)]),
        "all_reduce(shape ((2), (3)), dtype float32, op sum)",
        "all_reduce(shape ((2), (2)), dtype float32, op sum)",
    ),
    "algorithm": (
        lambda m, odd: m.all_reduce("dp", torch.ones(4), **({"algorithm": "tree"} if odd else {})),
        "all_reduce by tree(shape (4), dtype float32, op sum)",
        "all_reduce(shape (4), dtype float32, op sum)",
    ),
    "no algorithm": (
        lambda m, odd: m.all_reduce("dp", torch.ones(4), **({} if odd else {"algorithm": "ring"})),
        "all_reduce(shape (4), dtype float32, op sum)",
        "all_reduce by ring(shape (4), dtype float32, op sum)",
    ),
    "another algorithm": (
        lambda m, odd: m.all_reduce("dp", torch.ones(4), algorithm="tree" if odd else "ring"),
        "all_reduce by tree(shape (4), dtype float32, op sum)",
        "all_reduce by ring(shape (4), dtype float32, op sum)",
    ),
    "sizes that are known": (
        lambda m, odd: m.all_to_all(
            "dp", torch.ones(6), input_split_sizes=[2] * 3, output_split_sizes=[2] * 3 if odd else None
        ),
        "all_to_all(shape (0), dtype float32, input_split_sizes True, output_split_sizes True, split_axis 0, concat_axis 0)",
        "all_to_all(shape (0), dtype float32, input_split_sizes True, split_axis 0, concat_axis 0)",
    ),
    "an object and a tensor": (
        lambda m, odd: m.objects.all_gather("dp", 1) if odd else m.all_reduce("dp", torch.ones(4)),
        "objects.all_gather()",
        "all_reduce(shape (4), dtype float32, op sum)",
    ),
    "a tensor and an object": (
        lambda m, odd: m.all_gather("dp", torch.ones(4)) if odd else m.objects.all_gather("dp", 1),
        "all_gather(shape (4), dtype float32, axis 0)",
        "objects.all_gather()",
    ),
    "a barrier and an object": (
        lambda m, odd: m.barrier("dp") if odd else m.objects.broadcast("dp", 1, 0),
        "barrier()",
        "objects.broadcast(src 0)",
    ),
    "objects": (
        lambda m, odd: m.objects.scatter("dp", [1, 2, 3], 0) if odd else m.objects.gather("dp", 1, 0),
        "objects.scatter(src 0)",
        "objects.gather(dst 0)",
    ),
    "root of an object": (
        lambda m, odd: m.objects.broadcast("dp", 1, 1 if odd else 0),
        "objects.broadcast(src 1)",
        "objects.broadcast(src 0)",
    ),
}


# Calls in which some rank does not wait: it has sent its part before the others can refuse theirs.
LET_GO = ("operation", "root", "scatter's buffer")


def differs(mesh: Mesh, number: int, name: str, ends: str) -> CallMismatchError | None:
    """Ranks with odd numbers make call `number` along dp, which differs on rank 3. ends: how the error's first line ends."""
    call, odd, usual = CALLS[name]
    if mesh.rank % 2 == 0:
        call(mesh, False)
        return None
    with pytest.raises(CallMismatchError) as caught:
        call(mesh, mesh.rank == 3)
        if name in LET_GO:
            # Some rank may have received its part, which is right. It raises at its next call.
            mesh.all_reduce("dp", torch.ones(1))
    first, given, expected, _ = str(caught.value).splitlines()
    assert first == f'ranks differ in call {number} along "dp": rank 3 is mismatched; {ends}'
    assert given.startswith(f"  given:    rank 3: {odd} at ") and f"{__file__}:" in given
    assert expected.startswith(f"  expected: as ranks 1 5: {usual} at {__file__}:")
    assert caught.value.mismatched_ranks == (3,)
    return caught.value


@pytest.mark.mesh(dp=3, tp=2, via="gloo")
def test_a_difference_is_named_on_every_rank_of_the_group(mesh: Mesh) -> None:
    mesh.all_reduce("dp", torch.ones(1))
    for number, name in enumerate(each for each in CALLS if each not in LET_GO):
        if mesh.rank == 3 and name == "shape":
            time.sleep(0.5)
        differs(mesh, 2 + 2 * number, name, "nothing was sent")
        # Nothing was sent and all ranks left together, so the group can still be used.
        assert mesh.all_reduce("dp", torch.ones(1)).item() == 3


def of_calls_that_let_go() -> None:
    for name in LET_GO:
        with meshcomm.init(dims={"dp": 3, "tp": 2}, device="cpu", timeout_s=30) as mesh:
            error = differs(mesh, 1, name, "this group cannot be used any more")
            if error is not None:
                with pytest.raises(CallMismatchError) as caught:
                    mesh.all_reduce("dp", torch.ones(1))
                assert str(caught.value) == str(error)
            mesh.debug.monitored_barrier(timeout_s=30)


def test_a_difference_in_calls_that_are_under_way_ends_the_group(pool: Pool) -> None:
    pool.run(of_calls_that_let_go, ranks=6)


@pytest.mark.mesh(dp=2, via="gloo")
def test_shapes_of_very_many_axes(mesh: Mesh) -> None:
    """Shapes that are too long to send are compared by a digest: equal ones pass, others raise."""
    shape = [1] * 64
    mesh.all_reduce("dp", torch.ones(shape))
    shape[-1] += mesh.rank
    with pytest.raises(
        CallMismatchError, match=r'in call 2 along "dp": ranks 0 1 do not agree; nothing was sent'
    ):
        mesh.all_reduce("dp", torch.ones(shape))


def interrupted() -> tuple[str, str]:
    """Rank 0 is interrupted while it waits for rank 1 in the comparison, catches the error, and makes its next call."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=20) as mesh:
        mesh.all_reduce("dp", torch.ones(1))
        try:
            if mesh.rank == 0:
                signal.signal(signal.SIGALRM, interrupt)
                signal.setitimer(signal.ITIMER_REAL, 0.1)
            else:
                time.sleep(0.7)
            mesh.all_reduce("dp", torch.ones(4))
        except (KeyboardInterrupt, CallMismatchError) as error:
            first = type(error).__name__
        with pytest.raises(CallMismatchError) as caught:
            mesh.all_reduce("dp", torch.ones(400_000))
        return first, str(caught.value)


def test_an_interrupted_comparison_ends_the_group(pool: Pool) -> None:
    """Otherwise its data would be matched with the data of the next call."""
    (left, text), (told, same) = pool.run(interrupted, ranks=2)
    assert (left, told) == ("KeyboardInterrupt", "CallMismatchError") and text == same
    assert 'rank 0 left call 2 along "dp" before it sent its part; this group cannot be used any more' in text
    assert f"KeyboardInterrupt in all_reduce at {__file__}:" in text


def how_often(setting: Any) -> list[int]:
    with meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=30, validate_calls=setting) as mesh:
        seen = []
        original = mesh._state.transports["dp"].start

        def counted(call: collectives.Call) -> Any:
            if call.x is not None and call.x.dtype == torch.int64:
                seen.append(1)
            return original(call)

        mesh._state.transports["dp"].start = counted  # type: ignore[method-assign]
        counts = []
        for _ in range(70):
            mesh.all_reduce("dp", torch.ones(3))
            counts.append(len(seen))
        return counts


@pytest.mark.parametrize(("setting", "compared"), [(0, 0), (3, 3), (64, 64), ("always", 70)])
def test_how_many_calls_are_compared(pool: Pool, setting: Any, compared: int) -> None:
    for counts in pool.run(how_often, setting, ranks=2):
        assert counts == [min(number + 1, compared) for number in range(70)]


@pytest.mark.mesh(dp=2, via="gloo")
def test_a_profiler_does_not_see_the_comparison(mesh: Mesh) -> None:
    """The comparison may end after the profiler has been freed, and torch would then write into the freed memory."""
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    for config in (None, threads):
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, experimental_config=config) as profile:
            mesh.broadcast("dp", torch.ones(3), src=0)
            mesh.barrier("dp")
        seen = {each.name for each in profile.events() if each.name.startswith("gloo:")}
        assert seen == {"gloo:broadcast", "gloo:barrier"}


@pytest.mark.mesh(dp=2, cp=1, merge={"grad": ("dp", "cp")}, validate_calls=2, via="gloo")
def test_names_of_one_group_share_the_count(mesh: Mesh) -> None:
    """Compared calls are counted by group."""
    x = torch.ones(1)
    for _ in range(4):
        x = mesh.all_reduce("dp" if mesh.rank == 0 else "grad", x)
    assert x.item() == 16


# -- both ends of a message -------------------------------------------------------------------------------

MESSAGES: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
    "shorter": (torch.ones(4), torch.zeros(8)),
    "longer": (torch.ones(8), torch.zeros(4)),
    "dtype": (torch.ones(4), torch.zeros(4, dtype=torch.int32)),
}


def wait_for_the_other_end(mesh: meshcomm.Mesh, number: int) -> None:
    """Wait until the other end has announced message `number` with tag 0 from rank 0 to rank 1."""
    check = mesh._at["pp"].recorder.messages._check
    assert check is not None
    while not check._store.check([check.key(0, 1, 0, number)]):
        time.sleep(0.02)


def ends(case: str, late: int, validate: int | str) -> tuple[str, str, tuple[int, ...]]:
    """Rank 0 sends to rank 1; coord `late` calls second."""
    x, out = MESSAGES[case]
    more = {"options": {"pp": {"timeout_s": 2.0}}, "validate_calls": validate, "reports": ""}
    with meshcomm.init({"mesh": {"dims": {"pp": 2}, "device": "cpu", **more}}) as mesh:
        for _ in range(5 if validate == "always" else 1):
            mesh.shift("pp", torch.ones(2))  # tag 0, the same at both ends
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
        while not mesh.store.check(["over/0", "over/1"]):  # stay until the other rank is done
            time.sleep(0.02)
        return found


@pytest.mark.parametrize(
    ("case", "late", "validate"), [("shorter", 0, 64), ("longer", 1, "always"), ("dtype", 1, 64)]
)
def test_both_ends_of_a_mismatched_message_are_told_at_once(
    pool: Pool, case: str, late: int, validate: Any
) -> None:
    x, out = MESSAGES[case]
    number = 6 if validate == "always" else 2
    # The end that calls first waits for the answer, so it raises before its own timeout.
    for kind, text, odd in pool.run(ends, case, late, validate, ranks=2):
        assert (kind, odd) == ("CallMismatchError", (0, 1))
        assert (
            f"message {number} with tag 0 from rank 0 to rank 1 on pp differs between its ends; nothing was sent"
            in text
        )
        assert f"rank 0 sends float32 ({x.numel()}) at {__file__}:" in text
        dtype = str(out.dtype).removeprefix("torch.")
        assert f"rank 1 has room for {dtype} ({out.numel()}) at {__file__}:" in text


@pytest.mark.mesh(pp=2, validate_calls=64, via="gloo", not_via={"emulated_nccl": "a receive stays queued"})
@pytest.mark.parametrize("sends", [True, False], ids=["sender", "receiver"])
@pytest.mark.parametrize(
    "x", [torch.ones(3), torch.ones(16, dtype=torch.int64)], ids=["float", "like a header"]
)
def test_a_handshake_at_one_end_only_is_named(mesh: Mesh, x: torch.Tensor, sends: bool) -> None:
    """Also where the buffer has the size of the header. The ends go on with the same numbers."""
    me, kind = mesh.coord("pp"), f"{x.dtype} \\({len(x)}\\)".removeprefix("torch.")
    text = rf"sends {kind} without a h(.|\n)*shape that a handshake tells(.|\n)*try: *handshake=True"
    if sends:
        text = rf"sends with handshake=True(.|\n)*{kind}, and expects no h(.|\n)*try: *no handshake=True"
    with pytest.raises(CallMismatchError, match=text):
        if me:
            mesh.recv("pp", torch.zeros_like(x) if sends else None, src=0)
        else:
            mesh.send("pp", x, 1, handshake=sends)
    for shape in ((2,), (3,)):
        out, began = torch.zeros(shape), time.monotonic()
        _ = mesh.recv("pp", out, src=0) if me else mesh.send("pp", torch.ones(shape), 1)
        assert time.monotonic() - began < 3 and out.sum() == out.numel() * me


def test_an_end_that_stays_silent_is_waited_for_within_the_timeout() -> None:
    store = dist.HashStore()
    first, second = (MessageCheck(store, "pp", [0, 1], rank, 64, timeout_s=0.2) for rank in (0, 1))
    frame, x = sys._getframe(), torch.zeros(2)
    key, other = (first.key(0, 1, tag, 1) for tag in (0, 5))
    sends = first.announce([P2P("send", x, 1, 0)], [("send", 1, 0, 1)], frame)
    assert sends == ([key], [(key, 1)], {})
    heard: list[Any] = []
    left_s = first.confirm([(key, 1)], lambda *told: heard.append(told))
    # It has waited for at least half of the time; the backend gets the rest.
    assert left_s is not None and left_s <= 0.1 and heard == [(key, ())]
    comes = [P2P("recv", x, 0, tag) for tag in (0, 5)]
    recvs = second.announce(comes, [("recv", 0, 0, 1), ("recv", 0, 5, 1)], frame)
    assert recvs == ([key, other], [(other, 0)], {key: [key]})
    assert first.confirm([(key, 1)], lambda *told: heard.append(told)) is None
    assert heard[1:] == [(key, [key, other])]


def sent(*tags: int) -> list[tuple[torch.Tensor, int, int]]:
    return [(torch.full((4,), 1.0 + place), 1, tag) for place, tag in enumerate(tags)]


def rooms(*tags: int) -> list[tuple[torch.Tensor, int, int]]:
    return [(torch.zeros(4), 0, tag) for tag in tags]


# Correct programs whose ends make the messages in different calls: the calls of coord 0, and the calls of coord 1.
RIGHT: dict[str, tuple[Callable[[Mesh], object], Callable[[Mesh], Any]]] = {
    "handshake": (
        lambda m: m.send("pp", sent(0)[0][0], 1, handshake=True),
        lambda m: [m.recv("pp", src=0)],
    ),
    "isend with a handshake": (
        lambda m: m.isend("pp", sent(0)[0][0], 1, handshake=True).wait(),
        lambda m: [m.recv("pp", src=0)],
    ),
    "two sends at once": (
        lambda m: m.exchange("pp", sent(0, 0)),
        lambda m: [m.recv("pp", torch.zeros(4), src=0) for _ in range(2)],
    ),
    "two receives at once": (
        lambda m: [m.send("pp", x, to) for x, to, _ in sent(0, 0)],
        lambda m: m.exchange("pp", recvs=rooms(0, 0)),
    ),
    "tags in another order": (
        lambda m: m.exchange("pp", sent(1, 2)),
        lambda m: [m.recv("pp", torch.zeros(4), src=0, tag=tag) for tag in (2, 1)][::-1],
    ),
    "isends and an exchange": (
        lambda m: [each.wait() for each in [m.isend("pp", x, to, tag) for x, to, tag in sent(0, 3, 0)]],
        lambda m: m.exchange("pp", recvs=rooms(0, 3, 0)),
    ),
    "three and one": (
        lambda m: (m.exchange("pp", sent(0, 1, 0)[:2]), m.send("pp", sent(0, 1, 0)[2][0], 1)),
        lambda m: m.exchange("pp", recvs=rooms(0)) + m.exchange("pp", recvs=rooms(1, 0)),
    ),
    "both ways": (
        lambda m: m.exchange("pp", sent(0, 0), [(torch.zeros(4), 1)]),
        lambda m: [
            m.recv("pp", torch.zeros(4), src=0),
            *[(m.send("pp", torch.ones(4), 0), m.recv("pp", torch.zeros(4), src=0))[1]],
        ],
    ),
}


@pytest.mark.mesh(pp=2, via="gloo")
def test_no_end_waits_for_what_its_peer_makes_in_a_later_call(mesh: Mesh) -> None:
    silent = []
    confirm = MessageCheck.confirm

    def confirmed(self: MessageCheck, *args: Any) -> float | None:
        silent.append(confirm(self, *args))
        return silent[-1]

    MessageCheck.confirm = confirmed  # type: ignore[method-assign]
    try:
        for late in range(2):
            for name, (first, second) in RIGHT.items():
                check = mesh._at["pp"].recorder.messages._check
                assert check is not None
                mesh.barrier()
                check.pairs.clear()
                if mesh.rank == late:
                    time.sleep(0.02)
                found = (second if mesh.rank else first)(mesh)
                if mesh.rank:
                    assert [x.tolist() for x in found] == [[1.0 + n] * 4 for n in range(len(found))], name
                assert not any(silent), name
    finally:
        MessageCheck.confirm = confirm  # type: ignore[method-assign]
