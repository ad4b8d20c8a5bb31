"""Collectives and messages along dims, compared with NumPy on the inputs of all ranks."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable
from itertools import count, product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import meshcomm
from meshcomm.comm.handle import Handle, UnwaitedHandle
from meshcomm.errors import CallMismatchError
from meshcomm.layout import Dims
from meshcomm.mesh import Mesh
from meshcomm.reductions import REDUCTIONS
from meshcomm.testing import Pool
from meshcomm.testing.emulated_nccl import NAME, emulated_nccl, host_syncs
from meshcomm.transport.support import reduce_refusal
from meshcomm.transport.torch_private import DispatchMode, leaves_of

pytestmark = pytest.mark.long

# The simulator runs all combinations of three dims. On processes, one order of four ranks gives a contiguous group, a
# strided one, and one in another order.
DIMS = {"pp": 2, "dp": 2, "tp": 2}
MERGE = {"model": ("pp", "tp"), "data": ("tp", "dp")}
ORDER = [6, 3, 1, 4, 0, 7, 5, 2]
FEW: dict[str, Any] = {
    "dims": {"dp": 2, "tp": 2},
    "merge": {"data": ("tp", "dp")},
    "rank_order": [2, 0, 3, 1],
}
DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.uint16,
    torch.int32, torch.uint32, torch.int64, torch.uint64, torch.bool, torch.complex64, torch.complex128,
    torch.float8_e4m3fn,
)  # fmt: skip
ORACLE: dict[str, Any] = {
    "sum": lambda a: a.sum(0),
    "avg": lambda a: a.mean(0),
    "premul_sum": lambda a: (a * 0.5).sum(0),
    "product": lambda a: a.prod(0),
    "min": lambda a: a.min(0),
    "max": lambda a: a.max(0),
    "band": lambda a: np.bitwise_and.reduce(a, 0),
    "bor": lambda a: np.bitwise_or.reduce(a, 0),
    "bxor": lambda a: np.bitwise_xor.reduce(a, 0),
}


def names(mesh: Mesh) -> tuple[Dims, ...]:
    """Groups of two, and merged ones of four."""
    return tuple(name for name in ("pp", "dp", "tp", "model", "data") if name in mesh.layout.names)


class Allocations(DispatchMode):  # type: ignore[misc]
    """Adds up the bytes of newly allocated tensors that operators return within the block."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in leaves_of((args, kwargs)) if torch.is_tensor(x)}
        for x in leaves_of(found):
            if torch.is_tensor(x) and x.untyped_storage().data_ptr() not in given:
                self.nbytes += x.nbytes
        return found


def value(rank: int, shape: tuple[int, ...], dtype: torch.dtype, op: str = "") -> torch.Tensor:
    """The input of `rank`: integers so small that every dtype adds them exactly; for products, only signs."""
    numbers = (torch.arange(math.prod(shape)) * 7 + rank * 5) % 11 - (4 if dtype.is_signed else 0)
    x = (numbers.sign() if op == "product" else numbers).reshape(shape)
    return (x + 1j * (x + rank)).to(dtype) if dtype.is_complex else x.to(dtype)


def layouts(x: torch.Tensor) -> list[torch.Tensor]:
    """The same values in several layouts: contiguous, with gaps, transposed, and lazily conjugated or negated."""
    gaps = x.new_zeros((*x.shape, 2))[..., 0]
    found = [x.clone(), gaps.copy_(x), torch.nn.Parameter(x.clone(), requires_grad=False)]
    if x.ndim > 1:
        found.append(x.transpose(0, -1).contiguous().transpose(0, -1))
    if x.is_complex():
        found.append(x.conj().resolve_conj().conj())
    if x.dtype in (torch.float32, torch.float64):
        found.append(torch.complex(torch.zeros_like(x), -x).conj().imag)
    return found


def laid_out(x: torch.Tensor, turn: int) -> torch.Tensor:
    kinds = layouts(x)
    return kinds[turn % len(kinds)]


def array(x: torch.Tensor) -> np.ndarray:
    x = x.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    narrow = x.dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
    return x.to(torch.float64).numpy() if narrow else x.numpy()


def inputs(
    mesh: Mesh, dims: Dims, shape: tuple[int, ...], dtype: torch.dtype, op: str = ""
) -> list[np.ndarray]:
    return [array(value(rank, shape, dtype, op)) for rank in mesh.ranks(dims)]


def same(got: Any, want: np.ndarray, what: object) -> None:
    found = array(got)
    assert found.shape == want.shape, (what, found.shape, want.shape)
    # Not converted: True is not a sum of 2.
    assert (found == want).all(), what


def gives(call: Callable[[Any], Any], want: np.ndarray | None, like: torch.Tensor, what: Any) -> None:
    """Check that `call(out)` gives `want`, in new memory and in the user's, or gives nothing if `want` is None."""
    if want is None:
        assert call(None) is None and call(like) is None, what
        return
    got = call(None)
    assert got.dtype == like.dtype, what
    same(got, want, what)
    out = laid_out(torch.zeros_like(got, memory_format=torch.contiguous_format), what[-1])
    assert call(out) is out, what
    same(out, want, what)


def on_processes(check: Callable[[Mesh], None], more: dict[str, Any]) -> None:
    with meshcomm.init(**more, device="cpu", timeout_s=30) as mesh:
        check(mesh)


def everywhere(pool: Pool, check: Callable[[Mesh], None], **more: Any) -> None:
    """Run the check in the simulator and on processes."""
    meshcomm.simulate(check, **(more or {"dims": DIMS, "merge": MERGE, "rank_order": ORDER}))
    pool.run(on_processes, check, more or FEW, ranks=math.prod((more or FEW)["dims"].values()))


def reductions(mesh: Mesh) -> None:
    first, *others = names(mesh)
    every = list(product(REDUCTIONS, DTYPES))
    # Two ranks run all of them; more ranks run some of each.
    cases = [(first, *each) for each in every[:: 1 if mesh.world_size == 2 else 7]]
    cases += [(dims, *each) for dims in others for each in every[::19]]
    for number, (dims, op, dtype) in enumerate(cases):
        size, coord = mesh.size(dims), mesh.coord(dims)
        shape = ((size * 4, 6), (size, 3, 4), (0, 4), (), (1,))[number % (3 if dims == first else 5)]
        factor, what = 0.5 if op == "premul_sum" else None, (dims, op, dtype, shape, number)
        x, y = (laid_out(value(mesh.rank, shape, dtype, op), number) for _ in range(2))
        root, even = number % size, shape and shape[0] % size == 0
        calls: list[Callable[[], Any]] = [
            lambda: mesh.all_reduce(dims, x, op, factor=factor),
            lambda: mesh.reduce(dims, y, root, op, factor=factor),
            lambda: mesh.reduce_scatter(dims, y, 0, op, factor=factor) if even else None,
        ]
        if reduce_refusal("gloo", op, dtype) is not None:
            for call in calls[: 3 if even else 2]:
                with pytest.raises(meshcomm.MeshcommError, match=f"{op} of .* is not possible on gloo"):
                    call()
            continue
        want = ORACLE[op](np.stack(inputs(mesh, dims, shape, dtype, op)))
        assert calls[0]() is x
        same(x, want, what)
        got, part = calls[1](), calls[2]()
        assert (got is not None) == (coord == root)
        for found, wanted in ((got, want), (part, np.split(want, size)[coord] if even else want)):
            if found is not None:
                assert found.dtype == dtype
                same(found, wanted, what)
        same(y, inputs(mesh, dims, shape, dtype, op)[coord], "the input changed")


def moves(mesh: Mesh) -> None:
    turns = count()
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool, torch.float8_e4m3fn,
              torch.uint16)  # fmt: skip
    for dims in names(mesh):
        size, coord = mesh.size(dims), mesh.coord(dims)
        for shape in ((size * 2, 3, size), (size, size), (size,)):
            for axis, root in product(range(-len(shape), len(shape)), (0, size - 1)):
                turn = next(turns)
                dtype, concat, at_root = dtypes[turn % 7], turn % len(shape), coord == root
                data, what = inputs(mesh, dims, shape, dtype), (dims, shape, axis, root, turn)
                x = laid_out(value(mesh.rank, shape, dtype), turn)
                with torch.inference_mode(turn % 4 == 0):
                    x = x.clone() if turn % 4 == 0 else x
                whole = np.concatenate(data, axis)
                gives(lambda out: mesh.all_gather(dims, x, axis, out=out), whole, x, what)
                wanted = whole if at_root else None
                gives(lambda out: mesh.gather(dims, x, root, axis, out=out), wanted, x, what)
                if x.shape[axis] % size == 0:
                    part = np.split(data[root], size, axis)[coord]
                    source = x if at_root else None
                    gives(lambda out: mesh.scatter(dims, source, root, axis, out=out), part, x, what)
                    whole = np.concatenate([np.split(each, size, axis)[coord] for each in data], concat)
                    gives(lambda out: mesh.all_to_all(dims, x, axis, concat, out=out), whole, x, what)
                    if dtype not in (torch.bool, torch.uint16, torch.float8_e4m3fn):
                        part = np.split(np.sum(np.stack(data), 0), size, axis)[coord]
                        gives(lambda out: mesh.reduce_scatter(dims, x, axis, out=out), part, x, what)
                same(x, data[coord], "the input changed")
                y = laid_out(value(mesh.rank, shape, dtype), turn)
                assert mesh.broadcast(dims, y, src=root) is y
                same(y, data[root], what)


def uneven(mesh: Mesh) -> None:
    turns = count()
    for dims in names(mesh):
        size, coord, ranks = mesh.size(dims), mesh.coord(dims), mesh.ranks(dims)
        for lengths, axis in product(
            ([c % 3 for c in range(size)], [0] * size, [4] + [0] * (size - 1)), (0, 1, -1)
        ):
            turn = next(turns)
            dtype, what = (torch.float32, torch.complex64, torch.bool)[turn % 3], (dims, lengths, axis, turn)
            shapes = [[2, 3, 2] for _ in ranks]
            for shape, length in zip(shapes, lengths, strict=True):
                shape[axis] = length
            parts = [value(rank, tuple(shape), dtype) for rank, shape in zip(ranks, shapes, strict=True)]
            want, x = array(torch.cat(parts, axis)), laid_out(parts[coord], turn // 3)
            gives(lambda out: mesh.all_gather(dims, x, axis, uneven=True, out=out), want, x, what)
            wanted = want if coord == size - 1 else None
            gives(lambda out: mesh.gather(dims, x, size - 1, axis, uneven=True, out=out), wanted, x, what)
        # Row c of the table: the sizes that coord c sends to each coord. Sent and received sizes may differ.
        for table in ([[(a * 2 + b) % 4 for b in range(size)] for a in range(size)], [[1] * size] * size):
            rows = [value(rank, (sum(table[c]), 2), torch.float32) for c, rank in enumerate(ranks)]
            want = array(torch.cat([rows[c].split(table[c])[coord] for c in range(size)]))
            for x, axis in ((rows[coord], 0), (rows[coord].T, 1)):
                wanted, splits = want if axis == 0 else want.T, table[coord]
                for received in (None, [row[coord] for row in table]):
                    gives(
                        lambda out: mesh.all_to_all(
                            dims, x, axis, axis, input_split_sizes=splits, output_split_sizes=received, out=out
                        ),
                        wanted, x, (dims, axis, 1),
                    )  # fmt: skip


def copied(call: Callable[[], torch.Tensor]) -> tuple[int, torch.Tensor]:
    """The bytes of new memory that a call's operators allocate, and its result."""
    with Allocations() as made:
        found = call()
    return made.nbytes, found


def gathered_once(mesh: Mesh, padded: bool) -> None:
    """An uneven all_gather allocates its result, and where it pads also a padded part and a buffer; nothing more."""
    size, coord = mesh.size("dp"), mesh.coord("dp")
    sizes = [1000 * (c + 1) for c in range(size)]
    x = torch.full((sizes[coord],), float(coord))
    want = torch.cat([torch.full((n,), float(c)) for c, n in enumerate(sizes)])
    handles = [mesh.all_gather("dp", x, uneven=True, async_op=True) for _ in range(2)]
    assert all(torch.equal(handle.wait(), want) for handle in handles)
    nbytes, found = copied(lambda: mesh.all_gather("dp", x, uneven=True))
    assert torch.equal(found, want)
    # Without the sizes, which are exchanged first.
    least = 4 * sum(sizes)
    if padded:
        # Shorter parts are padded with zeros to the longest one, gathered, and cut.
        least += 4 * size * sizes[-1] + (4 * (2 * sizes[-1] - sizes[coord]) if coord < size - 1 else 0)
    assert least <= nbytes <= least + 16 * size, (nbytes, least)


def on_gloo() -> None:
    with meshcomm.init(dims={"dp": 4}, device="cpu", timeout_s=30, validate_calls=2) as mesh:
        gathered_once(mesh, False)


def on_queues() -> None:
    settings: dict[str, Any] = {"backend": NAME, "device": "cpu", "timeout_s": 30, "validate_calls": 2}
    with emulated_nccl(), meshcomm.init(dims={"dp": 4}, **settings) as mesh:
        uneven(mesh)
        gathered_once(mesh, True)
        x = torch.ones(4, 1)
        syncs = host_syncs()
        splits = [1] * 4
        found = mesh.all_to_all("dp", x, input_split_sizes=splits, output_split_sizes=splits)
        assert host_syncs() == syncs and torch.equal(found, x)


def test_sizes_that_differ_on_each_kind_of_backend(pool: Pool) -> None:
    for check in (on_gloo, on_queues):
        pool.run(check, ranks=4)


def wrongly_known(mesh: Mesh) -> None:
    """While calls are compared, every rank raises if one rank expects another size."""
    coord = mesh.coord("dp")
    x, splits = torch.arange(4.0), [1, 3] if coord else [3, 1]
    received = [3, 1] if coord == 0 else [1, 3]
    assert (
        mesh.all_to_all("dp", x, input_split_sizes=splits, output_split_sizes=received).tolist()
        == [[0.0, 1.0, 2.0, 0.0], [3.0, 1.0, 2.0, 3.0]][coord]
    )
    with pytest.raises(CallMismatchError, match="ranks 0 1 do not agree") as refused:
        mesh.all_to_all("dp", x, input_split_sizes=splits, output_split_sizes=[2, 2] if coord else received)
    assert "sends (1, 3), expects (2, 2)" in refused.value.given, refused.value.given


def rightly_known(mesh: Mesh) -> None:
    """Sizes with many digits, whose text is shortened."""
    sizes = [10_000 + other for other in range(8)]
    for later in (False, True):
        came = mesh.all_to_all(
            "dp",
            torch.full((sum(sizes),), mesh.rank, dtype=torch.int8),
            input_split_sizes=sizes,
            output_split_sizes=[sizes[mesh.rank]] * 8,
            async_op=later,
        )
        came = came.wait() if isinstance(came, Handle) else came
        assert came.view(8, -1)[:, 0].tolist() == list(range(8))


# How many rows each rank sends to each other rank: rank 0 sends none, and rank 2 receives none.
ROWS = [[0, 0, 0], [2, 1, 0], [0, 3, 0]]


def nothing_to_send(mesh: Mesh) -> None:
    """A rank without rows to send may receive some, and vice versa, as with experts that got no tokens."""
    sends, expects = ROWS[mesh.rank], [row[mesh.rank] for row in ROWS]
    held = torch.full((sum(sends), 4), float(mesh.rank))
    want = torch.tensor([float(rank) for rank, rows in enumerate(expects) for _ in range(rows)])
    for axis in (0, 1):
        x = held.movedim(0, axis)
        for later in (False, True):
            came = mesh.all_to_all(
                "dp", x, axis, axis, input_split_sizes=sends, output_split_sizes=expects, async_op=later
            )
            came = came.wait() if isinstance(came, Handle) else came
            assert torch.equal(came.movedim(axis, 0), want[:, None].expand(-1, 4)), (axis, later)
    out = torch.empty(len(want), 4)
    dist.all_to_all_single(out, held, expects, sends, group=mesh.group("dp"))
    assert torch.equal(out, want[:, None].expand(-1, 4))


def wrongly_known_later(mesh: Mesh) -> None:
    """An asynchronous call waits for no exchange; every rank still raises before data of wrong sizes is sent."""
    sends = [2, 1, 1] if mesh.rank == 2 else [1, 1, 1]
    x = torch.ones(2, sum(sends))
    with pytest.raises(CallMismatchError, match="ranks 0 1 2 do not agree"):
        mesh.all_to_all(
            "dp", x, 1, 1, input_split_sizes=sends, output_split_sizes=[1, 1, 1], async_op=True
        ).wait()


def test_a_wrong_known_size(pool: Pool) -> None:
    pool.run(on_processes, wrongly_known, {"dims": {"dp": 2}}, ranks=2)
    pool.run(on_processes, wrongly_known_later, {"dims": {"dp": 3}}, ranks=3)
    pool.run(on_processes, rightly_known, {"dims": {"dp": 8}}, ranks=8)
    pool.run(on_processes, nothing_to_send, {"dims": {"dp": 3}}, ranks=3)
    with pytest.raises(CallMismatchError, match="ranks differ in call 1"):
        meshcomm.simulate(
            lambda mesh: mesh.all_to_all(
                "dp", torch.ones(4), input_split_sizes=[2, 2], output_split_sizes=[3, 1]
            ),
            dims={"dp": 2},
        )


def lists(mesh: Mesh) -> None:
    kinds = [
        ((3, 2), torch.float32), ((), torch.int64), ((4,), torch.bfloat16), ((0, 4), torch.float32), ((1, 2), torch.float32),
    ]  # fmt: skip
    for dims in names(mesh):
        everyone = [[value(rank, *kind) for kind in kinds] for rank in mesh.ranks(dims)]
        tensors = [value(mesh.rank, *kind) for kind in kinds]
        tensors[0] = tensors[0].T.contiguous().T
        reduced = mesh.all_reduce(dims, tensors)
        assert all(a is b for a, b in zip(reduced, tensors, strict=True))
        mine = [value(mesh.rank, *kind) for kind in kinds]
        handle = mesh.broadcast(dims, mine, src=mesh.size(dims) - 1, async_op=True)
        for i, (x, sent) in enumerate(zip(tensors, handle.wait(), strict=True)):
            same(x, np.sum([array(each[i]) for each in everyone], 0), (dims, i))
            same(sent, array(everyone[-1][i]), (dims, i))
        assert mesh.all_reduce(dims, []) == []


def hierarchical(mesh: Mesh) -> None:
    # All three dims at once on simulated ranks; everywhere, pairs of dims in both orders.
    found: list[Dims] = [("dp", "tp"), ("tp", "dp")]
    if mesh.world_size == 8:
        found += [("pp", "dp", "tp"), ("tp", "pp"), "model"]
    for dims, shape in product(found, ((5,), (2, 3), (), (0,), (16, 3))):
        ranks = mesh.layout.group_of(mesh.rank, dims).tolist()
        for number, op in enumerate(("sum", "avg", "min", "max", "premul_sum")):
            data = np.stack([value(rank, shape, torch.float64).numpy() for rank in ranks])
            x = laid_out(value(mesh.rank, shape, torch.float64), number)
            factor = 0.5 if op == "premul_sum" else None
            assert mesh.all_reduce(dims, x, op, algorithm="hierarchical", factor=factor) is x
            same(x, ORACLE[op](data), (dims, op, shape))


def factors(mesh: Mesh) -> None:
    """Each rank has a different factor."""
    for dims in names(mesh):
        n, coord = mesh.size(dims), mesh.coord(dims)
        x, total = torch.arange(2.0 * n), np.arange(2.0 * n) * sum(range(1, n + 1))
        more: dict[str, Any] = {"op": "premul_sum", "factor": coord + 1.0}
        for algorithm in ("flat", "tree"):
            same(mesh.all_reduce(dims, x.clone(), algorithm=algorithm, **more), total, dims)
        found = mesh.reduce(dims, x, 0, **more)
        assert found is None if coord else np.array_equal(found, total)
        same(mesh.reduce_scatter(dims, x, **more), np.split(total, n)[coord], dims)
        same(x, np.arange(2.0 * n), "the input changed")


def messages(mesh: Mesh) -> None:
    for dims in names(mesh):
        size, coord, ranks = mesh.size(dims), mesh.coord(dims), mesh.ranks(dims)
        x = value(mesh.rank, (3, 4), torch.float32)
        for number, (offset, wrap) in enumerate(product((0, 1, -1, 2, size, size + 1), (True, False))):
            got, source = mesh.shift(dims, laid_out(x, number), offset, wrap=wrap), coord - offset
            if wrap or 0 <= source < size:
                same(got, value(ranks[source % size], (3, 4), torch.float32).numpy(), (dims, offset))
            else:
                assert got is None
        # All to all, in an order in which blocking sends would deadlock; the sizes depend on the sender.
        peers = [c for c in range(size) if c != coord]
        sends = [(value(mesh.rank, (coord + 1, 2), torch.int64), c) for c in peers]
        outs = [(torch.zeros(c + 1, 2, dtype=torch.int64), c) for c in peers]
        for (_, c), got in zip(outs, mesh.exchange(dims, sends, outs), strict=True):
            same(got, value(ranks[c], (c + 1, 2), torch.int64).numpy(), ("exchange", dims, c))
        if coord == 0:
            mesh.send(dims, x, dst=size - 1)
            handle = mesh.isend(dims, x * 2, dst=size - 1, tag=5)
            handle.wait()
            handle.wait()
        if coord == size - 1:
            late = mesh.irecv(dims, torch.zeros(4, 3).T, src=0, tag=5)
            theirs = value(ranks[0], (3, 4), torch.float32).numpy()
            same(mesh.recv(dims, torch.zeros(3, 4), src=0), theirs, "recv")
            same(late.wait(), theirs * 2, "irecv")
            assert late.is_completed() and late.source == 0
        # Tags distinguish two messages between the same ranks, in whatever order they are listed.
        peer, own = (coord + 1) % size if size == 2 else coord ^ 1, float(mesh.rank)
        # They may be received into two columns of one matrix, which interleave but share no byte.
        into = torch.zeros(3, 2)
        mesh.exchange(
            dims,
            [(torch.full((3,), 1 + own), peer, 1), (torch.full((3,), 100 + own), peer, 2)],
            [(into[:, 0], peer, 2), (into[:, 1], peer, 1)],
        )
        assert into.tolist() == [[100.0 + ranks[peer], 1.0 + ranks[peer]]] * 3
        # A message from a rank to itself has both ends in one call.
        to_itself = [(torch.full((2,), own), coord, 1), (torch.full((3,), own), coord)]
        kept = mesh.exchange(dims, to_itself, [(torch.zeros(3), coord), (torch.zeros(2), coord, 1)])
        assert [x.tolist() for x in kept] == [[own] * 3, [own] * 2]
        mesh.barrier(dims)
    mesh.barrier()


def handshakes(mesh: Mesh) -> None:
    """Shapes that only the sender knows, including 0-dim and empty ones; and a receive from any sender."""
    for dims in names(mesh):
        size, coord, ranks = mesh.size(dims), mesh.coord(dims), mesh.ranks(dims)
        for dtype in (torch.float32, torch.float8_e4m3fn, torch.bool, torch.complex128):
            shapes = [[(c + 1, 2), (), (0, 3), (2, c + 1)][c % 4] for c in range(size)]
            if size == 1:
                continue
            leaving = mesh.isend(
                dims, value(mesh.rank, shapes[coord], dtype), (coord + 1) % size, handshake=True
            )
            came = mesh.recv(dims, src=(coord - 1) % size)
            leaving.wait()
            assert came.dtype == dtype
            same(came, array(value(ranks[coord - 1], shapes[coord - 1], dtype)), dims)
        if coord == 0:
            found = [mesh.recv_any(dims, torch.zeros(2), tag=3) for _ in range(size - 1)]
            assert sorted(source for _, source in found) == list(range(1, size))
            assert all(x.tolist() == [source, ranks[source]] for x, source in found)
            unknown, source = mesh.recv_any(dims, tag=4)
            assert (unknown.shape, source) == ((size, 3), size - 1)
            assert mesh.recv(dims, src=1, tag=5).tolist() == list(range(7))
        else:
            mesh.send(dims, torch.tensor([float(coord), float(mesh.rank)]), dst=0, tag=3)
            if coord == size - 1:
                mesh.send(dims, torch.zeros(size, 3), dst=0, tag=4, handshake=True)
            if coord == 1:
                mesh.isend(dims, torch.arange(7), dst=0, tag=5, handshake=True).wait()


def asynchronous(mesh: Mesh) -> None:
    for dims in names(mesh):
        x = value(mesh.rank, (4, 6), torch.float32).T
        data = [each.T for each in inputs(mesh, dims, (4, 6), torch.float32)]
        total = np.sum(np.stack(data), 0)
        reduced = mesh.all_reduce(dims, x.contiguous(), async_op=True)
        gathered = mesh.all_gather(dims, x, axis=1, async_op=True)
        sliced = mesh.reduce_scatter(dims, x.repeat(mesh.size(dims), 1), async_op=True)
        same(gathered.wait(), np.concatenate(data, 1), dims)
        same(reduced.wait(), total, dims)
        assert reduced.wait() is reduced.wait()
        same(sliced.wait(), total, dims)


CHECKS = [reductions, moves, uneven, lists, hierarchical, factors, messages, handshakes, asynchronous]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.deep_cases(r"\[hierarchical")
def test_against_numpy(pool: Pool, check: Callable[[Mesh], None]) -> None:
    everywhere(pool, check)


def test_every_reduce_op_and_dtype(pool: Pool) -> None:
    everywhere(pool, reductions, dims={"dp": 2})


def next_to_nothing(mesh: Mesh) -> None:
    size, coord = mesh.size("dp"), mesh.coord("dp")
    for shape, dtype in (
        ((0,), torch.float32),
        ((0, 3), torch.complex64),
        ((), torch.bool),
        ((), torch.float32),
    ):
        x = torch.ones(shape, dtype=dtype)
        assert mesh.shift("dp", x).shape == shape
        # A receive from any sender, then later messages from the same senders, also with the same tag.
        if coord == 0:
            sources = set()
            for _ in range(size - 1):
                came, source = mesh.recv_any("dp", torch.zeros(shape, dtype=dtype), tag=6)
                assert torch.equal(came, x)
                sources.add(source)
            assert sources == set(range(1, size))
            for dst in sources:
                mesh.send("dp", torch.ones(2), dst=dst)
                assert mesh.recv("dp", torch.zeros(2), src=dst, tag=6).sum() == 2
        else:
            mesh.send("dp", x, dst=0, tag=6)
            assert mesh.recv("dp", torch.zeros(2), src=0).sum() == 2
            mesh.send("dp", torch.ones(2), dst=0, tag=6)


def test_empty_messages_from_whoever_comes_first(pool: Pool) -> None:
    everywhere(pool, next_to_nothing, dims={"dp": 3})
    for seed in range(3):
        meshcomm.simulate(next_to_nothing, dims={"dp": 3}, schedule_seed=seed)


def of_floats(coord: int, dtype: torch.dtype) -> torch.Tensor:
    """Element c is NaN on coord c only, with alternating signs; then zeros of both signs, and numbers."""
    x = torch.tensor([float(coord - 2)] * 4)
    x[coord] = math.copysign(math.nan, -1.0 if coord % 2 else 1.0)
    zeros = [0.0 if coord else -0.0, -0.0 if coord else 0.0]
    rest = [-0.0, 0.0, math.inf if coord == 1 else -math.inf, (-1.5) ** coord]
    return torch.cat([x, torch.tensor([*zeros, *rest])]).to(dtype)


def least_and_greatest(mesh: Mesh) -> None:
    """With every algorithm, NaN wins and -0.0 is less than 0.0."""
    for (op, combine), dtype in product(
        (("min", torch.minimum), ("max", torch.maximum)),
        (torch.float16, torch.bfloat16, torch.float32, torch.float64),
    ):
        every = [of_floats(coord, dtype) for coord in range(4)]
        own = every[mesh.coord("dp")]
        wanted = combine(combine(every[0], every[1]), combine(every[2], every[3]))
        assert wanted[:4].isnan().all() and not wanted[4:].isnan().any()
        # torch does not define which zero is smaller.
        signs = [op == "min", op == "min", True, False]
        for got in (
            *(mesh.all_reduce("dp", own.clone(), op, algorithm=by) for by in ("flat", "ring", "tree")),
            mesh.reduce("dp", own, 2, op),
            mesh.reduce_scatter("dp", torch.cat([own] * 4), op=op),
        ):
            if got is not None:
                assert got.dtype == dtype and torch.equal(got.isnan(), wanted.isnan())
                assert torch.equal(got[4:], wanted[4:]) and got[4:8].signbit().tolist() == signs


def test_nan_and_signed_zeros_in_min_and_max(pool: Pool) -> None:
    everywhere(pool, least_and_greatest, dims={"dp": 4})


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


@pytest.mark.mesh(dp=2, tp=2, via="gloo")
def test_the_profiler_sees_op_dims_and_plan(mesh: Mesh) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        mesh.all_reduce("dp", torch.ones(1))
        mesh.all_gather(("tp",), torch.ones(1))
        mesh.shift("tp", torch.ones(1))
    found = {each.key for each in profile.key_averages() if each.key.startswith("meshcomm::")}
    plan = mesh.plan.fingerprint
    assert found == {
        f"meshcomm::{call}, plan {plan}" for call in ("all_gather tp", "all_reduce dp", "shift tp")
    }


def by_torch_s_word(mesh: Mesh) -> None:
    x, coord = torch.arange(16.0).view(4, 4) + mesh.rank, mesh.coord("dp")
    for dim in (0, -1):
        for call in (
            mesh.all_gather,
            mesh.reduce_scatter,
            mesh.functional.reduce_scatter,
            mesh.functional.slice,
        ):
            assert torch.equal(call("dp", x, dim=dim), call("dp", x, dim))
        assert torch.equal(mesh.scatter("dp", x, 0, dim=dim), mesh.scatter("dp", x, 0, dim))
        gathered = mesh.gather("dp", x, 1, dim=dim)
        assert gathered is None if coord == 0 else gathered.shape == ((8, 4) if dim == 0 else (4, 8))


def test_dim_is_another_word_for_axis() -> None:
    meshcomm.simulate(by_torch_s_word, dims={"dp": 2})
