"""Subclasses of Tensor: a call uses the values that a tensor reports, or every rank refuses the tensor."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed._functional_collectives as torch_calls
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor

import meshcomm
from meshcomm.errors import TrainingError
from meshcomm.mesh import Mesh
from meshcomm.parallel import GradientSync
from tests.comm.test_checks import told

DIMS: dict[str, Any] = {"dims": {"dp": 2, "tp": 1}, "merge": {"both": ("dp", "tp")}}
Call = Callable[[Mesh, Any], Any]


class Scaled(Tensor):
    """A tensor whose values are integers times a scale, as in quantized weights; its own memory is empty."""

    @staticmethod
    def __new__(cls, kept: Tensor, scale: Tensor) -> Scaled:
        made: Any = Tensor._make_wrapper_subclass(cls, kept.shape, dtype=scale.dtype)
        made.kept, made.scale = kept, scale
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].kept, args[0].scale)
        plain = [each.kept * each.scale if isinstance(each, Scaled) else each for each in args]
        return func(*plain, **(kwargs or {}))


class Held(Scaled):
    """A `Scaled` with memory, which holds other values."""

    @staticmethod
    def __new__(cls, kept: Tensor, scale: Tensor) -> Held:
        made: Any = Tensor._make_subclass(cls, torch.zeros(kept.shape))
        made.kept, made.scale = kept, scale
        return made  # type: ignore[no-any-return]


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(4)


WRAPPERS: dict[str, Callable[[], Tensor]] = {
    "TwoTensor": lambda: TwoTensor(torch.ones(4), torch.full((4,), 2.0)),
    "Parameter of a TwoTensor": lambda: torch.nn.Parameter(WRAPPERS["TwoTensor"](), requires_grad=False),
    "Scaled": lambda: Scaled(torch.ones(4, dtype=torch.int8), torch.tensor(0.5)),
    "Held": lambda: Held(torch.ones(4, dtype=torch.int8), torch.tensor(0.5)),
    "MaskedTensor": lambda: masked_tensor(torch.ones(4), torch.tensor([True, False, True, True])),
    "NestedTensor": lambda: torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)], layout=torch.jagged),
    "FakeTensor": fake,
    "UninitializedParameter": lambda: torch.nn.parameter.UninitializedParameter(requires_grad=False),
}  # fmt: skip
# Words of the hint in the error.
HINTS = {
    "TwoTensor": "x.a and x.b",
    "Scaled": "x.dequantize()",
    "MaskedTensor": "x.get_mask()",
    "NestedTensor": "x.unbind()",
    "FakeTensor": "outside FakeTensorMode",
    "UninitializedParameter": "a forward pass of its module",
}


def peer(mesh: Mesh) -> int:
    return 1 - mesh.coord("dp")


def room(*shape: int) -> Tensor:
    return torch.zeros(shape)


# Every call that accepts a tensor.
CALLS: dict[str, Call] = {
    "all_reduce": lambda m, x: m.all_reduce("dp", x),
    "all_reduce async": lambda m, x: m.all_reduce("dp", x, async_op=True),
    "all_reduce avg": lambda m, x: m.all_reduce("dp", x, "avg"),
    "all_reduce ring": lambda m, x: m.all_reduce("dp", x, algorithm="ring"),
    "all_reduce hierarchical": lambda m, x: m.all_reduce(("dp", "tp"), x, algorithm="hierarchical"),
    "all_reduce list": lambda m, x: m.all_reduce("dp", [room(2), x]),
    "broadcast": lambda m, x: m.broadcast("dp", x, 1),
    "broadcast list": lambda m, x: m.broadcast("dp", [x, room(2)], 1, async_op=True),
    "reduce": lambda m, x: m.reduce("dp", x, 1),
    "all_gather": lambda m, x: m.all_gather("dp", x),
    "all_gather uneven": lambda m, x: m.all_gather("dp", x, uneven=True),
    "all_gather out": lambda m, x: m.all_gather("dp", room(2), out=x),
    "reduce_scatter": lambda m, x: m.reduce_scatter("dp", x),
    "reduce_scatter out": lambda m, x: m.reduce_scatter("dp", room(8), out=x),
    "all_to_all": lambda m, x: m.all_to_all("dp", x),
    "all_to_all out": lambda m, x: m.all_to_all("dp", room(4), out=x),
    "scatter": lambda m, x: m.scatter("dp", x, 0),
    "scatter out": lambda m, x: m.scatter("dp", room(8) if m.coord("dp") == 0 else None, 0, out=x),
    "gather": lambda m, x: m.gather("dp", x, 0),
    "send": lambda m, x: m.send("dp", x, peer(m)),
    "isend": lambda m, x: m.isend("dp", x, peer(m)),
    "recv": lambda m, x: m.recv("dp", x, src=peer(m)),
    "irecv": lambda m, x: m.irecv("dp", x, peer(m)),
    "exchange send": lambda m, x: m.exchange("dp", [(x, peer(m))], [(room(4), peer(m))]),
    "exchange recv": lambda m, x: m.exchange("dp", [(room(4), peer(m))], [(x, peer(m))]),
    "shift": lambda m, x: m.shift("dp", x),
    "mean": lambda m, x: m.mean("dp", x, 1.0),
    "mean weights": lambda m, x: m.mean("dp", room(4), x),
    "rearrange": lambda m, x: m.rearrange(x, "a -> (dp a)"),
    "rearrange locally": lambda m, x: m.rearrange(x, "(a b) -> b a", a=2),
    "functional.all_reduce": lambda m, x: m.functional.all_reduce("dp", x, grad="sum"),
    "functional.identity": lambda m, x: m.functional.identity("dp", x),
    "functional.all_gather": lambda m, x: m.functional.all_gather("dp", x, grad="slice"),
    "functional.reduce_scatter": lambda m, x: m.functional.reduce_scatter("dp", x),
    "functional.slice": lambda m, x: m.functional.slice("dp", x),
    "functional.all_to_all": lambda m, x: m.functional.all_to_all("dp", x, 0, 0),
    "functional.shift": lambda m, x: m.functional.shift("dp", x),
    "objects.all_gather": lambda m, x: m.objects.all_gather("dp", {"x": [x]}),
    "objects.broadcast": lambda m, x: m.objects.broadcast("dp", (x,), 0),
}  # fmt: skip


# These calls need the other end.
HALVES = ("send", "isend", "recv", "irecv")


def refusals(mesh: Mesh) -> dict[tuple[str, str], tuple[str, str]]:
    warnings.simplefilter("ignore")  # torch warns of prototypes
    found = {}
    for name, make in WRAPPERS.items():
        for call, made in CALLS.items():
            if name == "FakeTensor" and call.startswith(("functional", "rearrange locally")):
                continue  # these calls need only a shape, and fake tensors have one
            found[name, call] = told(lambda made=made, make=make: made(mesh, make()))  # type: ignore[misc]
            assert mesh.all_reduce("dp", torch.ones(1)).item() == 2
    return found


def check(found: dict[tuple[str, str], tuple[str, str]]) -> None:
    for (name, call), (how, text) in found.items():
        assert how == ("ObjectError" if call.startswith("objects") else "ShapeError"), (name, call, how, text)
        if not call.startswith("objects") and not (call == "scatter" and "has nothing" in text):
            assert f"was given a {name.split()[-1]}" in text, (name, call, text)
            assert HINTS.get(name.split()[-1], "") in text, (name, call, text)


@pytest.mark.mesh(**DIMS["dims"], merge=DIMS["merge"], validate_calls=0, via="gloo")
def test_a_tensor_whose_values_lie_elsewhere_is_refused_on_every_rank(mesh: Mesh) -> None:
    cold = refusals(mesh)
    check(cold)
    for _ in range(2):
        for name, call in CALLS.items():
            if name not in HALVES:
                plain(call(mesh, torch.ones(4)))
    assert refusals(mesh) == cold


def test_the_simulator_refuses_it_too() -> None:
    for found in meshcomm.simulate(refusals, **DIMS):
        check(found)


@pytest.mark.mesh(dp=2, via="gloo")
def test_gradients_of_such_parameters_are_refused_by_name(mesh: Mesh) -> None:
    for broadcast in (True, False):
        net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        net[1].bias = torch.nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2)))
        with pytest.raises(TrainingError, match=r"(?s)other tensors.*1\.bias, a TwoTensor"):
            GradientSync(mesh, "dp", net, broadcast=broadcast)
        named = [(name, each) for name, each in net.named_parameters() if type(each.data) is Tensor]
        GradientSync(mesh, "dp", named).close()


# -- tensors with their values -------------------------------------------------------------------------


class Named(Tensor):
    """A subclass that only observes the functions called on it."""


def pending(mesh: Mesh, x: Tensor) -> Tensor:
    """x times 1 + rank, as a pending result of torch's functional calls; rank 0 gets it only once rank 1 calls."""
    if mesh.rank:
        time.sleep(0.02)
    own = [x if rank == mesh.rank else torch.zeros_like(x) for rank in range(2)]
    once, twice = (torch_calls.all_reduce(each, "sum", mesh.group("dp")) for each in (own[0], 2 * own[1]))
    assert type(once) is torch_calls.AsyncCollectiveTensor
    return twice if mesh.rank else once


KINDS: dict[str, Callable[[Mesh, Tensor], Tensor]] = {
    "pending": pending,
    "pending view": lambda m, x: pending(m, x).view(2, -1).view(-1),
    "Parameter": lambda m, x: torch.nn.Parameter(x * (1 + m.rank), requires_grad=False),
    "Named": lambda m, x: (x * (1 + m.rank)).as_subclass(Named),
}


def expected(call: str, xs: list[np.ndarray[Any, Any]], me: int) -> Any:
    """The result of each call for the x of every rank, computed by NumPy."""
    one, other = xs
    halves = [np.split(x, 2) for x in xs]
    sums = one + other
    table = {
        "all_reduce avg": sums / 2,
        "broadcast": other,
        "broadcast list": [other, np.zeros(2)],
        "all_reduce list": [np.zeros(2), sums],
        "reduce": sums if me else None,
        "gather": None if me else np.concatenate(xs),
        "reduce_scatter": np.split(sums, 2)[me],
        "all_to_all": np.concatenate([halves[0][me], halves[1][me]]),
        "scatter": halves[0][me],
        "mean": sums / 2,
        "rearrange locally": xs[me].reshape(2, -1).T,
        "identity": xs[me],
        "slice": halves[me][me],
        "objects.all_gather": [{"x": [one]}, {"x": [other]}],
        "objects.broadcast": (one,),
    }
    name = call.removeprefix("functional.").removesuffix(" async")
    if name in table:
        return table[name]
    if name.startswith("all_reduce"):
        return sums
    if name.startswith(("all_gather", "rearrange")):
        return np.concatenate(xs)
    assert name.startswith(("shift", "exchange send")), name
    return [xs[1 - me]] if "exchange" in name else xs[1 - me]


def plain(found: Any) -> Any:
    return found.wait() if isinstance(found, meshcomm.Handle) else found


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[key], wanted[key]) for key in wanted)
    if wanted is None:
        return found is None
    return np.array_equal(found.numpy(), wanted)


@pytest.mark.mesh(**DIMS["dims"], merge=DIMS["merge"], validate_calls=1, via="gloo")
def test_a_pending_result_is_waited_for_and_a_subclass_with_values_is_sent(mesh: Mesh) -> None:
    size = 1 << 16
    x = torch.arange(float(size))
    xs = [x.numpy(), 2 * x.numpy()]
    for kind, make in KINDS.items():
        for call, made in CALLS.items():
            if call in HALVES or call in ("exchange recv", "mean weights") or call.endswith("out"):
                continue
            if call.startswith("objects") and not kind.startswith("pending"):
                continue  # an object that is not plain data is refused
            given = make(mesh, x)
            if call.startswith("exchange"):
                found = mesh.exchange("dp", [(given, peer(mesh))], [(torch.empty(size), peer(mesh))])
            else:
                found = plain(made(mesh, given))
            assert same(found, expected(call, xs, mesh.rank)), (kind, call, found)
    for name, call in {
        "all_gather": lambda out: mesh.all_gather("dp", torch.arange(2.0), out=out),
        "scatter": lambda out: mesh.scatter(
            "dp", torch.arange(2.0).repeat(4) if mesh.rank else None, 1, out=out
        ),
        "recv": lambda out: mesh.exchange(
            "dp", [(torch.arange(2.0).repeat(2), peer(mesh))], [(out, peer(mesh))]
        )[0],
    }.items():
        out = pending(mesh, torch.ones(4))
        assert same(call(out), np.array([0, 1, 0, 1])) and same(out.trigger_wait(), np.array([0, 1, 0, 1])), (
            name
        )


# -- tensors made in inference mode, on some ranks ---------------------------------------------------

# The call with x and `out`, the size of `out`, and this rank's result, computed by NumPy from the x of both ranks.
WRITES: dict[str, tuple[Callable[[Mesh, Tensor, Tensor], Any], int, Callable[[Any, int], Any]]] = {
    "sum": (lambda m, x, out: m.all_reduce("dp", x), 8, lambda xs, me: xs[0] + xs[1]),
    "avg": (lambda m, x, out: m.all_reduce("dp", x, "avg"), 8, lambda xs, me: (xs[0] + xs[1]) / 2),
    "avg async": (
        lambda m, x, out: m.all_reduce("dp", x, "avg", async_op=True).wait(),
        8,
        lambda xs, me: (xs[0] + xs[1]) / 2,
    ),
    "max": (lambda m, x, out: m.all_reduce("dp", x, "max"), 8, lambda xs, me: np.maximum(*xs)),
    "premul_sum": (
        lambda m, x, out: m.all_reduce("dp", x, "premul_sum", factor=0.5),
        8,
        lambda xs, me: (xs[0] + xs[1]) / 2,
    ),
    "list": (lambda m, x, out: m.all_reduce("dp", [x, out], "avg")[0], 8, lambda xs, me: (xs[0] + xs[1]) / 2),
    "reduce": (
        lambda m, x, out: m.reduce("dp", x, 1, "avg"),
        8,
        lambda xs, me: (xs[0] + xs[1]) / 2 if me else None,
    ),
    "broadcast": (lambda m, x, out: m.broadcast("dp", x, 1), 8, lambda xs, me: xs[1]),
    "all_gather": (
        lambda m, x, out: m.all_gather("dp", x, out=out),
        16,
        lambda xs, me: np.concatenate(xs),
    ),
    "reduce_scatter": (
        lambda m, x, out: m.reduce_scatter("dp", x, op="avg", out=out),
        4,
        lambda xs, me: np.split((xs[0] + xs[1]) / 2, 2)[me],
    ),
    "all_to_all": (
        lambda m, x, out: m.all_to_all("dp", x, out=out),
        8,
        lambda xs, me: np.concatenate([np.split(x, 2)[me] for x in xs]),
    ),
    "scatter": (
        lambda m, x, out: m.scatter("dp", x if me_of(m) == 0 else None, 0, out=out),
        4,
        lambda xs, me: np.split(xs[0], 2)[me],
    ),
    "gather": (
        lambda m, x, out: m.gather("dp", x, 0, out=out if me_of(m) == 0 else None),
        16,
        lambda xs, me: None if me else np.concatenate(xs),
    ),
    "exchange": (
        lambda m, x, out: m.exchange("dp", [(x, peer(m))], [(out, peer(m))])[0],
        8,
        lambda xs, me: xs[1 - me],
    ),
    "uneven": (
        lambda m, x, out: m.all_gather("dp", x, uneven=True, out=out),
        16,
        lambda xs, me: np.concatenate(xs),
    ),
}


def me_of(mesh: Mesh) -> int:
    return mesh.coord("dp")


@pytest.mark.mesh(dp=2, validate_calls=2, via=("simulator", "gloo", "emulated_nccl"))
def test_tensors_made_in_inference_mode_are_like_others(mesh: Mesh) -> None:
    xs = [np.arange(8, dtype=np.float32) * (1 + me) for me in range(2)]
    for name, (call, size, wanted) in WRITES.items():
        # In turn: made on no rank, one rank or all; called outside the mode or inside; compared or prepared.
        for turn in range(12):
            made = (set(), {0}, {1}, {0, 1})[turn % 4]
            with torch.inference_mode(mesh.rank in made):
                x, out = torch.from_numpy(xs[mesh.rank].copy()) * 1, torch.zeros(size)
            assert x.is_inference() == out.is_inference() == (mesh.rank in made)
            with torch.inference_mode(turn in (5, 9)):
                found = call(mesh, x, out)
            assert same(found, wanted(xs, mesh.rank)), (name, turn, found)
