"""Calls that do not fit together: what each rank does, and what the error on every rank says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import meshcomm
from meshcomm import Mesh
from meshcomm.errors import MeshcommError
from meshcomm.transfer.link import Link

PATTERN = "n/tp/fsdp k -> n k/tp"


class Rank(NamedTuple):
    """One of 8 ranks: 0 to 3 are the source, fsdp=2 tp=2, and 4 to 7 the target, copy=2 tp=2."""

    number: int
    mesh: Mesh
    link: Link

    @property
    def is_source(self) -> bool:
        return self.number < 4

    def transfer(
        self, pattern: str | None = PATTERN, *, shape: tuple[int, int] = (8, 4), **sizes: Any
    ) -> Any:
        """Make the right call, with parts of a tensor of zeros."""
        n, k = shape
        if self.is_source:
            return self.link.transfer(torch.zeros(n // 4, k), None, pattern, **sizes)
        return self.link.transfer(None, torch.ones(n, k // 2), pattern, **sizes)

    def weights(self, tensors: dict[str, Tensor], **options: Any) -> Any:
        return self.link.weights(tensors, **options)


Call = Callable[[Rank], Any]


def on(*numbers: int, do: Call, others: Call = Rank.transfer) -> Call:
    """Return a call that is different on some ranks."""
    return lambda rank: do(rank) if rank.number in numbers else others(rank)


def passing(x: Callable[[Rank], Any], pattern: str | None = PATTERN) -> Call:
    """Return a call that passes another tensor."""

    def call(rank: Rank) -> Any:
        given = x(rank)
        return rank.link.transfer(*((given, None) if rank.is_source else (None, given)), pattern)

    return call


def holding(source: dict[str, Tensor], target: dict[str, Tensor], **options: Any) -> Call:
    """Return a call of `link.weights`."""
    return lambda rank: rank.weights(source if rank.is_source else target, **options)


def _fake(_: Rank) -> Tensor:
    with FakeTensorMode():
        return torch.zeros(2, 4)


def _dtensor(rank: Rank, *placements: Any) -> DTensor:
    return DTensor.from_local(torch.zeros(2, 4), rank.mesh[rank.mesh.layout.names[:2]], placements)


def _elsewhere(rank: Rank) -> DTensor:
    """Return a DTensor on all 8 ranks."""
    mesh = DeviceMesh("cpu", list(range(8)), mesh_dim_names=("all",))
    return DTensor.from_local(torch.zeros(2, 4), mesh, [Shard(0)], run_check=False)


class _Packed(torch.nn.Linear):
    """A layer with packed weights, as those of torch.ao.quantization: its state dict computes some entries."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}scale"] = torch.tensor(1.0)
        destination[f"{prefix}packed"] = (1, 2)


def _twice(rank: Rank) -> None:
    shapes = [(8, 4), (16, 4)]
    for shape in reversed(shapes) if rank.number == 6 else shapes:
        rank.transfer(shape=shape)


def _pushed(version: Callable[[Rank], Any]) -> Call:
    def call(rank: Rank) -> Any:
        weights = rank.weights({"w": torch.zeros(3)})
        return weights.push(version=version(rank)).wait() if rank.is_source else weights.pull()

    return call


def _other_weights(rank: Rank) -> Any:
    first, second = (rank.weights({"w": torch.zeros(3)}) for _ in range(2))
    return first.push(version=1).wait() if rank.is_source else second.pull()


def _transfer_against_pull(rank: Rank) -> Any:
    weights = rank.weights({"w": torch.zeros(3)})
    if rank.is_source:
        return rank.transfer()
    return weights.pull()


_two, _six = torch.zeros(3), torch.zeros(6)
W = {"w": torch.zeros(3)}

# By name: the call, and the expressions that the text of the error on every rank contains.
MISMATCHES: dict[str, tuple[Call, tuple[str, ...]]] = {
    "a pattern": (on(2, do=lambda rank: rank.transfer("n/fsdp/tp k -> n k/tp")),
        ("the pattern differs", "'n/fsdp/tp k -> n k/tp' on rank 2 of the source")),
    "the other side's pattern": (on(4, 5, 6, 7, do=lambda rank: rank.transfer("n/tp k -> n k/tp")),
        ("the pattern differs", "ranks 4 5 6 7 of the target")),
    "the order of axes": (on(4, 5, 6, 7, do=lambda rank: rank.transfer("k/tp/fsdp n -> k n/tp")), ("the pattern differs",)),
    "a syntax error": (on(1, do=lambda rank: rank.transfer("n//tp k -> n k/tp")), ("rank 1 of the source: not a placement",)),
    "a syntax error on all": (lambda rank: rank.transfer("n) k -> n k/tp"), ("not a placement",)),
    "no arrow": (on(7, do=lambda rank: rank.transfer("n k/tp")), ("rank 7 of the target: a transfer needs two placements",)),
    "other axes": (on(7, do=lambda rank: rank.transfer("n k -> n k m")), ("rank 7 of the target: the two placements have different",)),
    "no pattern": (on(5, do=lambda rank: rank.transfer(None)), ("the pattern differs", "None on rank 5 of the target")),
    "a pattern that is no text": (on(5, do=lambda rank: rank.transfer(b"n k -> n k")), ("rank 5 of the target: a transfer needs two",)),
    "a size": (lambda rank: rank.transfer("(q+r)/tp/fsdp k -> (q+r) k/tp", q=4 + (rank.number == 3)),
        ("sizes differs", r"\('q', 5\).* on rank 3 of the source")),
    "a size that is text": (on(3, do=lambda rank: rank.transfer(n="8")), ("rank 3 of the source: n is not an axis or section", "n='8'")),
    "a size of nothing": (on(3, do=lambda rank: rank.transfer(m=8)), ("rank 3 of the source: m is not an axis",)),
    "a size without a pattern": (on(3, do=lambda rank: rank.transfer(None, n=8)), ("rank 3 of the source: passed the sizes",)),
    "missing sizes": (lambda rank: rank.transfer("(q+r)/tp/fsdp k -> (q+r) k/tp"), ("do not determine its sections",)),
    "wrong sizes": (lambda rank: rank.transfer("(q+r)/tp/fsdp k -> (q+r) k/tp", q=5, r=5), ("do not determine its sections",)),
    "a dtype": (on(0, do=passing(lambda rank: torch.zeros(2, 4).half())),
        ("the dtype differs", "torch.float16 on rank 0 of the source")),
    "the source's dtype": (on(0, 1, 2, 3, do=passing(lambda rank: torch.zeros(2, 4).half())),
        ("torch.float16 of the source, but torch.float32 of the target",)),
    "None": (on(1, 6, do=passing(lambda rank: None)), ("rank 1 of the source: .* of x was given a NoneType", "rank 6 of the target: .* of out")),
    "a list": (on(1, do=passing(lambda rank: [0.0])), ("rank 1 of the source: .* of x was given a list",)),
    "a tensor on the wrong side": (on(2, do=lambda rank: rank.link.transfer(torch.zeros(2, 4), torch.zeros(1), PATTERN)),
        ("rank 2 of the source: passed out, but is not on the target",)),
    "out and into": (on(7, do=lambda rank: rank.link.transfer(None, torch.zeros(8, 2), PATTERN, into=torch.zeros(8, 2))),
        ("rank 7 of the target: passed both out and into",)),
    "a part of another shape": (on(2, do=passing(lambda rank: torch.zeros(2, 5))), (r"rank 2 of the source: a part of shape \(2, 5\)",)),
    "a part of another size": (on(2, do=passing(lambda rank: torch.zeros(3, 4))),
        ("of the source: a part of shape", r"the full shape is \(9, 4\) of the source")),
    "a part with other axes": (on(6, do=passing(lambda rank: torch.zeros(8, 2, 1))), (r"rank 6 of the target: a part of shape \(8, 2, 1\)",)),
    "the target's shape": (on(4, 5, 6, 7, do=lambda rank: rank.transfer(shape=(12, 4))),
        (r"the full shape is \(8, 4\) of the source .*, but \(12, 4\) of the target",)),
    "an unknown dim": (lambda rank: rank.transfer("n/pp k -> n k/tp"), ("source: .*pp",)),
    "parts that do not divide": (lambda rank: rank.transfer("n/tp:3 k -> n k/tp"), ("3 different parts do not divide",)),
    "a DTensor with a pattern": (on(1, do=passing(lambda rank: _dtensor(rank, Shard(0), Shard(0)))), ("rank 1 of the source: x is a DTensor",)),
    "a partial sum": (on(0, 1, 2, 3, do=passing(lambda rank: _dtensor(rank, Partial(), Shard(0)), None), others=lambda rank: rank.transfer(None)),
        ("ranks 0 1 2 3 of the source: a DTensor of partial sums",)),
    "a DTensor of another mesh": (on(0, 1, 2, 3, do=passing(_elsewhere, None), others=lambda rank: [_elsewhere(rank), rank.transfer(None)]),
        ("ranks 0 1 2 3 of the source: a DTensor is split along a dim that the mesh does not have",)),
    "a DTensor with other placements": (
        on(3, do=passing(lambda rank: _dtensor(rank, Shard(0), Replicate()), None), others=lambda rank: (
            passing(lambda rank: _dtensor(rank, Shard(0), Shard(0)), None)(rank) if rank.is_source else rank.transfer(None))),
        ("the placement differs", "on rank 3 of the source")),
    "a meta tensor": (on(0, do=passing(lambda rank: torch.zeros(2, 4, device="meta"))), ("rank 0 of the source: .* cannot carry this tensor",)),
    "a fake tensor": (on(0, do=passing(_fake)), ("rank 0 of the source: .* was given a FakeTensor",)),
    "a sparse tensor": (on(0, do=passing(lambda rank: torch.zeros(2, 4).to_sparse())), ("rank 0 of the source: .* cannot carry this tensor",)),
    "out with gradients": (on(4, do=passing(lambda rank: torch.zeros(8, 2, requires_grad=True))), ("rank 4 of the target: .* needs gradients",)),
    "an expanded out": (on(4, do=passing(lambda rank: torch.zeros(8, 1).expand(8, 2))), ("rank 4 of the target: .* some of its elements share memory",)),
    "another order": (_twice, (r"rank 6 of the target: a part of shape \(16, 2\)",)),
    "weights against transfer": (on(0, 1, 2, 3, do=lambda rank: rank.weights(W)),
        ("different calls", r"link.weights\(\) on ranks 0 1 2 3 of the source", r"link.transfer\(\) on ranks 4 5 6 7 of the target")),
    "weights on one rank": (on(5, do=lambda rank: rank.weights(W)), (r"link.weights\(\) on rank 5 of the target",)),
    "transfer against pull": (_transfer_against_pull, (r"link.transfer\(\) on ranks 0 1 2 3", r"push\(\) or pull\(\) .* on ranks 4 5 6 7")),
    "other weights": (_other_weights, ("different calls", "number")),
    "versions": (_pushed(lambda rank: 1 + (rank.number == 2)), ("push different versions", "version 2 on rank 2 of the source")),
    "a version below 0": (_pushed(lambda rank: -1), ("a push has no valid version", "version -1, which is no integer from 0 to")),
    "a large version": (_pushed(lambda rank: 2**63 - 1 if rank.number == 1 else 1), (r"version 9223372036854775807, .* to 2\*\*62 - 1 on rank 1 of",)),
    "a version as text": (_pushed(lambda rank: "1"), ("version '1', which is no integer",)),
    "no version": (_pushed(lambda rank: None), ("version None, which is no integer",)),
    "a missing name": (holding(W, {**W, "v": _two}), ("v of the target is missing in the source",)),
    "an extra name": (holding({**W, "v": _two}, W), ("v of the source is missing in the target",)),
    "a name that only one rank lacks": (
        lambda rank: rank.weights(W if rank.number == 6 else {**W, "v": _two}), ("v has gaps: ranks 4 5 7 of the target have it",)),
    "a shape": (holding(W, {"w": torch.zeros(4)}), (r"w has the shape \(3,\) in the source, but \(4,\) in the target",)),
    "a shape on one rank": (lambda rank: rank.weights({"w": torch.zeros(3 + (rank.number == 1))}),
        (r"w differs among the ranks of the source: torch.float32 of shape \(3,\), split as n on ranks 0 2 3 of the source; .* of shape \(4,\)",)),
    "a dtype of weights": (holding(W, {"w": torch.zeros(3).half()}), ("w has the dtype torch.float32 of the source, but torch.float16",)),
    "a dtype of one rank's weights": (lambda rank: rank.weights({"w": torch.zeros(3, dtype=torch.half if rank.number == 7 else None)}),
        ("w differs among the ranks of the target", "on rank 7")),
    "cast": (holding(W, W, cast=torch.bfloat16), ("w has the dtype torch.bfloat16 of cast=torch.bfloat16",)),
    "cast on one rank": (lambda rank: rank.weights(W, cast=torch.half if rank.number == 1 else None),
        ("cast= differs among the ranks of the source", "torch.float16 on rank 1")),
    "tied in the target only": (holding({"a": torch.zeros(3), "b": torch.zeros(3)}, {"a": _two, "b": _two}),
        ("b is tied to a in the target, but not in the source",)),
    "only= without a name": (holding(W, W, only=["x.*"]), (r"no tensor is named 'x\.\*'",)),
    "skip= without a name": (holding(W, W, skip=["x.*"]), (r"no tensor is named 'x\.\*'",)),
    "skip= of everything": (holding(W, W, skip=["*"]), ("no tensor is left",)),
    "only= on one rank": (lambda rank: rank.weights(W, only=["w"] if rank.number == 2 else None), ("only= differs among the ranks of the source",)),
    "atomic": (lambda rank: rank.weights(W, atomic="all" if rank.number == 2 else "copy"), ("atomic differs", "'all' on rank 2 of the source")),
    "staging on one rank": (lambda rank: rank.weights(W, staging="buckets" if rank.number == 5 else "whole"),
        ("staging differs", "'whole' on ranks 0 1 2 3 of the source and ranks 4 6 7 of the target, 'buckets' on rank 5 of the target")),
    "an unknown staging": (lambda rank: rank.weights(W, staging="bucket"), ("staging='bucket', which is neither whole nor buckets",)),
    "an unknown atomic": (lambda rank: rank.weights(W, atomic="All"), ("atomic='All', which is neither copy nor all",)),
    "cast to text": (on(1, do=lambda rank: rank.weights(W, cast="bfloat16"), others=lambda rank: rank.weights(W)),
        ("rank 1 of the source: cast='bfloat16', which is no dtype of floating-point numbers",)),
    "cast to integers": (lambda rank: rank.weights(W, cast=torch.int8), ("cast=torch.int8, which is no dtype of floating",)),
    "cast to a number": (lambda rank: rank.weights(W, cast=5), ("cast=5, which is no dtype of floating",)),
    "cast on the target only": (lambda rank: rank.weights(W, cast=None if rank.is_source else torch.half),
        ("cast=torch.float16 on ranks 4 5 6 7 of the target, but None on the source",)),
    "weights without memory": (lambda rank: rank.weights({"w": torch.zeros(3, device="meta" if rank.number == 1 else "cpu")}),
        ("w differs among the ranks of the source", r"cannot carry this tensor: .* on meta on rank 1 of the source")),
    "sparse weights": (lambda rank: rank.weights({"w": torch.zeros(3, 3).to_sparse() if rank.number > 3 else torch.zeros(3, 3)}),
        (r"w of the target: link.weights\(\) cannot carry this tensor",)),
    "an expanded tensor of the target": (lambda rank: rank.weights({"w": torch.zeros(1).expand(3) if rank.number == 4 else torch.zeros(3)}),
        ("w differs among the ranks of the target: .* some of its elements share memory: .* on rank 4 of the target",)),
    "a target without memory": (holding(W, {"w": torch.zeros(3, device="meta")}), ("w of the target: .* cannot carry this tensor: .* on meta",)),
    "a parameter without a shape": (lambda rank: rank.link.weights(torch.nn.LazyLinear(2)),
        ("weight of the source: .* a UninitializedParameter, which has no shape yet",)),
    "entries that are not tensors": (holding({**W, "n": np.ones(2), "f": 3.0}, {**W, "n": np.ones(2), "f": 3.0}),
        (r"n of the source: link.weights\(\) was given a ndarray", "f of the target: .* was given a float")),
    "a name that is no text": (lambda rank: rank.weights({1: torch.zeros(3)}), ("1 is not the name of a tensor",)),
    "weights of 63 axes": (lambda rank: rank.weights({"w": torch.zeros((1,) * 63)}), ("w of the source: .* a tensor of so many axes: 63 axes",)),
    "63 axes": (lambda rank: passing(lambda rank: torch.zeros((1,) * 63), None)(rank), ("ranks 0 1 2 3 of the source: .* of so many axes: 63 axes",)),
    "packed weights": (lambda rank: rank.link.weights(_Packed(3, 4)),
        ("packed of the source: .* was given a tuple", "scale of the target: it is computed anew")),
    "memory that overlaps in the target": (holding({"q": torch.zeros(4), "k": torch.ones(4)}, {"q": _six[:4], "k": _six[2:]}),
        ("k shares memory with q in the target, but not in the same way in the source",)),
    "memory that overlaps otherwise in the source": (holding({"q": _six[:4], "k": _six[1:5]}, {"q": _six[:4], "k": _six[2:]}),
        ("k shares memory with q in the target, but not in the same way",)),
    "a tie of another shape in the target": (holding({"q": torch.zeros(6), "k": torch.ones(2, 3)}, {"q": _six, "k": _six.view(2, 3)}),
        ("k shares memory with q in the target, but not in the same way in the source",)),
    "a tie in the target to what is left out": (holding(*({**given, "a": _six} for given in (
        {"b": torch.zeros(3), "c": torch.ones(3)}, {"b": _six[:3], "c": _six[:3]})), skip="a"), ("c is tied to b in the target",)),
    "only= of a number": (lambda rank: rank.weights(W, only=[5] if rank.number == 6 else None), ("rank 6 of the target: only= has 5, which is no pattern",)),
    "only= of a number alone": (lambda rank: rank.weights(W, only=5), ("only= has 5, which is no pattern",)),
    "only= as text": (lambda rank: rank.weights(W, only="wx" if rank.is_source else None),
        (r"given:    no tensor is named 'wx', in only= or skip= of the source\n  expected",)),
    "on_commit that is no function": (lambda rank: rank.weights(W, on_commit=5 if rank.number == 5 else None),
        ("rank 5 of the target: on_commit=5, which cannot be called",)),
    "a list as a model": (lambda rank: rank.link.weights([torch.zeros(3)]), (r"the model is a list; expected a module or a dict",)),
    "an iterator as a model": (lambda rank: rank.link.weights(torch.nn.Linear(2, 2).named_parameters()), (r"a generator; .* dict\(model.named_parameters",)),
    "None as a model": (lambda rank: rank.link.weights(None if rank.number == 3 else W), ("rank 3 of the source: the model is None",)),
    "into= on one side": (lambda rank: rank.link.weights(W, into=None if rank.is_source else W),
        ("ranks 4 5 6 7 of the target: passed into=, but is not on both sides",)),
    "an extra name on one rank": (lambda rank: rank.weights({**W, "z": _two} if rank.number in (4, 6) else W),
        ("z of ranks 4 6 of the target is missing in the source",)),
    "no model": (lambda rank: rank.weights({} if rank.number == 2 else W), ("w has gaps|brought no model",)),
}  # fmt: skip


@contextmanager
def sides() -> Iterator[tuple[Mesh, Mesh]]:
    """Open both meshes. Called by: 8 ranks."""
    with (
        meshcomm.init(dims={"fsdp": 2, "tp": 2}, ranks=range(4), device="cpu") as source,
        meshcomm.init(dims={"copy": 2, "tp": 2}, ranks=range(4, 8), device="cpu") as target,
    ):
        yield source, target


def errors(rank: int, names: list[str] | None = None) -> dict[str, tuple[str, str]]:
    """Make every call; return the type and text of each error. After each, a right call works. Called by: 8 ranks."""
    told = {}
    with sides() as (source, target), meshcomm.link(source, target) as link:
        here = Rank(rank, source if source.is_member else target, link)
        for name in names or MISMATCHES:
            try:
                MISMATCHES[name][0](here)
            except MeshcommError as error:
                told[name] = type(error).__name__, str(error)
            result = here.transfer()
            assert result is None or not result.any(), name
    return told


def errors_on_process(names: list[str]) -> dict[str, tuple[str, str]]:
    """Make some of the calls on a rank of a job of processes."""
    dist.init_process_group("gloo")
    try:
        return errors(dist.get_rank(), names)
    finally:
        dist.destroy_process_group()
