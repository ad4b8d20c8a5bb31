"""Calls on the fast path against the same calls on the checked one: values, counts, records, refusals, failures."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import nn

import meshcomm
from meshcomm.collectives import ALL_REDUCE
from meshcomm.errors import CommunicationError, MeshcommError
from meshcomm.testing import Pool
from meshcomm.transport import ProcessGroupTransport

DTYPES = (
    torch.float32,
    torch.float32,
    torch.float32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.bfloat16,
)


KINDS: Final = [
    "send",
    "send",
    "isend",
    "exchange",
    "iexchange",
    "shift",
    "line",
    "all_reduce",
    "later",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "any",
    "handshake",
    "ring",
]


def some(rng: random.Random, rank: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of one of the kinds that calls are given; both ranks make the same kind."""
    values = torch.arange(int(np.prod(shape)) or 1)[: int(np.prod(shape))].reshape(shape) + 10 * rank
    x = values.to(dtype) if dtype != torch.bool else values % 2 == 0
    kind = rng.choice(("plain", "plain", "plain", "columns", "negative", "conjugate", "watched", "parameter"))
    if kind == "columns" and x.ndim == 2:
        return x.t().contiguous().t()
    if kind == "negative" and dtype == torch.float32:
        return torch.complex(x, x).conj().imag
    if kind == "conjugate" and dtype == torch.complex64:
        return x.conj()
    if kind == "watched" and dtype == torch.float32:
        return x.requires_grad_()
    if kind == "parameter" and dtype == torch.float32:
        return nn.Parameter(x, requires_grad=False)
    return x


def one_call(mesh: Any, rng: random.Random) -> Any:
    """A random call, the same on both ranks; a refused one is refused on both before anything moves."""
    me = mesh.coord("dp")
    dtype, shape = rng.choice(DTYPES), rng.choice(((4,), (2, 3), (), (0,), (6, 2)))
    x, out = some(rng, me, dtype, shape), some(rng, me, dtype, shape)
    what = rng.choice(KINDS)
    if what in ("send", "isend"):
        # Only the receiver has it, and the sender would not hear of its refusal.
        out.requires_grad_(False)
    # Of what is wrong here both ranks hear at their own door.
    other = rng.choice((1 - me,) * 12 + (me, 2, True, float(1 - me), np.int64(1 - me), str(1 - me)))
    tag = rng.choice((0, 0, 0, 7, 7, True, 7.0, -1, 1 << 30))
    if what in ("send", "isend"):
        if what == "isend":
            call: Any = (
                (lambda: mesh.isend("dp", x, other, tag))
                if me == 0
                else lambda: mesh.irecv("dp", out, other, tag)
            )
            return call().wait()
        return mesh.send("dp", x, other, tag) if me == 0 else mesh.recv("dp", out, src=other, tag=tag)
    if what in ("exchange", "iexchange"):
        sends, recvs = (
            [(x, other, tag), (x, other)],
            [(out, other, tag), (torch.empty(shape, dtype=dtype), other)],
        )
        if what == "exchange":
            return mesh.exchange("dp", sends, recvs)
        return mesh.exchange("dp", sends, recvs, async_op=True).wait()
    if what == "shift":
        return mesh.shift("dp", x, rng.choice((1, 1, -1, 3, 2, True, 1.0, np.int64(1))))
    if what == "line":
        return mesh.shift("dp", x, rng.choice((1, -1)), wrap=False)
    if what == "any":
        if me == 0:
            mesh.send("dp", torch.ones(4), 1, 3)
            return None
        return mesh.recv_any("dp", torch.empty(4), tag=3)
    if what == "handshake":
        return mesh.shift("dp", x, handshake=True)
    axis = rng.choice((0, 0, 1))
    into = rng.choice((None, out, torch.empty(2 * shape[0] if shape else 2, *shape[1:], dtype=dtype)))
    match what:
        case "all_reduce":
            return mesh.all_reduce("dp", x, rng.choice(("sum", "max")))
        case "later":
            return mesh.all_reduce("dp", x, rng.choice(("sum", "max", ["sum"])), async_op=True).wait()
        case "all_gather":
            return mesh.all_gather("dp", x, axis, out=into)
        case "reduce_scatter":
            part = None if into is None or not shape else torch.empty(shape[0] // 2, *shape[1:], dtype=dtype)
            return mesh.reduce_scatter("dp", x, axis, out=part)
        case "all_to_all":
            return mesh.all_to_all("dp", x, out=rng.choice((None, out)))
        case "broadcast":
            return mesh.broadcast("dp", x, rng.choice((0, 1, True)))
        case "reduce":
            return mesh.reduce("dp", x, rng.choice((0, 1, True)))
    return mesh.all_reduce(
        "dp", torch.full((6,), float(me)), algorithm="ring"
    )  # over messages that are a part


def prepared_kinds(comm: Any) -> int:
    return len(comm._ready) + len(comm.messages._fast)


def plain(found: Any) -> Any:
    if isinstance(found, torch.Tensor):
        found = found.detach().resolve_conj().resolve_neg()
        return str(found.dtype), tuple(found.shape), found.to(torch.complex128).flatten().tolist()
    return [plain(each) for each in found] if isinstance(found, (list, tuple)) else found


def program(seed: int, compared: int, fast: bool) -> tuple[list[Any], dict[str, Any], int]:
    """What a program gave, what was noted of it, and how many kinds of calls were prepared at the end."""
    rng = random.Random(seed)
    with meshcomm.init(dims={"dp": 2}, device="cpu", validate_calls=compared, timeout_s=60) as mesh:
        recorder = mesh._at["dp"].recorder
        found: list[Any] = []
        for _ in range(120):
            if not fast:
                recorder.trace(None)  # forgets what is prepared
            try:
                found.append(plain(one_call(mesh, rng)))
            except MeshcommError as error:
                found.append((type(error).__name__, str(error)))
        prepared = prepared_kinds(mesh._at["dp"])
        noted = {
            "counts": [(row.dim, row.call, row.async_op, row.calls, row.nbytes) for row in mesh.stats().rows],
            "status": recorder.status(),
            "ring": [
                entry and (entry[0].name, entry[0].call, entry[1], entry[2].co_name, entry[3])
                for entry in recorder.ring
            ],
            "recent": [
                (
                    message.name,
                    message.call,
                    message.place[0].co_name,
                    message.place[1],
                    message.nbytes,
                    message.parts,
                )
                for message in recorder.messages.recent
            ],
            "over": [
                call["over"] is not None and call["began"] <= call["over"] for call in recorder.history()
            ],
            "left": (recorder.under_way, recorder.messages.waiting),
        }
        assert all(noted["over"])
        return found, noted, prepared


@pytest.mark.parametrize(("seed", "compared"), [(0, 0), (2, 3)])
def test_a_program_gives_and_notes_the_same_on_both_paths(pool: Pool, seed: int, compared: int) -> None:
    short = pool.run(program, seed, compared, True, ranks=2)
    long = pool.run(program, seed, compared, False, ranks=2)
    for (values, noted, prepared), (values_long, noted_long, _) in zip(short, long, strict=True):
        assert prepared > 8
        assert values == values_long
        for name, facts in noted.items():
            assert facts == noted_long[name], name
        assert noted["left"] == (None, None)
        refused = [each for each in values if isinstance(each, tuple) and str(each[0]).endswith("Error")]
        assert 10 < len(refused) < 120


# -- what is refused at the door, before and after the same call has been prepared ------------------------

ODD: dict[str, Callable[[], Any]] = {
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(2)]),
    "mkldnn": lambda: torch.ones(4).to_mkldnn(),
    "meta": lambda: torch.ones(4, device="meta"),
    "sparse": lambda: torch.ones(4).to_sparse(),
    "a list": lambda: [1.0, 2.0],
}

CALLS: dict[str, Callable[[Any, Any], object]] = {
    "all_reduce": lambda mesh, x: mesh.all_reduce("dp", x),
    "all_reduce later": lambda mesh, x: mesh.all_reduce("dp", x, async_op=True),
    "reduce": lambda mesh, x: mesh.reduce("dp", x, 1),
    "broadcast": lambda mesh, x: mesh.broadcast("dp", x, 1),
    "all_gather": lambda mesh, x: mesh.all_gather("dp", x),
    "all_gather out": lambda mesh, x: mesh.all_gather("dp", torch.ones(2), out=x),
    "reduce_scatter": lambda mesh, x: mesh.reduce_scatter("dp", x),
    "reduce_scatter out": lambda mesh, x: mesh.reduce_scatter("dp", torch.ones(8), out=x),
    "all_to_all": lambda mesh, x: mesh.all_to_all("dp", x),
    "all_to_all out": lambda mesh, x: mesh.all_to_all("dp", torch.ones(4), out=x),
    "send": lambda mesh, x: mesh.send("dp", x, 1 - mesh.coord("dp")),
    "isend": lambda mesh, x: mesh.isend("dp", x, 1 - mesh.coord("dp")),
    "recv": lambda mesh, x: mesh.recv("dp", x, src=1 - mesh.coord("dp")),
    "irecv": lambda mesh, x: mesh.irecv("dp", x, 1 - mesh.coord("dp")),
    "exchange": lambda mesh, x: mesh.exchange("dp", [(x, 1 - mesh.coord("dp"))]),
    "exchange out": lambda mesh, x: mesh.exchange("dp", [], [(x, 1 - mesh.coord("dp"))]),
    "shift": lambda mesh, x: mesh.shift("dp", x),
}
# What a message carries as it is, where a call in place would change what autograd watches.
WATCHED = set(CALLS) - {"send", "isend", "exchange"}


def all_once(mesh: Any) -> None:
    me = mesh.coord("dp")
    for _ in range(2):
        mesh.all_reduce("dp", torch.ones(4))
        mesh.all_reduce("dp", torch.ones(4), async_op=True).wait()
        mesh.reduce("dp", torch.ones(4), 1)
        mesh.broadcast("dp", torch.ones(4), 1)
        mesh.all_gather("dp", torch.ones(4))
        mesh.reduce_scatter("dp", torch.ones(4))
        mesh.all_to_all("dp", torch.ones(4))
        mesh.exchange("dp", [(torch.ones(4), 1 - me)], [(torch.ones(4), 1 - me)])
        mesh.shift("dp", torch.ones(4))
        mesh.all_reduce("dp", torch.ones(4), algorithm="ring")  # over a tag of the library's own


def refusals(mesh: Any) -> dict[tuple[str, str], str]:
    warnings.simplefilter("ignore")
    found = {}
    for name, call in CALLS.items():
        made = dict(ODD)
        if name in WATCHED:
            made["watched"] = lambda: torch.ones(4, requires_grad=True)
        for kind, make in made.items():
            try:
                call(mesh, make())
            except MeshcommError as error:
                found[name, kind] = f"{type(error).__name__}: {error}"
            except TypeError as error:  # a list of numbers instead of a list of tensors
                found[name, kind] = f"TypeError: {error}"
            else:
                found[name, kind] = "nothing"
    peer, x = 1 - mesh.coord("dp"), torch.ones(4)
    # Equal to the peer and the tag of prepared messages, and no coord and no tag.
    for to, tag in ((bool(peer), 0), (float(peer), 0), (peer, False), (peer, 0.0), (peer, 1 << 30)):
        wrong: dict[str, Callable[[], object]] = {
            "send": lambda to=to, tag=tag: mesh.send("dp", x, to, tag),
            "isend": lambda to=to, tag=tag: mesh.isend("dp", x, to, tag),
            "recv": lambda to=to, tag=tag: mesh.recv("dp", x, src=to, tag=tag),
            "irecv": lambda to=to, tag=tag: mesh.irecv("dp", x, to, tag),
            "exchange": lambda to=to, tag=tag: mesh.exchange("dp", [(x, to, tag)]),
        }
        for name, made_wrong in wrong.items():
            with pytest.raises(MeshcommError) as caught:
                made_wrong()
            found[name, f"{to!r} {tag!r}"] = str(caught.value)
    return found


def cold_and_warm() -> tuple[dict[tuple[str, str], str], dict[tuple[str, str], str]]:
    with meshcomm.init(dims={"dp": 2}, device="cpu", validate_calls=0, timeout_s=30) as mesh:
        cold = refusals(mesh)
        all_once(mesh)
        return cold, refusals(mesh)


def test_no_call_is_let_in_for_having_been_made_before(pool: Pool) -> None:
    for cold, warm in pool.run(cold_and_warm, ranks=2):
        assert "nothing" not in cold.values(), cold
        assert warm == cold


# -- a call that the backend gives up on --------------------------------------------------------------------


class Failing:
    """A Work that cannot be waited for."""

    def wait(self, timeout: object = None) -> bool:
        raise RuntimeError("the wire is cut")

    def is_completed(self) -> bool:
        return True


def at_start(*_: object) -> Any:
    raise RuntimeError("there is no wire")


def failures(fast: bool) -> list[Any]:
    found: list[Any] = []
    with meshcomm.init(dims={"dp": 2}, device="cpu", validate_calls=0, timeout_s=30) as mesh:
        all_once(mesh)
        comm, peer, x, y = mesh._at["dp"], 1 - mesh.coord("dp"), torch.ones(4), torch.ones(4)
        recorder = comm.recorder
        recorder.inquire = lambda recorder, where, error: CommunicationError(
            f"{where}: {error}",
            given=str(recorder.status()["messages"]["waiting"] is not None or recorder.inside),
            expected="a wire",
            hint="another one",
        )
        own = ProcessGroupTransport.start_p2p, ProcessGroupTransport.start
        kept = dict(comm._ready)
        for start in (at_start, lambda *_: Failing()):
            ProcessGroupTransport.start_p2p = lambda *_, start=start: [start()]  # type: ignore[method-assign,assignment]
            if fast:
                key = (ALL_REDUCE, "sum", -1, True, torch.float32)
                comm._ready[key] = comm._ready[key]._replace(start=start)
            else:
                ProcessGroupTransport.start = start  # type: ignore[method-assign,assignment]
            try:
                for call in (
                    lambda: mesh.send("dp", x, peer),
                    lambda: mesh.recv("dp", x, src=peer),
                    lambda: mesh.isend("dp", x, peer).wait(),
                    lambda: mesh.irecv("dp", x, peer).wait(),
                    lambda: mesh.exchange("dp", [(x, peer)], [(y, peer)]),
                    lambda: mesh.exchange("dp", [(x, peer)], [(y, peer)], async_op=True).wait(),
                    lambda: mesh.shift("dp", x),
                    lambda: mesh.all_reduce("dp", x, async_op=True).wait(),
                ):
                    if not fast:
                        recorder.trace(None)  # what failed is prepared, too
                    with pytest.raises(CommunicationError) as caught:
                        call()
                    assert recorder.messages.waiting is None and recorder.under_way is None
                    found.append((str(caught.value), type(caught.value.__cause__).__name__))
            finally:
                ProcessGroupTransport.start_p2p, ProcessGroupTransport.start = own  # type: ignore[method-assign]
        comm._ready.update(kept)
        recorder.trace(None)
        found += [(row.call, row.async_op, row.calls, row.nbytes) for row in mesh.stats().rows]
        found += [(call["call"], call["over"] is not None) for call in recorder.history()]
        found.append(dict(recorder.messages.begun))
        mesh.barrier("dp")
    return found


def test_a_failed_call_is_told_and_counted_the_same(pool: Pool) -> None:
    short, long = pool.run(failures, True, ranks=2), pool.run(failures, False, ranks=2)
    assert short == long
    assert "send to 1 along" in short[0][0][0] and "there is no wire" in short[0][0][0]


# -- when nothing may be prepared -----------------------------------------------------------------------------


def kept() -> list[int]:
    counts = []
    with meshcomm.init(dims={"dp": 2}, device="cpu", validate_calls=2, timeout_s=30) as mesh:
        comm = mesh._at["dp"]
        for _ in range(4):
            mesh.shift("dp", torch.ones(4))
            counts.append(prepared_kinds(comm))
        comm.recorder.trace(None)
        counts.append(prepared_kinds(comm))
        mesh.shift("dp", torch.ones(4))
    return [*counts, prepared_kinds(comm)]


def test_messages_are_prepared_when_they_are_no_longer_compared_and_let_go_with_the_mesh(pool: Pool) -> None:
    # Two are compared; the third finds that it is not.
    assert pool.run(kept, ranks=2) == [[0, 0, 2, 2, 0, 0]] * 2
