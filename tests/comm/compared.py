"""The facts that `validate_calls = "always"` compares: each fact of each operation, changed on one of three ranks.

`python -m tests.comm.compared` tries all of them and writes the table of docs/reference/promises.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.distributed_c10d import _coalescing_manager

import meshcomm
from meshcomm.errors import CallMismatchError, MeshcommError, RankFailed
from meshcomm.mesh import Mesh
from meshcomm.parallel import GradientSync
from meshcomm.testing import Pool, RankFailure

PAGE: Final = Path(__file__).parents[2] / "docs" / "reference" / "promises.md"
BEGIN, END = "<!-- compared facts -->\n", "<!-- end of compared facts -->\n"
RANKS, ODD = 3, 1

# How an operation with a changed fact ends.
TOLD = "every rank raises CallMismatchError"
OWN = "the changed rank raises another error, and the others raise when it makes its next call"
ALONE = "the changed rank raises another error, and the others have their results"
DONE = "no rank raises"


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype)


@dataclass(frozen=True)
class Operation:
    """One operation, as a function of the mesh and of facts.

    usual: the facts on all ranks. odd: fact name -> the value that the changed rank passes instead.
    free: facts that may differ: the call succeeds, with the same result as without the change.
    missed: fact name -> why that fact is not compared.
    first: contradictory facts. If the changed rank calls first, its backend refuses them; otherwise the comparison does.
    ends: whether the other ranks wait inside C++, where no error reaches them. The watchdog then ends them with the error.
    ranks: the ranks that take part in the operation.
    """

    call: Callable[..., Any]
    usual: Mapping[str, Any]
    odd: Mapping[str, Mapping[str, Any]]
    free: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    missed: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)
    ranks: Sequence[int] = range(RANKS)
    first: Sequence[str] = ()
    ends: bool = False

    def facts(self) -> dict[str, Mapping[str, Any]]:
        return {**self.odd, **self.free, **{name: given for name, (_, given) in self.missed.items()}}


F64 = torch.float64
SHAPES: Final[dict[str, Any]] = {
    "shape": {"x": ones(3, 2)},
    "number of elements": {"x": ones(9)},
    "dtype": {"x": ones(6, dtype=F64)},
}
REDUCED: Final[dict[str, Any]] = {**SHAPES, "op": {"op": "max"}}


def waited(handle: Any) -> Any:
    return handle.wait()


def coalesced(mesh: Mesh, call: Callable[..., Any], *pairs: tuple[Any, ...]) -> Any:
    with _coalescing_manager(mesh.group("dp")):
        for pair in pairs:
            call(*pair, group=mesh.group("dp"))
    return [pair[0] for pair in pairs]


def model(*sizes: int, names: str = "ab", dtype: Any = torch.float32) -> nn.Module:
    parts = {
        name: nn.Linear(size, 1, bias=False, dtype=dtype) for name, size in zip(names, sizes, strict=True)
    }
    return nn.ModuleDict(parts)


def frozen(made: nn.Module) -> nn.Module:
    made.get_submodule("b").requires_grad_(False)
    return made


def synchronised(mesh: Mesh, made: Callable[[], nn.Module], broadcast: bool) -> int:
    sync = GradientSync(mesh, "dp", made(), broadcast=broadcast)
    sync.close()
    return len(sync.buckets)


MODELS: Final[dict[str, Any]] = {
    "order": {"made": lambda: model(3, 2, names="ba")},
    "names": {"made": lambda: model(2, 3, names="cb")},
    "shape": {"made": lambda: model(2, 4)},
    "dtype": {"made": lambda: model(2, 3, dtype=F64)},
    "number": {"made": lambda: model(2, names="a")},
    "requires_grad": {"made": lambda: frozen(model(2, 3))},
}

OPERATIONS: Final[dict[str, Operation]] = {
    "`mesh.all_reduce`": Operation(
        lambda m, x, op="sum", **more: m.all_reduce("dp", x.clone(), op, **more),
        {"x": ones(6)},
        {**REDUCED, "algorithm": {"algorithm": "ring"}},
        {"memory layout": {"x": ones(12)[::2]}},
    ),
    '`mesh.all_reduce`, `op="premul_sum"`': Operation(
        lambda m, factor: m.all_reduce("dp", ones(6), "premul_sum", factor=factor),
        {"factor": 1.0},
        {},
        {"factor": {"factor": 1}},
    ),
    '`mesh.all_reduce`, `algorithm="ring"`': Operation(
        lambda m, x, op="sum", algorithm="ring": m.all_reduce("dp", x.clone(), op, algorithm=algorithm),
        {"x": ones(6)},
        {**REDUCED, "algorithm": {"algorithm": "tree"}},
    ),
    "`mesh.all_reduce`, `async_op=True`": Operation(
        lambda m, x, op="sum": waited(m.all_reduce("dp", x.clone(), op, async_op=True)),
        {"x": ones(6)},
        REDUCED,
    ),
    "`mesh.all_reduce` of a list": Operation(
        lambda m, xs, op="sum": m.all_reduce("dp", [x.clone() for x in xs], op),
        {"xs": [ones(4), ones(2)]},
        {
            "order": {"xs": [ones(2), ones(4)]},
            "shape of one": {"xs": [ones(2, 2), ones(2)]},
            "number of tensors": {"xs": [ones(4), ones(1), ones(1)]},
            "no tensors": {"xs": []},
            "dtype of one": {"xs": [ones(4), ones(2, dtype=F64)]},
            "op": {"op": "max"},
            "a tensor": {"xs": [ones(6)]},
        },
    ),
    "`mesh.all_reduce` of a list of two dtypes": Operation(
        lambda m, xs: m.all_reduce("dp", [x.clone() for x in xs]),
        {"xs": [ones(4), ones(2, dtype=F64), ones(3)]},
        {"order": {"xs": [ones(4), ones(3), ones(2, dtype=F64)]}, "no tensors": {"xs": []}},
    ),
    "`mesh.mean`": Operation(
        lambda m, values, weights: m.mean("dp", values, weights),
        {"values": ones(3), "weights": ones(3)},
        {
            "shape of the values": {"values": ones(5), "weights": ones(())},
            "shape of the weights": {"weights": ones(())},
            "float64": {"values": ones(3, dtype=F64)},
        },
        {"float32, float16 or bfloat16": {"values": ones(3, dtype=torch.bfloat16)}},
    ),
    "`mesh.reduce`": Operation(
        lambda m, x, op="sum", dst=0: m.reduce("dp", x, dst, op),
        {"x": ones(6)},
        {**REDUCED, "dst": {"dst": 1}},
    ),
    "`mesh.reduce_scatter`": Operation(
        lambda m, x, axis=0, op="sum", **more: m.reduce_scatter("dp", x, axis, op, **more),
        {"x": ones(6, 3)},
        {
            "shape": {"x": ones(3, 6)},
            "dtype": {"x": ones(6, 3, dtype=F64)},
            "op": {"op": "max"},
            "axis": {"axis": 1},
            "shape of out": {"out": ones(3, 2)},
            "dtype of out": {"out": ones(2, 3, dtype=F64)},
        },
        {"out": {"out": ones(2, 3)}},
    ),
    "`mesh.broadcast`": Operation(
        lambda m, x, src=0: m.broadcast("dp", x.clone(), src), {"x": ones(6)}, {**SHAPES, "src": {"src": 1}}
    ),
    "`mesh.broadcast` of a list": Operation(
        lambda m, xs, src=0: m.broadcast("dp", [x.clone() for x in xs], src),
        {"xs": [ones(4), ones(2)]},
        {
            "order": {"xs": [ones(2), ones(4)]},
            "shape of one": {"xs": [ones(3), ones(3)]},
            "dtype of one": {"xs": [ones(4), ones(2, dtype=F64)]},
            "no tensors": {"xs": []},
            "src": {"src": 1},
        },
    ),
    "`mesh.all_gather`": Operation(
        lambda m, x, axis=0, **more: m.all_gather("dp", x, axis, **more),
        {"x": ones(2, 3)},
        {
            "shape": {"x": ones(3, 2)},
            "dtype": {"x": ones(2, 3, dtype=F64)},
            "axis": {"axis": 1},
            "uneven": {"uneven": True},
            "shape of out": {"out": ones(2, 9)},
            "dtype of out": {"out": ones(6, 3, dtype=F64)},
        },
        {"out": {"out": ones(6, 3)}},
    ),
    "`mesh.all_gather`, `uneven=True`": Operation(
        lambda m, x, axis=0: m.all_gather("dp", x, axis, uneven=True),
        {"x": ones(2, 3)},
        {"other sizes": {"x": ones(2, 4)}, "dtype": {"x": ones(2, 3, dtype=F64)}, "axis": {"axis": 1}},
    ),
    "`mesh.gather`": Operation(
        lambda m, x, dst=0, axis=0, **more: m.gather("dp", x, dst, axis, **more),
        {"x": ones(2, 3)},
        {
            "shape": {"x": ones(3, 2)},
            "dtype": {"x": ones(2, 3, dtype=F64)},
            "axis": {"axis": 1},
            "dst": {"dst": 1},
            "uneven": {"uneven": True},
        },
        {"out of other ranks than dst": {"out": ones(1)}},
    ),
    "`mesh.gather` to the changed rank": Operation(
        lambda m, **more: m.gather("dp", ones(2, 3), ODD, **more), {}, {"shape of out": {"out": ones(2, 9)}}
    ),
    "`mesh.scatter`": Operation(
        lambda m, x, src=0, out=None: m.scatter("dp", x, src, out=out),
        {"x": ones(6)},
        {"src": {"src": 1}, "out": {"out": torch.zeros(2)}},
        {"x of other ranks than src": {"x": None}},
    ),
    "`mesh.scatter`, `out=`": Operation(
        lambda m, out, src=0: m.scatter("dp", ones(6), src, out=out),
        {"out": torch.zeros(2)},
        {
            "no out": {"out": None},
            "longer out": {"out": torch.zeros(3)},
            "shorter out": {"out": torch.zeros(1)},
            "dtype of out": {"out": torch.zeros(2, dtype=F64)},
            "shape of out": {"out": torch.zeros(2, 1)},
            "src": {"src": 1},
        },
    ),
    "`mesh.scatter` from the changed rank, `out=`": Operation(
        lambda m, x, out: m.scatter("dp", x, ODD, out=out),
        {"x": ones(6), "out": torch.zeros(2)},
        {"shape of x": {"x": ones(9)}, "x": {"x": None}, "shape of out": {"out": torch.zeros(3)}},
    ),
    "`mesh.all_to_all`": Operation(
        lambda m, x, split=0, concat=0, **more: m.all_to_all("dp", x, split, concat, **more),
        {"x": ones(6, 3)},
        {
            "shape": {"x": ones(3, 6)},
            "dtype": {"x": ones(6, 3, dtype=F64)},
            "split_axis": {"split": 1},
            "concat_axis": {"concat": 1},
            "input_split_sizes": {"input_split_sizes": [2, 2, 2]},
            "shape of out": {"out": ones(3, 6)},
        },
        {"out": {"out": ones(6, 3)}},
    ),
    "`mesh.all_to_all`, `input_split_sizes=`": Operation(
        lambda m, x, sizes, **more: m.all_to_all("dp", x, input_split_sizes=sizes, **more),
        {"x": ones(6, 2), "sizes": [2, 2, 2]},
        {
            "other sizes": {"x": ones(6, 3)},
            "dtype": {"x": ones(6, 2, dtype=F64)},
            "output_split_sizes": {"output_split_sizes": [2, 2, 2]},
        },
    ),
    "`mesh.all_to_all`, `output_split_sizes=`": Operation(
        lambda m, x, sizes, expected: m.all_to_all(
            "dp", x, input_split_sizes=sizes, output_split_sizes=expected
        ),
        {"x": ones(6), "sizes": [2, 2, 2], "expected": [2, 2, 2]},
        {
            "received sizes": {"expected": [2, 3, 2]},
            "sent sizes": {"sizes": [1, 2, 3]},
            "sent and received sizes": {"sizes": [1, 2, 3], "expected": [1, 2, 3]},
        },
    ),
    "`mesh.barrier`": Operation(
        lambda m, call="barrier": m.barrier("dp") if call == "barrier" else m.all_reduce("dp", ones(6)),
        {},
        {"operation": {"call": "all_reduce"}},
    ),
    "`mesh.functional.all_reduce`": Operation(
        lambda m, x, op="sum", grad="sum": m.functional.all_reduce("dp", x, op, grad=grad),
        {"x": ones(6)},
        REDUCED,
        missed={"grad": ("only the backward pass differs, whose calls are compared", {"grad": "identity"})},
    ),
    "`mesh.functional.all_gather`": Operation(
        lambda m, x, axis=0: m.functional.all_gather("dp", x, axis, grad="slice"),
        {"x": ones(3, 3)},
        {"shape": {"x": ones(3, 4)}, "dtype": {"x": ones(3, 3, dtype=F64)}, "axis": {"axis": 1}},
    ),
    "`mesh.functional.reduce_scatter`": Operation(
        lambda m, x, axis=0, op="sum": m.functional.reduce_scatter("dp", x, axis, op),
        {"x": ones(3, 3)},
        {"shape": {"x": ones(3, 4)}, "axis": {"axis": 1}, "op": {"op": "avg"}},
    ),
    "`mesh.functional.all_to_all`": Operation(
        lambda m, x, split=0, concat=1: m.functional.all_to_all("dp", x, split, concat),
        {"x": ones(3, 3)},
        {"shape": {"x": ones(3, 4)}, "axes": {"split": 1, "concat": 0}},
    ),
    "`mesh.objects.broadcast`": Operation(
        lambda m, src=0, **more: m.objects.broadcast("dp", 1, src, **more),
        {},
        {"src": {"src": 1}, "pickle": {"pickle": True}},
        {"max_bytes": {"max_bytes": 1 << 20}},
    ),
    "`mesh.objects.gather`": Operation(
        lambda m, dst=0: m.objects.gather("dp", 1, dst), {}, {"dst": {"dst": 1}}
    ),
    "`mesh.send` to the changed rank": Operation(
        lambda m, x: (
            m.send("dp", ones(6), ODD)
            if m.rank == 0
            else m.recv("dp", x.clone(), src=0)
            if m.rank == ODD
            else None
        ),
        {"x": torch.zeros(6)},
        {"number of elements": {"x": torch.zeros(9)}, "dtype": {"x": torch.zeros(6, dtype=F64)}},
        {"shape of equally many elements": {"x": torch.zeros(3, 2)}},
        ranks=(0, ODD),
    ),
    "`mesh.exchange` with the changed rank": Operation(
        lambda m, x: m.exchange("dp", [(x, 1 - m.rank)], [(x.clone(), 1 - m.rank)]) if m.rank < 2 else None,
        {"x": ones(6)},
        {"number of elements": {"x": ones(9)}, "dtype": {"x": ones(6, dtype=F64)}},
        ranks=(0, ODD),
    ),
    "`GradientSync`": Operation(synchronised, {"made": lambda: model(2, 3), "broadcast": True}, MODELS),
    "`GradientSync`, `broadcast=False`": Operation(
        synchronised, {"made": lambda: model(2, 3), "broadcast": False}, MODELS
    ),
}

SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX
LISTS: Final[dict[str, Any]] = {
    "order": {"xs": [ones(2), ones(4)]},
    "number of tensors": {"xs": [ones(4), ones(1), ones(1)]},
    "dtype of one": {"xs": [ones(4), ones(2, dtype=F64)]},
}
# torch's own calls count elements, whatever the shape.
ELEMENTS: Final[dict[str, Any]] = {"number of elements": {"x": ones(9)}, "dtype": {"x": ones(6, dtype=F64)}}
SAME: Final[dict[str, Any]] = {"shape of equally many elements": {"x": ones(3, 2)}}


def spread(x: torch.Tensor, count: int = RANKS) -> list[torch.Tensor]:
    return [torch.zeros_like(x) for _ in range(count)]


def returned(result: Any, call: Callable[..., Any], *given: Any, **more: Any) -> Any:
    call(*given, **more)
    return result


TORCH: Final[dict[str, Operation]] = {
    "`dist.all_reduce`": Operation(
        lambda m, x, op=SUM, **more: returned(y := x.clone(), dist.all_reduce, y, op, m.group("dp")),
        {"x": ones(6)},
        {**ELEMENTS, "op": {"op": MAX}},
        SAME,
    ),
    "`dist.all_reduce`, `async_op=True`": Operation(
        lambda m, x, op=SUM: returned(
            y := x.clone(), lambda: dist.all_reduce(y, op, m.group("dp"), async_op=True).wait()
        ),
        {"x": ones(6)},
        {**ELEMENTS, "op": {"op": MAX}},
    ),
    "`dist.all_reduce_coalesced`": Operation(
        lambda m, xs, op=SUM: returned(
            ys := [x.clone() for x in xs], dist.all_reduce_coalesced, ys, op, m.group("dp")
        ),
        {"xs": [ones(4), ones(2)]},
        {**LISTS, "op": {"op": MAX}},
    ),
    "`dist.all_reduce` in a coalescing manager": Operation(
        lambda m, xs, op=SUM: coalesced(
            m, lambda x, group: dist.all_reduce(x, op, group), *((x.clone(),) for x in xs)
        ),
        {"xs": [ones(4), ones(2)]},
        {**LISTS, "op": {"op": MAX}},
    ),
    "`dist.reduce`": Operation(
        lambda m, x, op=SUM, dst=0: returned(None, dist.reduce, x.clone(), dst, op, m.group("dp")),
        {"x": ones(6)},
        {**ELEMENTS, "op": {"op": MAX}, "dst": {"dst": 1}},
    ),
    "`dist.broadcast`": Operation(
        lambda m, x, src=0: returned(y := x.clone(), dist.broadcast, y, src, m.group("dp")),
        {"x": ones(6)},
        {**ELEMENTS, "src": {"src": 1}},
        SAME,
    ),
    "`dist.all_gather`": Operation(
        lambda m, x, out=None: returned(
            ys := spread(x) if out is None else out, dist.all_gather, ys, x, m.group("dp")
        ),
        {"x": ones(6)},
        {**ELEMENTS, "out": {"out": [ones(6), ones(6), ones(5)]}},
    ),
    "`dist.all_gather_into_tensor`": Operation(
        lambda m, x, out=None: returned(
            y := torch.zeros(RANKS * x.numel(), dtype=x.dtype) if out is None else out,
            dist.all_gather_into_tensor,
            y,
            x,
            m.group("dp"),
        ),
        {"x": ones(6)},
        {**ELEMENTS, "out": {"out": torch.zeros(19)}},
    ),
    "`dist.all_gather_into_tensor` in a coalescing manager": Operation(
        lambda m, xs: coalesced(
            m, dist.all_gather_into_tensor, *((torch.zeros(RANKS * x.numel(), dtype=x.dtype), x) for x in xs)
        ),
        {"xs": [ones(4), ones(2)]},
        LISTS,
    ),
    "`dist.gather`": Operation(
        lambda m, x, dst=0: returned(
            ys := spread(x) if dst == m.rank else None, dist.gather, x, ys, dst, m.group("dp")
        ),
        {"x": ones(6)},
        {**ELEMENTS, "dst": {"dst": 1}},
    ),
    "`dist.gather` to the changed rank": Operation(
        lambda m, count, size: returned(
            ys := spread(ones(size), count) if m.rank == ODD else None,
            dist.gather,
            ones(6),
            ys,
            ODD,
            m.group("dp"),
        ),
        {"count": RANKS, "size": 6},
        {"size of the list's tensors": {"size": 5}, "length of the list": {"count": 2}},
        first=("size of the list's tensors", "length of the list"),
    ),
    "`dist.scatter`": Operation(
        lambda m, x, src=0: returned(
            y := torch.zeros_like(x),
            dist.scatter,
            y,
            [ones(6)] * RANKS if src == m.rank else None,
            src,
            m.group("dp"),
        ),
        {"x": ones(6)},
        {**ELEMENTS, "src": {"src": 1}},
    ),
    "`dist.scatter` from the changed rank": Operation(
        lambda m, xs: returned(
            y := torch.zeros(6), dist.scatter, y, xs if m.rank == ODD else None, ODD, m.group("dp")
        ),
        {"xs": [ones(6)] * RANKS},
        {
            "size of the list's tensors": {"xs": [ones(5)] * RANKS},
            "unequal sizes": {"xs": [ones(5), ones(6), ones(7)]},
            "length of the list": {"xs": [ones(6)] * 2},
        },
        first=("size of the list's tensors", "unequal sizes", "length of the list"),
    ),
    "`dist.reduce_scatter`": Operation(
        lambda m, xs, op=SUM: returned(
            y := torch.zeros(6, dtype=xs[0].dtype), dist.reduce_scatter, y, list(xs), op, m.group("dp")
        ),
        {"xs": [ones(6)] * RANKS},
        {
            "unequal sizes": {"xs": [ones(7), ones(6), ones(5)]},
            "dtype": {"xs": [ones(6, dtype=F64)] * RANKS},
            "op": {"op": MAX},
            "length of the list": {"xs": [ones(6)] * 2},
        },
    ),
    "`dist.reduce_scatter_tensor`": Operation(
        lambda m, x, op=SUM, out=2: returned(
            y := torch.zeros(out, dtype=x.dtype), dist.reduce_scatter_tensor, y, x, op, m.group("dp")
        ),
        {"x": ones(6)},
        {
            "number of elements": {"x": ones(9), "out": 3},
            "dtype": {"x": ones(6, dtype=F64)},
            "op": {"op": MAX},
            "out": {"out": 3},
        },
    ),
    "`dist.all_to_all`": Operation(
        lambda m, sends, expects: returned(
            ys := [torch.zeros(n) for n in expects],
            dist.all_to_all,
            ys,
            [ones(n) for n in sends],
            m.group("dp"),
        ),
        {"sends": [2, 2, 2], "expects": [2, 2, 2]},
        {
            "sent sizes": {"sends": [1, 2, 3]},
            "received sizes": {"expects": [3, 2, 1]},
            "sent and received sizes": {"sends": [3, 2, 2], "expects": [3, 2, 2]},
        },
    ),
    "`dist.all_to_all_single`": Operation(
        lambda m, x, sends=None, expects=None, out=None: returned(
            y := torch.zeros(sum(expects or [6]) if out is None else out, dtype=x.dtype),
            dist.all_to_all_single,
            y,
            x,
            expects,
            sends,
            m.group("dp"),
        ),
        {"x": ones(6)},
        {
            "number of elements": {"x": ones(9), "out": 9},
            "dtype": {"x": ones(6, dtype=F64)},
            "input_split_sizes": {"sends": [1, 2, 3]},
            "output_split_sizes": {"expects": [1, 2, 3]},
            "both split sizes": {"x": ones(7), "sends": [3, 2, 2], "expects": [3, 2, 2]},
            "received total": {"expects": [2, 2, 3]},
            "sent total": {"x": ones(7), "sends": [3, 2, 2]},
            "split sizes that are not the total": {"sends": [2, 2, 3]},
            "out": {"out": 5},
        },
        {"equal split sizes": {"sends": [2, 2, 2], "expects": [2, 2, 2]}},
    ),
    "`dist.barrier`": Operation(
        lambda m, call="barrier": (
            dist.barrier(m.group("dp"))
            if call == "barrier"
            else dist.all_reduce(ones(6), group=m.group("dp"))
        ),
        {},
        {"operation": {"call": "all_reduce"}},
    ),
    "functional collectives of torch": Operation(
        lambda m, x, op="sum": waited(functional.all_reduce(x, op, m.group("dp"))),
        {"x": ones(6)},
        {**ELEMENTS, "op": {"op": "max"}},
        ends=True,
    ),
    "`all_to_all_single` of torch's functional collectives": Operation(
        lambda m, x, sends, expects: waited(functional.all_to_all_single(x, expects, sends, m.group("dp"))),
        {"x": ones(6), "sends": [2, 2, 2], "expects": [2, 2, 2]},
        {"received sizes": {"expects": [2, 2, 3]}, "sent sizes": {"x": ones(7), "sends": [3, 2, 2]}},
        ends=True,
    ),
    "a method of the group": Operation(
        lambda m, x, op=SUM: returned(y := x.clone(), lambda: m.group("dp").allreduce(y, op).wait()),
        {"x": ones(6)},
        ELEMENTS,
        missed={"op, split sizes": ("torch's hooks do not report them", {"op": MAX})},
    ),
    "a call of the mesh, and one of dist on the changed rank": Operation(
        lambda m, x, op="sum", call=None: (
            m.all_reduce("dp", x.clone(), op) if call is None else call(m, x.clone())
        ),
        {"x": ones(6)},
        {
            "number of elements": {"call": lambda m, x: dist.all_reduce(ones(9), group=m.group("dp"))},
            "dtype": {"call": lambda m, x: dist.all_reduce(ones(6, dtype=F64), group=m.group("dp"))},
            "op": {"call": lambda m, x: dist.all_reduce(x, MAX, m.group("dp"))},
            "operation": {"call": lambda m, x: dist.broadcast(x, 0, m.group("dp"))},
        },
        {"nothing": {"call": lambda m, x: returned(x, dist.all_reduce, x, SUM, m.group("dp"))}},
    ),
    '`op="max"` of the mesh, and of dist on the changed rank': Operation(
        lambda m, call=None: m.all_reduce("dp", ones(6), "max") if call is None else call(m),
        {},
        {"what is sent": {"call": lambda m: dist.all_reduce(ones(6), MAX, m.group("dp"))}},
    ),
    "`scatter` of the mesh, and of dist on the changed rank": Operation(
        lambda m, call=None: m.scatter("dp", ones(6), 0) if call is None else call(m),
        {},
        {"what is sent": {"call": lambda m: dist.scatter(torch.zeros(2), None, 0, m.group("dp"))}},
    ),
}
EVERY: Final = {**OPERATIONS, **TORCH}


def plain(result: Any) -> Any:
    """The result as plain numbers, which can be compared and sent."""
    if isinstance(result, torch.Tensor):
        return result.tolist()
    return [plain(each) for each in result] if isinstance(result, (list, tuple)) else result


def made(mesh: Mesh, operation: Operation, changed: Mapping[str, Any]) -> Any:
    given = {**operation.usual, **(changed if mesh.rank == ODD else {})}
    return plain(operation.call(mesh, **given))


def tried(mesh: Mesh, operation: Operation, changed: Mapping[str, Any]) -> tuple[tuple[str, Any], bool]:
    """How the call ends on this rank, and whether the group can still be used."""
    met = True
    try:
        ended = "done", made(mesh, operation, changed)
    except CallMismatchError as error:
        ended = "told", error.what
    except (MeshcommError, RuntimeError, ValueError) as error:
        ended = type(error).__name__, str(error)
        if mesh.rank == ODD:
            met = meets(mesh)
            if met:
                return ended, True  # the others have their results: this was their last barrier
            # Otherwise the others were inside the call, and raised as well.
    if meets(mesh):
        return ended, True
    # A rank that needs nothing from the others, or already has it, raises here.
    return ("told", "at its next call") if ended[0] == "done" else ended, False


def meets(mesh: Mesh) -> bool:
    try:
        mesh.barrier("dp")
    except CallMismatchError:
        return False
    return True


Cases: TypeAlias = list[tuple[str, str]]


def on_this_rank(cases: Cases) -> dict[str, dict[str, tuple[str, Any]]]:
    """How each operation ends with each fact changed; the key "" holds the unchanged call."""
    found: dict[str, dict[str, tuple[str, Any]]] = {}
    left = [(name, fact, {"": {}, **EVERY[name].facts()}[fact]) for name, fact in cases]
    while left:
        with meshcomm.init(dims={"dp": RANKS}, device="cpu", timeout_s=20, validate_calls="always") as mesh:
            good = True
            while left and good:
                name, fact, changed = left.pop(0)
                found.setdefault(name, {})[fact], good = tried(mesh, EVERY[name], changed)
    return found


def verdict(operation: Operation, ended: Sequence[tuple[str, Any]]) -> str:
    kinds = {ended[rank][0] for rank in operation.ranks}
    others = {ended[rank][0] for rank in operation.ranks if rank != ODD}
    if kinds == {"done"}:
        return DONE
    if len(kinds) == 1:
        return TOLD
    return OWN if others == {"told"} else ALONE if others == {"done"} else f"{ended}"


def simulated(operation: Operation, changed: Mapping[str, Any]) -> str:
    """How the operation ends in the simulator, which stops at the first error."""
    try:
        meshcomm.simulate(made, dims={"dp": RANKS}, device="cpu", args=(operation, changed))
    except CallMismatchError as error:
        return TOLD if "rank" in error.what and "ranks  " not in error.what else str(error)
    except RankFailed as error:
        return OWN if list(error.by_rank) == [ODD] else TOLD
    return DONE


# -- the table ------------------------------------------------------------------------------------------


def all_tried(pool: Pool) -> dict[str, dict[str, str]]:
    """The verdict on each fact of each operation, on processes."""
    cases: Cases = []
    for name, operation in EVERY.items():
        cases += [(name, fact) for fact in ("", *operation.facts()) if not (fact and operation.ends)]
    found = pool.run(on_this_rank, cases, ranks=RANKS, timeout_s=120)
    return {
        name: {
            fact: verdict(operation, [each[name][fact] for each in found])
            if (name, fact) in cases
            else ended(pool, name, fact)
            for fact in ("", *operation.facts())
        }
        for name, operation in EVERY.items()
    }


def ended(pool: Pool, name: str, fact: str) -> str:
    """The verdict on a fact where the watchdog may end waiting ranks."""
    try:
        found = pool.run(on_this_rank, [(name, fact)], ranks=RANKS)
    except RankFailure as error:
        # A rank that arrives after the one with the different call raises, and does not wait.
        texts = {text.strip() for text in error.by_rank.values()}
        return TOLD if texts == {"ended with exit code 2"} and len(error.by_rank) < RANKS else str(error)
    return verdict(EVERY[name], [each[name][fact] for each in found])


def table(verdicts: Mapping[str, Mapping[str, str]]) -> str:
    """The table of the page. Facts with the same verdict share a cell, in the order in which they were tried."""
    lines = [
        "| call | every rank raises | that rank raises | may differ | not compared |",
        "|---|---|---|---|---|",
    ]
    for name, operation in EVERY.items():
        cells: dict[str, list[str]] = {"every": [], "own": [], "free": [], "missed": []}
        for fact, ended in verdicts[name].items():
            if fact in operation.missed:
                cells["missed"].append(f"{fact}: {operation.missed[fact][0]}")
            elif fact:
                kind = (
                    "own"
                    if fact in operation.first
                    else "every"
                    if ended == TOLD
                    else "free"
                    if ended == DONE
                    else "own"
                )
                cells[kind].append(f"{fact} \\*" if ended == ALONE else fact)
        lines.append(f"| {name} | {' | '.join(', '.join(cell) or '-' for cell in cells.values())} |")
    return "\n".join(lines) + "\n"


def page(made: str) -> str:
    """The page with this table."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}{made}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    # The ranks import this file by name.
    from tests.comm import compared

    ranks = Pool()
    PAGE.write_text(page(table(compared.all_tried(ranks))), encoding="utf-8")
    ranks.close()
