"""Arguments and tensors that nobody meant: refused by name on every rank, and the group goes on; or right."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import meshcomm
from meshcomm.errors import LayoutError, MeshcommError, PatternError, ShapeError, UnknownDim, UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.testing import Pool
from tests.comm import hostile_calls

DIMS: dict[str, Any] = {"dims": {"dp": 2, "tp": 2, "one": 1}, "merge": {"both": ("dp", "tp")}}


def ones(*shape: int) -> Tensor:
    return torch.ones(shape or (4, 4))


def quantized() -> Tensor:
    with warnings.catch_warnings(action="ignore"):  # torch's: a prototype
        return torch.quantize_per_tensor(ones(), 0.1, 0, torch.quint8)


def nested() -> Tensor:
    with warnings.catch_warnings(action="ignore"):
        return torch.nested.nested_tensor([ones(2, 2), ones(3, 2)])


def peer(mesh: Mesh) -> int:
    return 1 - mesh.coord("dp")


# What is refused, with which error, and words of its text. None of it may reach torch.
REFUSED: dict[str, tuple[Callable[[Mesh], object], type[MeshcommError], str]] = {
    "quantized": (lambda m: m.broadcast("dp", quantized(), 0), ShapeError, "quantized tensor"),
    "quantized in a list": (lambda m: m.broadcast("dp", [quantized()], 0), ShapeError, "quantized"),
    "quantized by levels": (
        lambda m: m.all_reduce(("dp", "tp"), quantized(), algorithm="hierarchical"),
        ShapeError,
        "quantized",
    ),
    "nested": (lambda m: m.all_gather("dp", nested()), ShapeError, "nested tensor of 2"),
    "nested, rearranged": (lambda m: m.rearrange(nested(), "a b -> b a"), ShapeError, "nested"),
    "sparse in a list": (
        lambda m: m.all_reduce("dp", [ones(), ones().to_sparse()]),
        ShapeError,
        "cannot carry",
    ),
    "sparse, functional": (lambda m: m.functional.slice("dp", ones().to_sparse()), ShapeError, "to_dense"),
    "no tensor, functional": (
        lambda m: m.functional.all_reduce("dp", 1.5, "max", grad="sum"),  # type: ignore[arg-type]
        ShapeError,
        "given a float",
    ),
    "expanded in place": (lambda m: m.all_reduce("dp", ones(1).expand(3)), ShapeError, "one place in memory"),
    "expanded in a list": (lambda m: m.broadcast("dp", [ones(1).expand(3)], 0), ShapeError, "one place"),
    "expanded by levels": (
        lambda m: m.all_reduce(("dp", "tp"), ones(1).expand(3), algorithm="hierarchical"),
        ShapeError,
        "one place",
    ),
    "overlapping windows": (
        lambda m: m.all_reduce("dp", ones(5).unfold(0, 3, 1), algorithm="ring"),
        ShapeError,
        "one place in memory",
    ),
    "expanded out": (
        lambda m: m.all_gather("dp", ones(2), out=ones(1).expand(4)),
        ShapeError,
        "out cannot write",
    ),
    "expanded to receive": (
        lambda m: m.exchange("dp", [(ones(3), peer(m))], [(ones(1).expand(3), peer(m))]),
        ShapeError,
        "one place",
    ),
    "two receives into one tensor": (
        lambda m: (lambda x: m.exchange("dp", [(ones(), peer(m))] * 2, [(x, peer(m)), (x[1:], peer(m))]))(
            ones()
        ),
        ShapeError,
        "that overlap",
    ),
    "a receive into what is sent": (
        lambda m: (lambda x: m.exchange("dp", [(x, peer(m))], [(x, peer(m))]))(ones()),
        ShapeError,
        "memory of its own",
    ),
    "receives into two columns and a row across them": (
        lambda m: (lambda x: m.exchange("dp", [], [(x[:, 0], peer(m)), (x[:, 1], peer(m)), (x[1], peer(m))]))(
            torch.ones(3, 2)
        ),
        ShapeError,
        "that overlap",
    ),
    "out is no tensor": (lambda m: m.reduce_scatter("dp", ones(), out=0), ShapeError, "given a int"),  # type: ignore[arg-type]
    "a list of dims": (lambda m: m.all_reduce(["dp", "tp"], ones()), UnknownDim, "tuple"),  # type: ignore[call-overload]
    "a list of dims for a group": (lambda m: m.group(["dp", "tp"]), UnknownDim, "tuple"),  # type: ignore[arg-type]
    "no dims by ring": (lambda m: m.all_reduce(None, ones(), algorithm="ring"), UnknownDim, "None"),  # type: ignore[call-overload]
    "axis None": (lambda m: m.all_gather("dp", ones(), None), ShapeError, "not a whole number"),  # type: ignore[arg-type]
    "axis 1.0": (lambda m: m.all_to_all("dp", ones(), 0, 1.0), ShapeError, "not a whole number"),  # type: ignore[arg-type]
    "axis as text": (lambda m: m.functional.slice("dp", ones(), "0"), ShapeError, "whole number"),  # type: ignore[arg-type]
    "factor as text": (
        lambda m: m.all_reduce("dp", ones(), "premul_sum", factor="2"),  # type: ignore[call-overload]
        ShapeError,
        "not a number",
    ),
    "factor of another shape": (
        lambda m: m.all_reduce("dp", ones(), "premul_sum", factor=ones(8, 1, 1)),  # type: ignore[call-overload]
        ShapeError,
        "not a number",
    ),
    "complex factor": (
        lambda m: m.reduce("dp", ones(), 0, "premul_sum", factor=1j),  # type: ignore[arg-type]
        ShapeError,
        "for float32",
    ),
    "splits of halves": (lambda m: m.all_to_all("dp", ones(), splits=[1.5, 2.5]), ShapeError, "do not cut"),  # type: ignore[list-item]
    "no splits": (lambda m: m.all_to_all("dp", ones(), splits=4), ShapeError, "do not cut"),  # type: ignore[arg-type]
    "offset as text": (lambda m: m.shift("dp", ones(), "1"), LayoutError, "number of coords"),  # type: ignore[arg-type]
    "a negative tag": (
        lambda m: m.exchange("dp", [(ones(), peer(m), -1)], [(ones(), peer(m), -1)]),
        LayoutError,
        "not a tag",
    ),
    "a tag of the library": (
        lambda m: m.exchange("dp", [(ones(), peer(m), 1 << 30)], [(ones(), peer(m), 1 << 30)]),
        LayoutError,
        "not a tag",
    ),
    "a message without a peer": (
        lambda m: m.exchange("dp", [(ones(),)], [(ones(), peer(m))]),  # type: ignore[list-item]
        ShapeError,
        "not a list of messages",
    ),
    "a message with two tags": (
        lambda m: m.exchange("dp", [(ones(), peer(m), 0, 7)], [(ones(), peer(m))]),  # type: ignore[list-item]
        ShapeError,
        "a tuple of 4",
    ),
    "no time to wait": (lambda m: m.barrier("dp", timeout_s=float("nan")), UnsupportedOp, "not a time"),
    "all ranks later": (lambda m: m.barrier(async_op=True), UnsupportedOp, "async_op without dims"),
    "nothing to scatter": (lambda m: m.scatter("dp", ones(7), 0), ShapeError, "scatter"),
    "axes past a header": (lambda m: m.scatter("dp", ones(2, *[1] * 15), 0), ShapeError, "scatter"),
    "no shape to explain": (
        lambda m: meshcomm.explain_pattern("a b -> b a", {"dp": 2}, (4, "4")),  # type: ignore[arg-type]
        PatternError,
        "not a shape",
    ),
    "no mesh to explain": (
        lambda m: meshcomm.explain_pattern("a -> a", ["dp"], (4,)),  # type: ignore[arg-type]
        LayoutError,
        "needs a mesh",
    ),
}


def refusals(mesh: Mesh) -> dict[str, list[tuple[str, str]]]:
    """How each call ends, twice, with the group in use in between."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, (call, _, _) in REFUSED.items():
        for _ in range(2):
            try:
                call(mesh)
                how = ("nothing", "")
            except Exception as error:
                how = (type(error).__name__, str(error))
            found.setdefault(name, []).append(how)
            assert mesh.all_reduce("dp", ones(1)).item() == 2, name
    return found


def refusals_on_gloo() -> dict[str, list[tuple[str, str]]]:
    with meshcomm.init(**DIMS, device="cpu", timeout_s=60, validate_calls=0) as mesh:
        return refusals(mesh)


@pytest.mark.parametrize("via", ["simulator", "gloo"])
def test_every_rank_refuses_and_the_group_goes_on(via: str, pool: Pool) -> None:
    ranks = meshcomm.simulate(refusals, **DIMS) if via == "simulator" else pool.run(refusals_on_gloo, ranks=4)
    for rank, found in enumerate(ranks):
        for name, (_, kind, words) in REFUSED.items():
            for how, text in found[name]:
                assert how == kind.__name__ and words in text, (rank, name, how, text)
                assert all(label in text for label in ("given:", "expected:", "try:")), text


# A misfit that one rank alone can see is said when the others have had their part of the call.
ALONE: dict[str, tuple[Callable[[Mesh], object], tuple[int, ...]]] = {
    "gather": (lambda m: m.gather("dp", ones(), 1, out=ones(3)), (1,)),
    "gather, uneven": (lambda m: m.gather("dp", ones(), 1, uneven=True, out=ones(3)), (1,)),
    "all_gather, uneven": (
        lambda m: m.all_gather("dp", ones(), uneven=True, out=ones(8 if m.coord("dp") else 3, 4)),
        (0,),
    ),
    "all_to_all": (
        lambda m: m.all_to_all("dp", ones(), 0, 1, splits=[1, 3] if m.coord("dp") else [2, 2]),
        (0, 1),
    ),
    "scatter": (lambda m: m.scatter("dp", ones(7) if m.coord("dp") else None, 1), (0, 1)),
}


def alone(mesh: Mesh) -> dict[str, bool]:
    found = {}
    for name, (call, _) in ALONE.items():
        try:
            call(mesh)
            found[name] = False
        except ShapeError:
            found[name] = True
        assert mesh.all_reduce("dp", ones(1)).item() == 2
    return found


def test_what_one_rank_refuses_leaves_no_other_waiting() -> None:
    for coord, found in enumerate(meshcomm.simulate(alone, dims={"dp": 2})):
        assert found == {name: coord in ranks for name, (_, ranks) in ALONE.items()}


def in_other_modes(mesh: Mesh) -> list[Any]:
    """Calls that are made in one mode of torch and waited for in another."""
    weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    with torch.no_grad():
        begun = mesh.all_reduce("dp", [weight, weight.new_ones(2)], async_op=True)
        turned = mesh.all_reduce("dp", weight.detach().t(), async_op=True)
    begun.wait()
    turned.wait()
    with torch.inference_mode():
        columns = torch.arange(6.0).view(2, 3).t()
    mesh.all_reduce("dp", columns)
    with torch.inference_mode():
        row = torch.arange(2.0)
    mesh.all_reduce("dp", row, algorithm="ring")
    negative = torch.tensor([0 + 2j, 0 + 3j]).conj().imag
    mesh.all_reduce("dp", [negative])
    with torch.device("meta"):  # as around a model that is made without memory
        summed = mesh.all_reduce("dp", torch.arange(1.0, 4.0, device="cpu").to(torch.bfloat16))
        received = mesh.shift("dp", summed, handshake=True)
        told = mesh.objects.all_gather("dp", mesh.coord("dp"))
    assert received is not None
    # One element of a slice: contiguous, whatever its stride.
    lone = torch.tensor([0, 1 + mesh.coord("dp"), 0], dtype=torch.int16)[1::2]
    assert lone.is_contiguous() and lone.stride() == (2,)
    mesh.broadcast("dp", lone, src=2)
    return [
        row.tolist(),
        lone.tolist(),
        columns.tolist(),
        negative.tolist(),
        summed.tolist(),
        received.tolist(),
        told,
    ]


def in_other_modes_on_gloo() -> list[Any]:
    with meshcomm.init(dims={"dp": 3}, device="cpu", timeout_s=60) as mesh:
        return in_other_modes(mesh)


@pytest.mark.parametrize("via", ["simulator", "gloo"])
def test_a_mode_of_torch_changes_nothing(via: str, pool: Pool) -> None:
    ranks = (
        meshcomm.simulate(in_other_modes, dims={"dp": 3})
        if via == "simulator"
        else pool.run(in_other_modes_on_gloo, ranks=3)
    )
    for found in ranks:
        columns = [[0.0, 9.0], [3.0, 12.0], [6.0, 15.0]]
        assert found == [[0.0, 3.0], [3], columns, [-6.0, -9.0], [3.0, 6.0, 9.0], [3.0, 6.0, 9.0], [0, 1, 2]]


class Slow:
    """Work that is over when the test says so."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.asked = threading.Event()

    def wait(self, timeout: object = None) -> bool:
        self.asked.set()
        return self.over.wait()

    def is_completed(self) -> bool:
        return self.over.is_set()


class By:
    """Whose calls the handles of these tests are."""

    def where(self, call: str) -> str:
        return call

    def failed(self, call: str, error: BaseException) -> MeshcommError:
        return ShapeError(call)


def test_two_threads_wait_for_one_handle() -> None:
    work, made = Slow(), []

    def finish() -> str:
        made.append(1)
        return "result"

    handle = meshcomm.Handle([work], By(), "a call", finish)
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(handle.wait())) for _ in range(2)]
    threads[0].start()
    assert work.asked.wait(60)
    threads[1].start()
    assert not handle.is_success() and not found
    work.over.set()
    for thread in threads:
        thread.join(60)
    assert found == ["result", "result"] and made == [1]


def test_what_ended_a_wait_ends_every_wait() -> None:
    work = Slow()
    work.over.set()

    def finish() -> None:
        raise ShapeError("no room", given="a", expected="b", hint="c")

    handle = meshcomm.Handle([work], By(), "a call", finish)
    for wait in (handle.wait, handle.wait, handle.result):
        with pytest.raises(ShapeError, match="no room"):
            wait()
    assert isinstance(handle.exception(), ShapeError) and not handle.is_success()


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), "5", True])
def test_a_handle_waits_for_a_time(timeout_s: Any) -> None:
    work = Slow()
    work.over.set()
    handle = meshcomm.Handle([work], By(), "a call", lambda: 3)
    with pytest.raises(UnsupportedOp, match="not a time to wait"):
        handle.wait(timeout_s)
    assert handle.wait(float("inf")) == 3


def test_values_in_awkward_memory_arrive() -> None:
    for seed in (1, 2):
        found = meshcomm.simulate(
            hostile_calls.program, **hostile_calls.DIMS, rank_order=hostile_calls.ORDER, args=(seed, 40)
        )
        assert found == [[]] * 6


def test_values_in_awkward_memory_arrive_on_gloo(pool: Pool) -> None:
    assert pool.run(hostile_calls.on_gloo, 3, 25, ranks=6) == [[]] * 6


def in_its_own_memory() -> list[bool]:
    """all_to_all with x itself as out, before and after the call has been prepared."""
    found = []
    with meshcomm.init(dims={"dp": 3}, device="cpu", timeout_s=60, validate_calls=0) as mesh:
        coord, length = mesh.coord("dp"), 600_000
        everyones = [torch.arange(length) + length * c for c in range(3)]
        expected = torch.cat([x.chunk(3)[coord] for x in everyones])
        for _ in range(6):
            mesh.all_to_all("dp", everyones[coord])
            x = everyones[coord].clone()
            found.append(mesh.all_to_all("dp", x, out=x) is x and torch.equal(x, expected))
    return found


def test_a_prepared_all_to_all_does_not_overwrite_what_is_still_to_leave(pool: Pool) -> None:
    assert pool.run(in_its_own_memory, ranks=3) == [[True] * 6] * 3
