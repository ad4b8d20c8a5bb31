"""Invalid arguments and tensors: every rank refuses them by name, first or prepared, and the group keeps working."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.fx.experimental.proxy_tensor import make_fx

import meshcomm
from meshcomm.errors import (
    AutogradError,
    LayoutError,
    MeshcommError,
    PatternError,
    ShapeError,
    UnknownDim,
    UnsupportedOp,
)
from meshcomm.mesh import Mesh

DIMS: dict[str, Any] = {"dims": {"dp": 2, "tp": 2, "one": 1}, "merge": {"both": ("dp", "tp")}}
LEVELS: dict[str, Any] = {"algorithm": "hierarchical"}


def ones(*shape: int) -> Tensor:
    return torch.ones(shape or (4, 4))


def quantized() -> Tensor:
    return torch.quantize_per_tensor(ones(), 0.1, 0, torch.quint8)


def nested() -> Tensor:
    return torch.nested.nested_tensor([ones(2, 2), ones(3, 2)])


def watched(*shape: int) -> Tensor:
    return torch.ones(shape, requires_grad=True)


def peer(mesh: Mesh) -> int:
    return 1 - mesh.coord("dp")


def both(mesh: Mesh, *outs: Tensor) -> object:
    """Send the peer as many messages as it sends back."""
    return mesh.exchange("dp", [(ones(), peer(mesh))] * len(outs), [(out, peer(mesh)) for out in outs])


Refused = tuple[Callable[[Any], object], type[MeshcommError], str]

# Refused calls, with the class of the error and words of its text. None of them may reach torch.
REFUSED: list[Refused] = [
    # Tensors of a kind, or in memory, that no call can send.
    (lambda m: m.broadcast("dp", quantized(), 0), ShapeError, "quantized tensor"),
    (lambda m: m.broadcast("dp", [quantized()], 0), ShapeError, "quantized"),
    (lambda m: m.all_reduce(("dp", "tp"), quantized(), **LEVELS), ShapeError, "quantized"),
    (lambda m: m.all_gather("dp", nested()), ShapeError, "nested tensor of 2"),
    (lambda m: m.rearrange(nested(), "a b -> b a"), ShapeError, "nested"),
    (lambda m: m.all_reduce("dp", [ones(), ones().to_sparse()]), ShapeError, "cannot carry"),
    (lambda m: m.broadcast("dp", torch.eye(3).to_sparse(), 1), ShapeError, "cannot carry"),
    (lambda m: m.send("dp", ones().to_sparse(), peer(m)), ShapeError, "cannot carry"),
    (lambda m: m.all_gather("dp", ones().to("meta")), ShapeError, "cannot carry"),
    (lambda m: m.functional.slice("dp", ones().to_sparse()), ShapeError, "to_dense"),
    (lambda m: m.functional.all_reduce("dp", 1.5, "max", grad="sum"), ShapeError, "given a float"),
    (lambda m: m.all_reduce("dp", 3.0), ShapeError, "given a float"),
    (lambda m: m.broadcast("dp", [ones(), 3.0], src=0), ShapeError, "of a list along.*given a float"),
    (lambda m: m.all_to_all("dp", [1.0]), ShapeError, "given a list"),
    (lambda m: m.all_reduce("dp", ones(1).expand(3)), ShapeError, "elements share memory"),
    (lambda m: m.broadcast("dp", [ones(1).expand(3)], 0), ShapeError, "share memory"),
    (lambda m: m.all_reduce(("dp", "tp"), ones(1).expand(3), **LEVELS), ShapeError, "share memory"),
    (lambda m: m.all_reduce("dp", ones(5).unfold(0, 3, 1), algorithm="ring"), ShapeError, "share memory"),
    (lambda m: m.all_gather("dp", ones(2), out=ones(1).expand(4)), ShapeError, "out cannot write"),
    (lambda m: both(m, ones(1).expand(3)), ShapeError, "share memory"),
    (lambda m: (lambda x: both(m, x, x[1:]))(ones()), ShapeError, "that overlap"),
    (lambda m: (lambda x: m.exchange("dp", [(x, peer(m))], [(x, peer(m))]))(ones()), ShapeError, "separate memory"),
    (lambda m: (lambda x: both(m, x[:, 0], x[:, 1], x[1]))(ones(3, 2)), ShapeError, "that overlap"),
    (lambda m: m.all_gather("dp", watched(4)), AutogradError, "lose the gradient of a tensor that needs gradients"),
    (lambda m: m.shift("dp", watched(4)), AutogradError, "lose the gradient of a tensor that needs gradients"),
    (lambda m: torch.jit.trace(lambda x: m.all_reduce("dp", x.clone()), (ones(),)), UnsupportedOp, "torch.jit.trace"),
    (lambda m: make_fx(lambda x: m.all_reduce("dp", x.clone()))(ones()), UnsupportedOp, "by make_fx"),
    (lambda m: make_fx(lambda x: m.shift("dp", x))(ones()), UnsupportedOp, "by make_fx"),
    (lambda m: torch.jit.trace(lambda x: m.functional.shift("dp", x), (ones(),)), UnsupportedOp, "torch.jit.trace"),
    (lambda m: m.all_reduce("dp", watched(4)), AutogradError, "change a tensor that needs gradients"),
    # Invalid values of `out`.
    (lambda m: m.reduce_scatter("dp", ones(), out=0), ShapeError, "given a int"),
    (lambda m: m.all_gather("dp", [ones()], out=ones()), ShapeError, "given a list"),
    (lambda m: m.all_gather("dp", ones(4), out=ones(4)), ShapeError, "out does not fit the result"),
    (lambda m: m.all_gather("dp", ones(2), out=ones(4).double()), ShapeError, "out does not fit the result"),
    # Dims, axes, coords, tags, offsets.
    (lambda m: m.all_reduce(["dp", "tp"], ones()), UnknownDim, "tuple"),
    (lambda m: m.group(["dp", "tp"]), UnknownDim, "tuple"),
    (lambda m: m.all_reduce(None, ones(), algorithm="ring"), UnknownDim, "None"),
    (lambda m: m.all_reduce("dpp", ones()), UnknownDim, 'did you mean "dp"'),
    (lambda m: m.all_reduce(("tp", "one", "dp"), ones()), UnknownDim, "no group was declared over"),
    (lambda m: m.all_reduce(ones(), "dp"), UnknownDim, "got a Tensor where dims are expected"),
    (lambda m: m.all_gather("dp", ones(), "0"), ShapeError, "not an integer"),
    (lambda m: m.all_to_all("dp", ones(), 0, 1.0), ShapeError, "not an integer"),
    (lambda m: m.functional.slice("dp", ones(), "0"), ShapeError, "not an integer"),
    (lambda m: m.functional.all_gather("dp", ones(), 2, grad="slice"), ShapeError, "has no axis 2"),
    (lambda m: m.reduce_scatter("dp", ones(7)), ShapeError, "cannot split axis 0"),
    (lambda m: m.reduce_scatter("dp", ones(4, 5), axis=1), ShapeError, "cannot split axis 1"),
    (lambda m: m.functional.reduce_scatter("dp", ones(3)), ShapeError, "cannot split axis 0"),
    (lambda m: m.all_to_all("dp", ones(), input_split_sizes=[1.5, 2.5]), ShapeError, "input_split_sizes do not split axis 0"),
    (lambda m: m.all_to_all("dp", ones(), input_split_sizes=[1, 2]), ShapeError, "input_split_sizes do not split axis 0"),
    (lambda m: m.all_to_all("dp", ones(), input_split_sizes=4), ShapeError, "input_split_sizes do not split axis 0"),
    (lambda m: m.all_gather("dp", ones(), 0, dim=0), ShapeError, "axis and dim are the same"),
    (lambda m: m.functional.slice("dp", ones(), 0, dim=0), ShapeError, "axis and dim are the same"),
    (lambda m: m.all_to_all("dp", ones(), output_split_sizes=[2, 2]), ShapeError, "together with input_split_sizes"),
    (lambda m: m.all_to_all("dp", ones(), input_split_sizes=[2, 2], output_split_sizes=[4]), ShapeError, "output_split_sizes does not give"),
    (lambda m: m.all_to_all("dp", ones(), input_split_sizes=[2, 2], output_split_sizes=2), ShapeError, "output_split_sizes does not give"),
    (lambda m: m.gather("dp", ones(), dst=2), LayoutError, "dst=2 is not a coord"),
    (lambda m: m.broadcast("dp", ones(2), [1]), LayoutError, "is not a coord"),
    # True equals 1, so it would find the prepared call with src=1.
    (lambda m: m.broadcast("dp", ones(2), True), LayoutError, "is not a coord"),
    (lambda m: m.reduce("dp", ones(2), True), LayoutError, "is not a coord"),
    (lambda m: m.broadcast("dp", ones(2), src=7), LayoutError, "src=7 is not a coord"),
    (lambda m: m.recv("dp", ones(), src=m.coord("dp")), UnsupportedOp, "cannot send messages to itself.*mesh.exchange"),
    (lambda m: m.objects.send("dp", 1, m.coord("dp")), UnsupportedOp, "cannot send messages to itself"),
    (
        lambda m: m.exchange("dp", [(ones(), m.coord("dp"))], [(torch.ones(9), m.coord("dp"))]),
        ShapeError,
        "the receive does not fit the message that this rank sends to itself",
    ),
    (lambda m: m.recv("dp", ones(), src=None), LayoutError, "src=None is not a coord.*mesh.recv_any"),
    (lambda m: m.shift("dp", ones(), "1"), LayoutError, "number of coords"),
    (lambda m: m.exchange("dp", [(ones(), peer(m), -1)]), LayoutError, "not a valid tag"),
    (lambda m: m.exchange("dp", [(ones(), peer(m), 1 << 30)]), LayoutError, "not a valid tag"),
    (lambda m: m.exchange("dp", [(ones(),)]), ShapeError, "not a list of messages"),
    (lambda m: m.exchange("dp", [(ones(), peer(m), 0, 7)]), ShapeError, "a tuple of 4"),
    # Operations and their factors.
    (lambda m: m.all_reduce("dp", ones(), "premul_sum", factor="2"), ShapeError, "not a number"),
    (lambda m: m.all_reduce("dp", ones(), "premul_sum", factor=ones(8)), ShapeError, "not a number"),
    (lambda m: m.reduce("dp", ones(), 0, "premul_sum", factor=1j), ShapeError, "for float32"),
    (lambda m: m.all_reduce("dp", ones(), factor=2.0), ShapeError, "factor has no effect with op='sum'"),
    (lambda m: m.all_reduce("dp", ones(), "premul_sum"), ShapeError, "without a factor"),
    (lambda m: m.all_reduce("dp", ones(), "all_gather"), MeshcommError, "no reduce op"),
    (lambda m: m.all_reduce("dp", ones(), ("broadcast", 1)), MeshcommError, "no reduce op"),
    (lambda m: m.all_reduce("dp", ones(), ["sum"]), MeshcommError, "no reduce op"),
    (lambda m: m.all_reduce("dp", ones(), "mean"), UnsupportedOp, "no reduce op 'mean'.*op=\"avg\""),
    (lambda m: m.all_reduce("dp", ones(), algorithm="star"), MeshcommError, "no algorithm 'star'"),
    (lambda m: m.all_reduce("dp", ones(), **LEVELS), MeshcommError, "no algorithm 'hierarchical'"),
    # Gradients.
    (lambda m: m.functional.all_reduce("dp", watched(2), grad="both"), MeshcommError, "rule 'both'"),
    (lambda m: m.functional.all_gather("dp", watched(2), grad="mine"), MeshcommError, "rule 'mine'"),
    (lambda m: m.functional.all_reduce("dp", watched(2), "max", grad="sum"), AutogradError, "for op='max'"),
    (lambda m: m.functional.reduce_scatter("dp", watched(2), 0, "max"), AutogradError, "for op='max'"),
    # Timeouts, and inputs without anything to send.
    (lambda m: m.debug.monitored_barrier("dp", timeout_s=float("nan")), UnsupportedOp, "not a valid timeout"),
    (lambda m: m.barrier(async_op=True), UnsupportedOp, "async_op without dims"),
    (lambda m: m.scatter("dp", ones(7), 0), ShapeError, "scatter"),
    (lambda m: m.scatter("dp", None, 0), ShapeError, "has nothing t"),
    (lambda m: m.scatter("dp", ones(2, *[1] * 15), 0), ShapeError, "scatter"),
    (lambda m: meshcomm.explain_pattern("a b -> b a", {"dp": 2}, (4, "4")), PatternError, "not a shape"),
    (lambda m: meshcomm.explain_pattern("a -> a", ["dp"], (4,)), LayoutError, "needs a mesh"),
]  # fmt: skip
ON_GLOO_ALONE: list[Refused] = [
    (
        lambda m: m.all_reduce("dp", DTensor.from_local(ones(), m["dp"], [Replicate()], run_check=False)),
        ShapeError,
        "given a DTensor",
    ),
    (lambda m: m.all_reduce("dp", ones().to(torch.float8_e4m3fn)), UnsupportedOp, "sum of float8_e4m3fn is not"),
    (lambda m: m.all_reduce("dp", ones(), "band"), UnsupportedOp, "band of float32 is not possible on gloo"),
    (lambda m: m.all_reduce("dp", ones().int(), "avg"), UnsupportedOp, "avg of int32 is not possible on gloo"),
]  # fmt: skip

# Each call with each odd kind of tensor; and peers and tags that compare equal to prepared ones.
CALLS: list[Callable[[Any, Any], object]] = [
    lambda m, x: m.all_reduce("dp", x),
    lambda m, x: m.all_reduce("dp", x, async_op=True),
    lambda m, x: m.reduce("dp", x, 1),
    lambda m, x: m.broadcast("dp", x, 1),
    lambda m, x: m.all_gather("dp", x),
    lambda m, x: m.all_gather("dp", torch.ones(2), out=x),
    lambda m, x: m.reduce_scatter("dp", x),
    lambda m, x: m.reduce_scatter("dp", torch.ones(8), out=x),
    lambda m, x: m.all_to_all("dp", x),
    lambda m, x: m.all_to_all("dp", torch.ones(4), out=x),
    lambda m, x: m.recv("dp", x, src=peer(m)),
    lambda m, x: m.irecv("dp", x, peer(m)),
    lambda m, x: m.exchange("dp", [], [(x, peer(m))]),
    lambda m, x: m.shift("dp", x),
    lambda m, x: m.send("dp", x, peer(m)),
    lambda m, x: m.isend("dp", x, peer(m)),
    lambda m, x: m.exchange("dp", [(x, peer(m))]),
]
ODD: list[Callable[[], Any]] = [
    nested,
    lambda: torch.ones(4).to_mkldnn(),
    lambda: torch.ones(4, device="meta"),
    lambda: torch.ones(4).to_sparse(),
    lambda: [1.0, 2.0],
]
TO: list[Callable[[Any, Any, Any], object]] = [
    lambda m, to, tag: m.send("dp", ones(4), to, tag),
    lambda m, to, tag: m.isend("dp", ones(4), to, tag),
    lambda m, to, tag: m.recv("dp", ones(4), src=to, tag=tag),
    lambda m, to, tag: m.irecv("dp", ones(4), to, tag),
    lambda m, to, tag: m.exchange("dp", [(ones(4), to, tag)]),
]


def told(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def refusals(mesh: Mesh, table: list[Refused] = REFUSED) -> list[tuple[str, str]]:
    """How each call ends; an all_reduce after each shows that the group still works."""
    warnings.simplefilter("ignore")  # torch warns of prototypes
    found = []
    for call, _, _ in table:
        found.append(told(lambda: call(mesh)))
        assert mesh.all_reduce("dp", ones(1)).item() == 2
    return found


def odd_ones(mesh: Mesh) -> list[tuple[str, str]]:
    found = [told(lambda: call(mesh, make())) for call in CALLS for make in ODD]
    # Messages may carry tensors that autograd watches. Calls in place would change them, so they are refused.
    found += [told(lambda: call(mesh, watched(4))) for call in CALLS[:-3]]
    own, to = bool(peer(mesh)), peer(mesh)
    for at, tag in ((own, 0), (float(to), 0), (to, False), (to, 0.0), (to, 1 << 30)):
        found += [told(lambda: call(mesh, at, tag)) for call in TO]
    return found


def all_once(mesh: Mesh) -> None:
    for _ in range(2):
        for call in CALLS[:10]:
            call(mesh, torch.ones(4))
        mesh.broadcast("dp", torch.ones(4), 0)
        mesh.all_reduce("dp", torch.ones(4), async_op=True).wait()
        both(mesh, torch.ones(4, 4))
        mesh.shift("dp", torch.ones(4))
        mesh.all_reduce("dp", torch.ones(4), algorithm="ring")  # uses a tag of the library


def check(found: list[tuple[str, str]], table: list[Refused]) -> None:
    for (how, text), (_, kind, words) in zip(found, table, strict=True):
        names = {kind.__name__} if kind is not MeshcommError else {each.__name__ for each in KINDS}
        assert how in names, (words, how, text)
        assert all(part in text for part in words.split(".*")), text
        assert all(label in text for label in ("given:", "expected:", "try:")), text


KINDS = [MeshcommError, *MeshcommError.__subclasses__()]


@pytest.mark.mesh(
    **DIMS["dims"],
    merge=DIMS["merge"],
    validate_calls=0,
    via="gloo",
    not_via={"emulated_nccl": "NCCL lacks some of the operations"},
)
def test_every_rank_refuses_cold_or_prepared_and_the_group_goes_on(mesh: Mesh) -> None:
    every = REFUSED + ON_GLOO_ALONE
    cold, odd = refusals(mesh, every), odd_ones(mesh)
    check(cold, every)
    assert not [each for each in odd if each[0] not in {kind.__name__ for kind in KINDS}]
    warnings.simplefilter("ignore")
    all_once(mesh)
    assert refusals(mesh, every) == cold and odd_ones(mesh) == odd


def test_the_simulator_refuses_the_same() -> None:
    for found in meshcomm.simulate(refusals, **DIMS):
        check(found, REFUSED)


# Calls with a mistake that only some ranks can see, and the coords that raise, after the others have had their part of it.
ALONE: list[tuple[Callable[[Mesh], object], tuple[int, ...]]] = [
    (lambda m: m.gather("dp", ones(), 1, out=ones(3)), (1,)),
    (lambda m: m.gather("dp", ones(), 1, uneven=True, out=ones(3)), (1,)),
    (lambda m: m.all_gather("dp", ones(), uneven=True, out=ones(8 if m.coord("dp") else 3, 4)), (0,)),
    (
        lambda m: m.all_to_all("dp", ones(), 0, 1, input_split_sizes=[1, 3] if m.coord("dp") else [2, 2]),
        (0, 1),
    ),
    (lambda m: m.scatter("dp", ones(7) if m.coord("dp") else None, 1), (0, 1)),
]


def alone(mesh: Mesh) -> None:
    for call, coords in ALONE:
        assert (told(lambda: call(mesh))[0] == "ShapeError") == (mesh.coord("dp") in coords)
        assert mesh.all_reduce("dp", ones(1)).item() == 2


def test_what_one_rank_refuses_leaves_no_other_waiting() -> None:
    meshcomm.simulate(alone, dims={"dp": 2})


# -- tensors that autograd or a transform watches -----------------------------------------------------------

PLAIN: dict[str, Callable[[Mesh, Tensor], Any]] = {
    "all_reduce": lambda m, x: m.all_reduce("dp", x),
    "reduce": lambda m, x: m.reduce("dp", x, 0),
    "broadcast": lambda m, x: m.broadcast("dp", x, 0),
    "all_gather": lambda m, x: m.all_gather("dp", x),
    "gather": lambda m, x: m.gather("dp", x, 0),
    "scatter": lambda m, x: m.scatter("dp", x, 0),
    "reduce_scatter": lambda m, x: m.reduce_scatter("dp", x),
    "all_to_all": lambda m, x: m.all_to_all("dp", x),
    "shift": lambda m, x: m.shift("dp", x),
}


@pytest.mark.mesh(dp=2, via="gloo", validate_calls=2)
def test_plain_calls_refuse_a_tensor_with_a_tangent(mesh: Mesh) -> None:
    x = torch.ones(4)
    for call in PLAIN.values():
        call(mesh, x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones(4))
        for name, call in PLAIN.items():
            # Only the source of a scatter has an x; the other ranks receive its refusal.
            kind = AutogradError if name != "scatter" or mesh.coord("dp") == 0 else MeshcommError
            with pytest.raises(kind, match=rf"{name} along"):
                call(mesh, dual)
        # A tensor without a tangent works as before.
        assert torch.equal(mesh.all_reduce("dp", torch.ones(4)), torch.full((4,), 2.0))


@pytest.mark.mesh(dp=2, via=("gloo", "simulator"))
def test_plain_calls_refuse_a_batch_of_vmap(mesh: Mesh) -> None:
    for name, call in PLAIN.items():
        call(mesh, torch.ones(4))
        if name == "scatter":  # only its source has an x
            continue
        with pytest.raises(UnsupportedOp, match=rf"{name} along.*does not support vmap"):
            torch.vmap(lambda x: call(mesh, x))(torch.ones(3, 4))
        assert torch.equal(mesh.all_gather("dp", torch.ones(1)), torch.ones(2))


def received(mesh: Mesh, receive: Callable[[int], object]) -> None:
    sent = mesh.isend("dp", torch.ones(4), peer(mesh))
    receive(peer(mesh))
    sent.wait()


# All calls that write to the user's memory. torch then refuses a backward that saved it, and gives no wrong gradient.
WRITES: list[Callable[[Mesh, Any], object]] = [
    *(CALLS[at] for at in (0, 3, 5, 7, 9)),
    lambda m, x: m.all_reduce("dp", x, async_op=True).wait(),
    lambda m, x: m.all_reduce("dp", x, op="max"),
    lambda m, x: m.all_reduce("dp", x, algorithm="ring"),
    lambda m, x: m.all_reduce("dp", [x, torch.ones(3)]),
    lambda m, x: m.broadcast("dp", [x, torch.ones(3)], src=1),
    lambda m, x: m.gather("dp", torch.ones(2), dst=0, out=x if m.coord("dp") == 0 else None),
    lambda m, x: m.scatter("dp", torch.ones(8) if m.coord("dp") == 0 else None, src=0, out=x),
    lambda m, x: received(m, lambda at: m.recv("dp", x, src=at)),
    lambda m, x: received(m, lambda at: m.irecv("dp", x, at).wait()),
    lambda m, x: m.exchange("dp", [(torch.ones(4), peer(m))], [(x, peer(m))]),
    lambda m, x: m.exchange("dp", [(torch.ones(4), peer(m))], [(x, peer(m))], async_op=True).wait(),
]
ONE_RANK = 10  # only one rank gets a result
BOTH_WAYS = (12, 13)  # a receive after a send that is in progress, which NCCL cannot do


@pytest.mark.mesh(dp=2, via=("gloo", "simulator", "emulated_nccl"), validate_calls=2)
def test_what_backward_needs_is_not_overwritten_unseen(mesh: Mesh) -> None:
    for number, call in enumerate(WRITES):
        if number in BOTH_WAYS and mesh.plan.defaults.backend == "emulated_nccl":
            continue
        for _ in range(6):  # both as the first and as a prepared call
            x = torch.full((4,), 2.0)
            loss = (watched(4) * x).sum()
            call(mesh, x)
            if number != ONE_RANK or mesh.coord("dp") == 0:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()  # type: ignore[no-untyped-call]


def answers(mesh: Mesh) -> list[tuple[str, str]]:
    """How reductions with every op and some dtypes end, without the sizes in the text."""
    kinds = (torch.float32, torch.int32, torch.bool, torch.float8_e4m3fn, torch.complex64)
    calls = [
        lambda x, op: mesh.all_reduce("dp", x, op),
        lambda x, op: mesh.reduce("dp", x, 0, op),
        lambda x, op: mesh.reduce_scatter("dp", x, op=op),
    ]
    found = []
    for call in calls:
        for op in ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "mean"):
            for kind in kinds:
                how, text = told(lambda: call(torch.ones(4).to(kind), op))
                found.append((f"{op} of {kind}: {how}", text.partition(" on rank ")[0]))
    return found


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_dim_of_one_refuses_what_a_dim_of_two_does(backend: str) -> None:
    meshes = ({"mesh": {"dims": {"dp": size}, "backend": backend}} for size in (1, 2))
    one, two = (meshcomm.simulate(answers, mesh)[0] for mesh in meshes)
    assert one == two
    assert any("band of torch.int32: UnsupportedOp" in how for how, _ in one) == (backend == "nccl")
