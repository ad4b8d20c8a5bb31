"""The operators behind `mesh.functional`, registered with torch: eager and compiled programs call the same ones.

An operator takes plain values, which a graph can hold: a tensor, the place to communicate, and the arguments.
The place consists of `group`, which identifies the live communicator; `size`, so that a graph contains everything
that shapes and gradients depend on; and `traced`, whether a compiler recorded the call.

torch.compile makes the calls of the program, in its order: every operator that communicates is registered as a side effect,
so a call is not dropped where its result is unused, not merged with an equal one, not moved, not made while tracing, and not
made again in backward. All that a graph depends on is in its text, the package's version among it, because compilers keep
graphs on disk.

Each operator is linear, so its `_Row` is enough to define all its derivatives. Backward calls the adjoint, which consists of
these operators and so can be differentiated again. Forward mode calls the operator on the tangent. Under vmap the
batch is one more axis of the same call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Final, TypeAlias, final
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.compiler import is_compiling

from meshcomm import __version__
from meshcomm.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, Collective
from meshcomm.comm.checks import has_tangent
from meshcomm.comm.communicator import Communicator, CommunicatorCache
from meshcomm.comm.torch_private import (
    SingleLevelFunction,
    after_autograd,
    below_autograd,
    control_flow,
    forward_level,
    keep_calls,
    never_constant,
    only_device,
    set_forward_mode,
    single_level,
    transforming,
)
from meshcomm.errors import AutogradError, MeshClosed, UnsupportedOp
from meshcomm.reductions import REDUCTIONS, with_gradient
from meshcomm.transport.torch_private import once_in_graphs

# The gradient rule of a gather whose gradient was not declared.
UNDETERMINED: Final[Any] = "undetermined"

Place: TypeAlias = tuple[str, int, bool]


@final
class Groups:
    """The groups of one mesh, which operators look up by key. A graph holds only the key, because it may outlive its groups.

    planner: the factory of plans for the mesh's patterns.
    """

    def __init__(self, directory: CommunicatorCache, planner: Callable[[], Any]) -> None:
        self.at, self.planner = directory, planner
        # A mesh has the same number on every rank, so that all ranks compile, and cache on disk, the same graph.
        self.key = f"mesh{next(_NUMBERS)}-{__version__}"
        _LIVE[self.key] = self

    def place(self, comm: Communicator) -> Place:
        """Return the place where operators communicate: group, size, traced. Raises UnsupportedOp in control flow of a graph."""
        traced = is_compiling()
        if traced:
            _refuse_control_flow(comm.name)
        return f"{self.key}/{comm.name}", comm.size, traced


_NUMBERS: Final = count(1)
_LIVE: Final[WeakValueDictionary[str, Groups]] = WeakValueDictionary()


def groups_of(key: str, what: str) -> Groups:
    """Return the groups of the mesh with this key. Raises MeshClosed, about `what`."""
    groups = _LIVE.get(key)
    if groups is None:
        raise MeshClosed(
            f"{what} belongs to a mesh that no longer exists",
            given=f"{key} of this process, in a compiled function or in a backward pass",
            expected="the mesh that the function was compiled with, still open",
            hint="keep the mesh open while its results are in use, or compile again with the new one",
        )
    return groups


@once_in_graphs
def _refuse_control_flow(name: str) -> None:
    around = control_flow()
    if around is not None:
        raise UnsupportedOp(
            f'a call along "{name}" cannot be compiled in the body of {around}',
            given=f"a functional collective in a function that torch runs by {around}",
            expected="calls outside it: torch cannot keep the order of side effects in its gradient",
            hint="Python's if or for, which a graph unrolls; or no torch.compile",
        )


def _communicator(group: str) -> Communicator:
    key, _, name = group.partition("/")
    groups = groups_of(key, f'a call along "{name}"')
    return groups.at.along(tuple(name.split(", ")) if ", " in name else name)


@dataclass(frozen=True)
class _Row:
    """One operator.

    arguments: the arguments after x, group, size and traced, in torch's schema language; the first `axes` of them
               are axes of x, and the one at index `op` is the reduction.
    run:       the call itself, without autograd; the result is contiguous and new.
    shape:     computes the result's shape from x's shape, the size and the arguments; if None, the result is a view of x.
    adjoint:   computes the gradient of x from the result's gradient, the place and the arguments.
    sends:     whether `run` communicates.
    """

    name: str
    arguments: str
    run: Callable[..., Tensor]
    shape: Callable[..., Sequence[int]] | None
    adjoint: Callable[..., Tensor]
    axes: int = 0
    op: int | None = None
    sends: bool = True


def _all_reduce(comm: Communicator, x: Tensor, op: str, grad: str) -> Tensor:
    return _made(comm, ALL_REDUCE, x.clone(memory_format=torch.contiguous_format), op=op)


def _slice(comm: Communicator, x: Tensor, axis: int) -> Tensor:
    length = x.shape[axis] // comm.size
    return x.narrow(axis, comm.coord * length, length).clone(memory_format=torch.contiguous_format)


def _shift(comm: Communicator, x: Tensor, offset: int) -> Tensor:
    result = comm.messages.shift(x.detach(), offset)
    assert result is not None
    return result.contiguous()


def _made(comm: Communicator, row: Collective, x: Tensor, **given: Any) -> Tensor:
    result: Tensor = comm.collective(row, x.detach(), **given)
    return result.contiguous()


def _all_reduce_adjoint(dy: Tensor, place: Place, op: str, grad: str) -> Tensor:
    if grad == "sum":
        return call("all_reduce", dy, place, op, grad)
    return _averaged(call("identity", dy, place), place, op)


def _all_gather_adjoint(dy: Tensor, place: Place, axis: int, grad: str) -> Tensor:
    if grad == UNDETERMINED:
        raise AutogradError(
            f"the gradient through the all_gather along {place[0].partition('/')[2]} is not determined",
            given="rearrange without grad=, then a gradient by torch.func",
            expected='grad="slice" or grad="reduce_scatter"',
            hint="docs/guide/gradients.md explains which one to use",
        )
    if grad == "slice":
        return call("slice", dy, place, axis)
    return call("reduce_scatter", dy, place, axis, "sum")


def _reduce_scatter_adjoint(dy: Tensor, place: Place, axis: int, op: str) -> Tensor:
    return _averaged(call("all_gather", dy, place, axis, "reduce_scatter"), place, op)


def _averaged(dx: Tensor, place: Place, op: str) -> Tensor:
    return dx / place[1] if REDUCTIONS[op].wire.divided else dx


_ROWS: Final = (
    _Row("all_reduce", "str op, str grad", _all_reduce, lambda s, n, op, grad: s, _all_reduce_adjoint, op=0),
    _Row(
        "identity",
        "",
        lambda comm, x: x.view_as(x),
        None,
        lambda dy, place: call("all_reduce", dy, place, "sum", "identity"),
        sends=False,
    ),
    _Row(
        "all_gather",
        "int axis, str grad",
        lambda comm, x, axis, grad: _made(comm, ALL_GATHER, x, axis=axis),
        lambda s, n, axis, grad: ALL_GATHER.shape(s, axis, n),
        _all_gather_adjoint,
        axes=1,
    ),
    _Row(
        "reduce_scatter",
        "int axis, str op",
        lambda comm, x, axis, op: _made(comm, REDUCE_SCATTER, x, axis=axis, op=op),
        lambda s, n, axis, op: REDUCE_SCATTER.shape(s, axis, n),
        _reduce_scatter_adjoint,
        axes=1,
        op=1,
    ),
    _Row(
        "slice",
        "int axis",
        _slice,
        lambda s, n, axis: REDUCE_SCATTER.shape(s, axis, n),
        lambda dy, place, axis: call("all_gather", dy, place, axis, "slice"),
        axes=1,
        sends=False,
    ),
    _Row(
        "all_to_all",
        "int split_axis, int concat_axis",
        lambda comm, x, split, concat: _made(comm, ALL_TO_ALL, x, axis=split, concat=concat),
        lambda s, n, split, concat: ALL_TO_ALL.shape(s, split, n, concat),
        lambda dy, place, split, concat: call("all_to_all", dy, place, concat, split),
        axes=2,
    ),
    _Row(
        "shift",
        "int offset",
        lambda comm, x, offset: _shift(comm, x, offset),
        lambda s, n, offset: s,
        lambda dy, place, offset: call("shift", dy, place, -offset),
    ),
)


def call(name: str, x: Tensor, place: Place, *args: int | str) -> Tensor:
    """Run the operator of this name."""
    result: Tensor = getattr(torch.ops.meshcomm, name).default(x, *place, *args)
    return result


class _Linear(SingleLevelFunction):  # type: ignore[misc]
    """The autograd function that all operators share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, row: _Row, keys: Any, place: Place, args: tuple[Any, ...]) -> Tensor:
        # Calls in derivatives have not been traced separately.
        ctx.row, ctx.place, ctx.args = row, (*place[:2], False), args
        if not transforming():
            return _below(row, keys, x, place, args)
        # autograd.Function has disabled both for all transforms, but this is only the innermost one.
        with torch.enable_grad(), set_forward_mode(True):
            return _below(row, keys, x, place, args)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return ctx.row.adjoint(dy, ctx.place, *ctx.args), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return call(ctx.row.name, tangent, ctx.place, *ctx.args)


def _below(row: _Row, keys: Any, x: Tensor, place: Place, args: tuple[Any, ...]) -> Tensor:
    """Run the operator below autograd: make the call itself, or pass it to an outer transform or a tracer."""
    if only_device(keys):
        return row.run(_communicator(place[0]), x, *args)
    with below_autograd():
        if row.shape is None and not transforming():
            return x.view_as(x)  # a tracer supports view_as, but not views from custom operators
        result: Tensor = getattr(torch.ops.meshcomm, row.name).default.redispatch(keys, x, *place, *args)
        return result


def _autograd(row: _Row, keyset: Any, x: Tensor, group: str, size: int, traced: bool, *args: Any) -> Tensor:
    keys, place = keyset & after_autograd, (group, size, traced)
    needs_grad = x.requires_grad and torch.is_grad_enabled()
    transforms, level = transforming(), forward_level()
    # A compiled graph opens levels of forward-mode AD that Python does not see.
    if not (needs_grad or transforms or traced or level >= 0):
        return _below(row, keys, x, place, args)
    tangent = has_tangent(x)
    if level >= 0 and traced and not transforms and not tangent and only_device(keys):
        raise AutogradError(
            f"forward-mode AD around a compiled function that contains {_call_text(row, group)}",
            given="a graph compiled without tangents, which would be lost",
            expected="the derivative inside the compiled function, or no torch.compile",
            hint="torch.compile(lambda x, t: torch.func.jvp(f, (x,), (t,)))",
        )
    if row.op is not None and not _linear(op := args[row.op]) and (needs_grad or tangent):
        raise AutogradError(
            f"{_call_text(row, group)} has no gradient for op={op!r}",
            given=f"op={op!r}, a tensor that needs gradients",
            expected=with_gradient(),
            hint="x.detach()",
        )
    with single_level() if transforms else nullcontext():
        return _Linear.apply(x, row, keys, place, args)  # type: ignore[no-any-return]


def _linear(op: str) -> bool:
    return op in REDUCTIONS and REDUCTIONS[op].linear


def _call_text(row: _Row, group: str) -> str:
    return f'functional.{row.name} along "{group.partition("/")[2]}"'


def _batched(row: _Row, info: Any, in_dims: Any, x: Tensor, *given: Any) -> tuple[Tensor, int]:
    """Make one call for the whole batch of a vmap."""
    place, args = given[:3], given[3:]
    args = (*(axis + 1 for axis in args[: row.axes]), *args[row.axes :])
    return call(row.name, x.movedim(in_dims[0], 0), place, *args), 0


def _define(row: _Row) -> None:
    """Register one operator for eager calls, shape inference, autograd, vmap and compilers."""
    name, alias = f"meshcomm::{row.name}", "" if row.shape else "(a)"
    more = f", {row.arguments}" if row.arguments else ""
    schema = f"{row.name}(Tensor{alias} x, str group, int size, bool traced{more}) -> Tensor{alias}"
    _LIBRARY.define(schema, tags=never_constant if row.sends else ())

    def kernel(x: Tensor, group: str, size: int, traced: bool, *args: Any) -> Tensor:
        return row.run(_communicator(group), x, *args)

    def fake(x: Tensor, group: str, size: int, traced: bool, *args: Any) -> Tensor:
        return x.new_empty(row.shape(list(x.shape), size, *args)) if row.shape else x.view_as(x)

    _LIBRARY.impl(row.name, kernel, "CompositeExplicitAutograd")
    _LIBRARY.impl(row.name, partial(_autograd, row), "Autograd", with_keyset=True)
    torch.library.register_fake(name, fake, lib=_LIBRARY)
    torch.library.register_vmap(name, partial(_batched, row), lib=_LIBRARY)
    if row.sends:
        keep_calls(getattr(torch.ops.meshcomm, row.name).default)


_LIBRARY: Final = torch.library.Library("meshcomm", "DEF")
for _row in _ROWS:
    _define(_row)
