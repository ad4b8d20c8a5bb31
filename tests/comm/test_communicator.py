"""Calls on the fast path compared with the same calls on the checked path: values, counts, records, failures."""

from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import nn

import meshcomm
from meshcomm.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL
from meshcomm.comm import communicator
from meshcomm.comm.check_call import check
from meshcomm.comm.request import Options
from meshcomm.errors import CallMismatchError, CommunicationError, MeshcommError
from meshcomm.testing import Pool
from meshcomm.transport import ProcessGroupTransport
from tests.ranks import on_ranks

DTYPES = (*[torch.float32] * 3, torch.int64, torch.bool, torch.complex64, torch.bfloat16)


def some(rng: random.Random, rank: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of one of the kinds that users pass; both ranks make the same kind."""
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


def received_any(mesh: Any, me: int) -> Any:
    return mesh.send("dp", torch.ones(4), 1, 3) if me == 0 else mesh.recv_any("dp", torch.empty(4), tag=3)


# Arguments: the mesh, a random generator, this rank's coord, a tensor, a receive buffer, a peer and a tag (maybe invalid).
KINDS: Final[list[Callable[..., Any]]] = [
    *[
        lambda m, rng, me, x, y, to, tag: (
            m.send("dp", x, to, tag) if me == 0 else m.recv("dp", y, src=to, tag=tag)
        )
    ]
    * 2,
    lambda m, rng, me, x, y, to, tag: (
        m.isend("dp", x, to, tag) if me == 0 else m.irecv("dp", y, to, tag)
    ).wait(),
    lambda m, rng, me, x, y, to, tag: m.exchange("dp", *messages(x, y, to, tag)),
    lambda m, rng, me, x, y, to, tag: m.exchange("dp", *messages(x, y, to, tag), async_op=True).wait(),
    lambda m, rng, me, x, y, to, tag: m.shift("dp", x, rng.choice((1, 1, -1, 3, 2, True, 1.0, np.int64(1)))),
    lambda m, rng, me, x, y, to, tag: m.shift("dp", x, rng.choice((1, -1)), wrap=False),
    lambda m, rng, me, x, y, to, tag: received_any(m, me),
    lambda m, rng, me, x, y, to, tag: m.all_reduce("dp", x, rng.choice(("sum", "max"))),
    lambda m, rng, me, x, y, to, tag: m.all_reduce(
        "dp", x, rng.choice(("sum", "max", ["sum"])), async_op=True
    ).wait(),
    lambda m, rng, me, x, y, to, tag: m.all_gather("dp", x, rng.choice((0, 0, 1)), out=into(rng, x, y, 2)),
    lambda m, rng, me, x, y, to, tag: m.reduce_scatter("dp", x, out=into(rng, x, None, 0.5)),
    lambda m, rng, me, x, y, to, tag: m.all_to_all("dp", x, out=rng.choice((None, y))),
    lambda m, rng, me, x, y, to, tag: m.broadcast("dp", x, rng.choice((0, 1, True))),
    lambda m, rng, me, x, y, to, tag: m.reduce("dp", x, rng.choice((0, 1, True))),
    # An algorithm that is made of messages.
    lambda m, rng, me, x, y, to, tag: m.all_reduce("dp", torch.full((6,), float(me)), algorithm="ring"),
]


def messages(x: Any, y: Any, to: Any, tag: Any) -> tuple[Any, Any]:
    return [(x, to, tag), (x, to)], [(y, to, tag), (torch.empty(x.shape, dtype=x.dtype), to)]


def into(rng: random.Random, x: Any, y: Any, times: float) -> Any:
    shape = (int(times * x.shape[0]), *x.shape[1:]) if x.ndim else (2,)
    return rng.choice((None, y, torch.empty(shape, dtype=x.dtype)))


def one_call(mesh: Any, rng: random.Random) -> Any:
    """A random call, the same on both ranks. If it is refused, both ranks refuse it before any data moves."""
    me = mesh.coord("dp")
    dtype, shape = rng.choice(DTYPES), rng.choice(((4,), (2, 3), (), (0,), (6, 2)))
    x, out = some(rng, me, dtype, shape), some(rng, me, dtype, shape)
    number = rng.randrange(len(KINDS))
    if number < 3:
        # Only the receiver has an `out`, and the sender would not learn that it is refused.
        out.requires_grad_(False)
    # Each rank detects these mistakes by itself.
    peer = rng.choice((1 - me,) * 12 + (me, 2, True, float(1 - me), np.int64(1 - me), str(1 - me)))
    return KINDS[number](mesh, rng, me, x, out, peer, rng.choice((0, 0, 0, 7, 7, True, 7.0, -1, 1 << 30)))


def prepared_kinds(comm: Any) -> tuple[int, int]:
    return len(comm._ready), len(comm.messages._fast)


def plain(found: Any) -> Any:
    if isinstance(found, torch.Tensor):
        found = found.detach().resolve_conj().resolve_neg()
        return str(found.dtype), tuple(found.shape), found.to(torch.complex128).flatten().tolist()
    return [plain(each) for each in found] if isinstance(found, (list, tuple)) else found


def program(seed: int, compared: int, fast: bool) -> tuple[list[Any], dict[str, Any], int]:
    """The results of a program, the records of its calls, and the number of kinds of calls prepared at the end."""
    rng = random.Random(seed)
    with meshcomm.init(dims={"dp": 2}, device="cpu", validate_calls=compared, timeout_s=60) as mesh:
        recorder = mesh._at["dp"].recorder
        found: list[Any] = []
        for _ in range(120):
            if not fast:
                recorder.trace(None)  # drops the prepared calls
            try:
                found.append(plain(one_call(mesh, rng)))
            except MeshcommError as error:
                found.append((type(error).__name__, str(error)))
        status = recorder.status()
        for noted_time in ("began", "over"):
            assert status["last"].pop(noted_time) is not None
        noted = {
            "counts": [(row.dim, row.call, row.async_op, row.calls, row.nbytes) for row in mesh.stats().rows],
            "status": status,
            "ring": [
                entry and (entry[0].name, entry[0].call, entry[1], entry[2].co_name, entry[3])
                for entry in recorder.ring
            ],
            "recent": [
                (each.name, each.call, each.place[0].co_name, each.place[1], each.nbytes, each.parts)
                for each in recorder.messages.recent
            ],
        }
        assert (recorder.under_way, recorder.messages.waiting) == (None, None)
        for call in recorder.history():
            assert call["over"] is not None and call["began"] <= call["over"]
        return found, noted, sum(prepared_kinds(mesh._at["dp"]))


@pytest.mark.parametrize(("seed", "compared"), [(0, 0), (2, 3)])
def test_a_program_gives_and_notes_the_same_on_both_paths(pool: Pool, seed: int, compared: int) -> None:
    short = pool.run(program, seed, compared, True, ranks=2)
    long = pool.run(program, seed, compared, False, ranks=2)
    for (values, noted, prepared), (values_long, noted_long, _) in zip(short, long, strict=True):
        assert prepared > 8
        assert values == values_long
        assert noted == noted_long
        refused = [each for each in values if isinstance(each, tuple) and str(each[0]).endswith("Error")]
        assert 10 < len(refused) < 120


# -- tensors that only look like prepared ones -------------------------------------------------------------


def conjugate(value: int) -> torch.Tensor:
    """One element, -value, whose memory holds the value: dense, with a lazy negation."""
    return torch.tensor([complex(0, value)]).conj().imag


def all_once(mesh: Any) -> None:
    me, x = mesh.coord("dp"), torch.ones(4)
    for _ in range(2):
        for op in ("sum", "max"):
            mesh.all_reduce("dp", x.clone(), op)
            mesh.reduce_scatter("dp", x, op=op)
        mesh.all_reduce("dp", x.clone(), async_op=True).wait()
        mesh.reduce("dp", x, 1)
        mesh.broadcast("dp", x, 0)
        mesh.all_gather("dp", x, axis=-1)
        mesh.all_gather("dp", x)
        mesh.all_to_all("dp", x, -1, -1)
        mesh.all_to_all("dp", x)
        mesh.exchange("dp", [(x, 1 - me)], [(torch.ones(4), 1 - me)])
        mesh.shift("dp", x)


@pytest.mark.mesh(dp=2, validate_calls=0, via="gloo")
def test_a_tensor_that_is_not_as_the_prepared_ones_is_not_sent_as_it_is(mesh: Any) -> None:
    all_once(mesh)
    coord, columns = mesh.coord("dp"), torch.arange(6.0).view(2, 3).t()
    assert conjugate(2).is_neg() and conjugate(2).is_contiguous()
    assert mesh.all_gather("dp", conjugate(2)).tolist() == [-2, -2]
    assert mesh.all_reduce("dp", conjugate(2)).item() == -4
    assert mesh.all_reduce("dp", conjugate(coord), "max").item() == 0
    assert mesh.reduce_scatter("dp", torch.stack([conjugate(coord)] * 2), op="max").item() == 0
    assert mesh.broadcast("dp", conjugate(3) if coord else torch.tensor([-5.0]), src=0).item() == -5
    assert torch.equal(mesh.all_gather("dp", columns), torch.cat([columns, columns]))
    assert mesh.all_gather("dp", torch.tensor(3.0)).tolist() == [3, 3]
    # -1 is axis 0 of the tensors that the calls were prepared with, and axis 1 of these.
    squares = [torch.arange(4.0).view(2, 2) + 10 * each for each in range(2)]
    assert torch.equal(mesh.all_gather("dp", squares[coord], axis=-1), torch.cat(squares, 1))
    moved = torch.cat([x[:, coord : coord + 1] for x in squares], 1)
    assert torch.equal(mesh.all_to_all("dp", squares[coord], -1, -1), moved)


# -- a call that fails in the backend ------------------------------------------------------------------------


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
        kept = dict(comm._ready)
        for start in (at_start, lambda *_: Failing()):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ProcessGroupTransport, "start_p2p", lambda *_, start=start: [start()])
                if fast:
                    key = (ALL_REDUCE, "sum", -1, True, torch.float32)
                    comm._ready[key] = comm._ready[key]._replace(start=start)
                else:
                    patch.setattr(ProcessGroupTransport, "start", start)
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
                        recorder.trace(None)  # calls that failed are prepared as well
                    with pytest.raises(CommunicationError) as caught:
                        call()
                    assert recorder.messages.waiting is None and recorder.under_way is None
                    found.append((str(caught.value), type(caught.value.__cause__).__name__))
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


@on_ranks(2)
def test_calls_are_prepared_when_they_are_no_longer_compared_and_let_go_with_the_mesh() -> None:
    with meshcomm.init(dims={"dp": 2}, device="cpu", validate_calls=2, timeout_s=30) as mesh:
        comm = mesh._at["dp"]
        # Two are compared; the third finds that comparing is over. A message has two ends.
        for number in range(4):
            mesh.shift("dp", torch.ones(4))
            mesh.all_gather("dp", torch.ones(4))
            assert prepared_kinds(comm) == ((0, 0) if number < 2 else (1, 2))
        comm.recorder.trace(None)
        assert prepared_kinds(comm) == (0, 0)
        mesh.shift("dp", torch.ones(4))
    assert prepared_kinds(comm) == (0, 0)


# -- an option that is added later --------------------------------------------------------------------------


# Options with one more field.
WithOption: Any = namedtuple("WithOption", (*Options._fields, "interleave"), defaults=(*Options(), False))


@pytest.mark.mesh(dp=2, validate_calls=0, via="gloo")
def test_an_option_that_the_fast_path_does_not_know_takes_the_stages(mesh: Any) -> None:
    seen = []

    def checked(comm: Any, request: Any) -> Any:
        seen.append(request.options.interleave)
        return check(comm, request)

    comm, x = mesh._at["dp"], torch.ones(4)
    calls = [
        partial(comm.collective, ALL_GATHER, x),
        partial(comm.collective, ALL_REDUCE, x, False, "sum"),
        partial(comm.collective, ALL_TO_ALL, x),
    ]
    for call in calls:
        for _ in range(70):
            call()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(communicator, "check", checked)
            seen.clear()
            call()
            assert seen == []
            call(options=WithOption(interleave=True))
            assert seen == [True]
    with pytest.raises(TypeError, match="interleave"):
        mesh.all_gather("dp", torch.ones(4), interleave=True)


@pytest.mark.mesh(dp=2, via="gloo", timeout_s=20)
def test_an_option_that_somebody_adds_is_compared(mesh: Any) -> None:
    comm, x = mesh._at["dp"], torch.ones(4)
    assert comm.collective(ALL_GATHER, x, options=WithOption(interleave=True)).numel() == 8
    with pytest.raises(CallMismatchError, match="interleave True"):
        comm.collective(ALL_GATHER, x, options=WithOption(interleave=mesh.rank == 1))


@pytest.mark.mesh(dp=2, validate_calls=0, via="gloo", timeout_s=20)
def test_a_scatter_tells_its_slices_however_often_it_was_made(mesh: Any) -> None:
    for size in (4, 4, 4, 8):
        x = torch.arange(float(size)) if mesh.coord("dp") == 1 else None
        assert torch.equal(mesh.scatter("dp", x, src=1), torch.arange(float(size)).chunk(2)[mesh.coord("dp")])
