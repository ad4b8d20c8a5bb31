"""Objects along dims on Gloo, compared with the objects that every rank is known to send."""

from __future__ import annotations

import pickle as pickling
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import meshcomm
from meshcomm.comm import objects
from meshcomm.comm.codec import encode
from meshcomm.comm.communicator import Communicator
from meshcomm.errors import LayoutError, MeshClosed, ObjectError, UnsupportedOp
from meshcomm.layout import Dims
from meshcomm.mesh import Mesh

DIMS = {"dp": 2, "tp": 2}
MERGE = {"model": ("tp", "dp"), "all": ("dp", "tp")}
ORDER = [2, 0, 3, 1]
NAMES: tuple[Dims, ...] = ("dp", "tp", "model", "all", ("dp", "tp"))


def thing(rank: int) -> Any:
    """The object that `rank` sends; size and type differ between ranks."""
    kinds: list[Any] = [
        None,
        {"rank": rank, "path": ["a", ("b", rank)]},
        torch.arange(rank * 7, dtype=torch.bfloat16),
        "text" * rank,
        [rank] * 100 * rank,
        {"w": torch.full((3, 2), rank).t(), "cfg": {"lr": 1e-3}},
        {rank, -rank},
        b"\0" * (rank * 5000),
    ]
    return kinds[rank % len(kinds)]


def same(got: Any, want: Any) -> bool:
    """Whether two objects are equal, compared by their pickles."""
    if isinstance(want, torch.Tensor):
        return isinstance(got, torch.Tensor) and got.dtype == want.dtype and torch.equal(got, want)
    if isinstance(want, dict):
        return list(got) == list(want) and all(same(got[key], want[key]) for key in want)
    return type(got) is type(want) and pickling.dumps(got) == pickling.dumps(want)


GRID = pytest.mark.mesh(**DIMS, merge=MERGE, rank_order=ORDER, via="gloo")


@pytest.mark.mesh(**DIMS, merge=MERGE, rank_order=ORDER, via=("gloo", "emulated_nccl"))
@pytest.mark.deep_cases(r"\[emulated_nccl")
def test_every_call_along_every_dim_under_a_permuted_rank_order(mesh: Mesh) -> None:
    for turn, dims in enumerate(NAMES):
        more = 4 * (turn % 2)  # the other four kinds
        size, coord, ranks = mesh.size(dims), mesh.coord(dims), [rank + more for rank in mesh.ranks(dims)]
        mine = thing(mesh.rank + more)
        gathered = mesh.objects.all_gather(dims, mine)
        assert len(gathered) == size and all(map(same, gathered, map(thing, ranks)))
        if isinstance(mine, torch.Tensor) and mine.numel():
            assert gathered[coord].data_ptr() != mine.data_ptr()
        for root in range(size):
            assert same(mesh.objects.broadcast(dims, mine, src=root), thing(ranks[root]))
            got = mesh.objects.gather(dims, mine, dst=root)
            if coord == root:
                assert got is not None and all(map(same, got, map(thing, ranks)))
            else:
                assert got is None
            parts = [(root, thing(rank)) for rank in ranks] if coord == root else None
            number, part = mesh.objects.scatter(dims, parts, src=root)
            assert number == root and same(part, mine)
        if coord == 0:
            mesh.objects.send(dims, {"hello": mine}, dst=size - 1, tag=3)
            mesh.objects.send(dims, "again", dst=size - 1)
        elif coord == size - 1:
            assert same(mesh.objects.recv(dims, src=0, tag=3), {"hello": thing(ranks[0])})
            assert mesh.objects.recv(dims, src=0) == "again"


@pytest.mark.mesh(
    **DIMS, merge=MERGE, rank_order=ORDER, via="gloo", not_via={"emulated_nccl": "NCCL matches by order"}
)
def test_objects_and_tensors_with_one_tag_do_not_meet(mesh: Mesh) -> None:
    """A tensor that is being sent with the same tag is not received as an object, or vice versa."""
    if mesh.coord("tp") == 0:
        handle = mesh.isend("tp", torch.full((4,), 7.0), dst=1)
        mesh.objects.send("tp", "object", dst=1)
        handle.wait()
    else:
        assert mesh.objects.recv("tp", src=0) == "object"
        assert mesh.recv("tp", torch.empty(4), src=0).tolist() == [7.0] * 4


def refused(mesh: Mesh, act: Callable[[], Any]) -> str:
    """The text of the error that `act` raises. Afterwards the group still works, so no rank is left waiting."""
    with pytest.raises(ObjectError) as caught:
        act()
    assert mesh.objects.all_gather("all", mesh.rank) == mesh.ranks("all")
    return str(caught.value).replace(mesh.label, "RANK")


class Odd(list[Any]):
    """Not a plain list, and raises when it is pickled."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("no size for you")


def bad(mesh: Mesh) -> Any:
    return {"model": [0, thing if mesh.coord("model") == 2 else 1]}


def big(mesh: Mesh) -> Any:
    return torch.zeros(5000 if mesh.coord("model") == 1 else 10, dtype=torch.uint8)


def cap(mesh: Mesh) -> Any:
    return 4000 if mesh.coord("model") == 3 else 6000  # the smallest cap applies


def of_one(mesh: Mesh, coord: int, objs: Any) -> Any:
    return objs if mesh.coord("model") == coord else None


def first_sends(mesh: Mesh, dim: str, send: dict[str, Any], recv: dict[str, Any], obj: Any = 1) -> Any:
    """Coord 0 sends to coord 1."""
    if mesh.coord(dim) == 0:
        return mesh.objects.send(dim, obj, 1, **send)
    return mesh.objects.recv(dim, 0, **recv)


UNSENT, PLAIN = "cannot be sent", "plain data with the same content, or pickle=True on every rank of the call"
FUNCTION = 'coord 2: obj["model"][1] is a function'
OVER, MORE = "the object of coord 1 is over the size cap", "a larger max_bytes on every rank"
SIZE = f"{encode(torch.zeros(5000, dtype=torch.uint8)).numel():,} bytes"
# A call, and the error that every rank raises: the name and dim of the call, the problem, given, and the hint.
REFUSED: list[tuple[Callable[[Mesh], Any], str, str, str, str]] = [
    (lambda m: m.objects.all_gather("model", bad(m)), "all_gather model", UNSENT, FUNCTION, PLAIN),
    (lambda m: m.objects.gather("model", bad(m), dst=0), "gather model", UNSENT, FUNCTION, PLAIN),
    (lambda m: m.objects.broadcast("model", bad(m), src=2), "broadcast model", UNSENT, FUNCTION, PLAIN),
    (
        lambda m: m.objects.scatter("model", of_one(m, 2, [0, [thing], 2, 3]), src=2),
        "scatter model", UNSENT, "coord 2: for coord 1: obj[0] is a function", PLAIN,
    ),
    (
        lambda m: m.objects.scatter("model", of_one(m, 3, [1, 2, 3]), src=3),
        "scatter model", UNSENT, "coord 3: objs has 3 elements", "None for a coord that gets nothing",
    ),
    (
        lambda m: m.objects.scatter("model", of_one(m, 3, {"a": 1}), src=3),
        "scatter model", UNSENT, "coord 3: objs is of type dict", "None on the other ranks only",
    ),
    (
        lambda m: m.objects.all_gather("model", {1: lambda: 0, 2: Odd()}.get(m.coord("model")), pickle=True),
        "all_gather model", "the object of coords 1 2 cannot be sent",
        "coord 2: obj cannot be pickled: TypeError: no size for you", "",
    ),
    (
        lambda m: m.objects.all_gather("model", big(m), max_bytes=cap(m)),
        "all_gather model", OVER, f"coord 1: {SIZE}", MORE,
    ),
    (
        lambda m: m.objects.gather("model", big(m), dst=2, max_bytes=cap(m)),
        "gather model", OVER, f"coord 1: {SIZE}", MORE,
    ),
    (
        lambda m: m.objects.broadcast("model", big(m), src=1, max_bytes=cap(m)),
        "broadcast model", OVER, f"coord 1: {SIZE}", MORE,
    ),
    (
        lambda m: m.objects.scatter("model", [0, 1, 2, big(m)], src=1, max_bytes=cap(m)),
        "scatter model", OVER, f"coord 1, for coord 3: {SIZE}", MORE,
    ),
    (
        lambda m: first_sends(m, "tp", {"max_bytes": 6000}, {"max_bytes": 4000}, bytes(5000)),
        " tp", "the object of coord 0 is over the size cap", "max_bytes of coord 1", MORE,
    ),
    (
        lambda m: m.objects.all_gather("model", 1, pickle=m.coord("model") == 2),
        "all_gather model", "the ranks disagree on pickle", "coord 2: pickle=True; coords 0 1 3: pickle=False",
        "pickle=True on every rank if every sender is trusted, or on none",
    ),
    (
        lambda m: first_sends(m, "dp", {"pickle": True}, {}),
        " dp", "the ranks disagree on pickle", "coord 0: pickle=True; coord 1: pickle=False", "or on none",
    ),
    (
        lambda m: m.objects.send("tp", 1, dst=1 - m.coord("tp")),
        "send tp", "the ranks made different calls", "coords 0 1: send\n  expected: a recv for each send", "",
    ),
    (lambda m: first_sends(m, "dp", {}, {}, [thing]), " dp", UNSENT, "coord 0: obj[0] is a function", PLAIN),
]  # fmt: skip
# If calls are no longer compared, objects of two different calls are still distinguished.
DIFFERENT: list[tuple[Callable[[Mesh], Any], str, str, str, str]] = [
    (
        lambda m: m.objects.broadcast("model", 1, src=m.coord("model") // 2),
        "broadcast model", "the ranks made different calls", "coords 0 1: broadcast, src=0; coords 2 3: broadcast, src=1",
        "check the order of calls",
    ),
    (
        lambda m: m.objects.gather("model", 1, dst=0) if m.coord("model") == 1 else m.objects.all_gather("model", 1),
        " model", "the ranks made different calls", "coords 0 2 3: all_gather; coord 1: gather, dst=0",
        "check the order of calls",
    ),
]  # fmt: skip


@GRID
def test_what_cannot_be_sent_or_is_not_agreed_on_raises_on_every_rank(mesh: Mesh) -> None:
    all_refused(mesh, REFUSED)


@pytest.mark.mesh(**DIMS, merge=MERGE, rank_order=ORDER, validate_calls=0, via="gloo")
def test_different_calls_of_objects_raise_on_every_rank_where_calls_are_not_compared(mesh: Mesh) -> None:
    all_refused(mesh, DIFFERENT)


def all_refused(mesh: Mesh, table: list[tuple[Callable[[Mesh], Any], str, str, str, str]]) -> None:
    for act, call, what, given, hint in table:
        text, (name, _, dim) = refused(mesh, lambda: act(mesh)), call.partition(" ")
        assert f'{name} along "{dim}" on RANK: ' in text and what in text.splitlines()[0], text
        assert given in text and hint in text.partition("  try: ")[2], text
        if what == OVER:
            assert "expected: at most 4,000 bytes each, the max_bytes of coord 3\n" in text


@GRID
def test_the_cap_itself_crosses(mesh: Mesh) -> None:
    assert mesh.objects.all_gather("model", bytes(3000), max_bytes=4000) == [bytes(3000)] * 4


@GRID
def test_wrong_arguments_are_refused_before_anything_moves(mesh: Mesh) -> None:
    own = mesh.coord("tp")
    for act, what in (
        (lambda: mesh.objects.broadcast("tp", 1, src=2), "src=2 is not a coord"),
        (lambda: mesh.objects.broadcast("tp", 1, src=-1), "src=-1 is not a coord"),
        (lambda: mesh.objects.gather("tp", 1, dst=True), "dst=True is not a coord"),
        (lambda: mesh.objects.send("tp", 1, dst=2), "dst=2 is not a coord"),
        (lambda: mesh.objects.recv("tp", src=None), "src=None is not a coord"),
        (lambda: mesh.objects.recv("tp", src=7), "src=7 is not a coord"),
        (lambda: mesh.objects.recv("tp", src=1 - own, tag=-1), "tag=-1"),
        (lambda: mesh.objects.all_gather("tp", 1, max_bytes=0), "max_bytes=0"),
        (lambda: mesh.objects.all_gather("tpp", 1), "tpp"),
    ):
        with pytest.raises(LayoutError, match=what):
            act()


class Attack:
    """Its pickle creates a file when it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.path),)


@GRID
def test_a_pickle_is_never_read_by_a_rank_that_did_not_ask_for_it(mesh: Mesh, tmp_path: Path) -> None:
    """Coord 0 along tp sends a pickle openly, and then declares it as plain data."""
    attacker, mark = mesh.coord("tp") == 0, Path(tmp_path, f"read by {mesh.rank}")
    with pytest.raises(ObjectError, match="the ranks disagree on pickle"):
        mesh.objects.broadcast("tp", Attack(str(mark)), src=0, pickle=attacker)
    with pytest.MonkeyPatch.context() as patch:
        if attacker:
            # An attacker could change its copy of the code so that it declares a pickle as plain data.
            patch.setattr(objects, "encode", lambda obj, pickle: encode(obj, True))
        with pytest.raises(
            ObjectError, match=r"^the received object is a pickle, and none of it was executed"
        ):
            mesh.objects.broadcast("tp", Attack(str(mark)), src=0)
    mesh.debug.monitored_barrier(timeout_s=20)
    assert not list(tmp_path.iterdir())
    mesh.debug.monitored_barrier(timeout_s=20)
    mesh.objects.broadcast("tp", Attack(str(mark)), src=0, pickle=True)
    assert list(tmp_path.iterdir())  # a rank that asks for it does read it


@GRID
def test_small_objects_are_not_padded_to_a_large_one(mesh: Mesh) -> None:
    """Checks the most bytes that a rank receives, for very different sizes and for equal sizes."""
    taken: list[int] = []
    usual = Communicator.collective

    def counted(self: Communicator, row: Any, x: torch.Tensor, *args: Any, **keys: Any) -> Any:
        found = usual(self, row, x, *args, **keys)
        taken.append(found.nbytes)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Communicator, "collective", counted)
        x = torch.full((300_000,), 3.5) if mesh.coord("all") == 3 else mesh.coord("all")
        got = mesh.objects.all_gather("all", x)
        large = max(taken)
        taken.clear()
        alike = mesh.objects.all_gather("all", torch.full((20_000,), mesh.rank))
    assert [each if isinstance(each, int) else len(each) for each in got] == [0, 1, 2, 300_000]
    assert (got[3] == 3.5).all()
    assert [int(each[-1]) for each in alike] == mesh.ranks("all")
    assert 1_200_000 < large < 1_210_000 and 4 * 160_000 < max(taken) < 4 * 161_000


def test_a_dim_of_size_one() -> None:
    with meshcomm.init(dims={"dp": 1, "tp": 1}, device="cpu", timeout_s=20) as mesh:
        x = {"w": torch.ones(2)}
        got = mesh.objects.broadcast("dp", x, src=0)
        assert torch.equal(got["w"], x["w"]) and got["w"].data_ptr() != x["w"].data_ptr()
        assert mesh.objects.all_gather(("dp", "tp"), 5) == [5]
        assert mesh.objects.gather("tp", "a", dst=0) == ["a"]
        assert mesh.objects.scatter("tp", ["b"], src=0) == "b"
        # Errors of many ranks are raised on one rank too, with the same words.
        with pytest.raises(
            ObjectError, match=r'the object of coord 0 cannot be sent\n  given:    coord 0: obj\["f"\]'
        ):
            mesh.objects.broadcast("dp", {"f": len}, src=0)
        with pytest.raises(ObjectError, match="objs has 2 elements"):
            mesh.objects.scatter("dp", [1, 2], src=0)
        with pytest.raises(ObjectError, match="is over the size cap"):
            mesh.objects.broadcast("dp", bytes(200), src=0, max_bytes=100)
        with pytest.raises(UnsupportedOp, match="cannot send messages to itself"):
            mesh.objects.send("dp", x, dst=0)
    with pytest.raises(MeshClosed):
        mesh.objects.all_gather("dp", 1)


@GRID
def test_a_call_counts_as_one_under_its_own_name(mesh: Mesh) -> None:
    """Each call counts once, whatever messages it sends; a failed call counts too."""
    for _ in range(3):
        mesh.objects.broadcast("model", "x" * 100, src=0)
        mesh.objects.scatter("model", [1, 2, 3, 4] if mesh.coord("model") == 1 else None, src=1)
    with pytest.raises(ObjectError):
        mesh.objects.all_gather("model", thing)
    mesh.objects.gather("model", torch.ones(mesh.rank * 50_000), dst=1)
    counts = {row.call: row.calls for row in mesh.stats().rows if row.dim == "model"}
    assert counts == {
        "objects.broadcast": 3,
        "objects.scatter": 3,
        "objects.all_gather": 1,
        "objects.gather": 1,
    }
