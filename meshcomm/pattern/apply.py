"""Carry a recipe out on a tensor: local steps by torch, the others by communicators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from meshcomm.comm import CommunicatorCache, Functional
from meshcomm.comm.checks import check_tensor, followed
from meshcomm.comm.functional import GatherGrad
from meshcomm.comm.operators import UNDETERMINED
from meshcomm.errors import AutogradError, MeshcommError, PatternError, ShapeError
from meshcomm.layout import Layout
from meshcomm.pattern.plan import plan
from meshcomm.pattern.recipe import Recipe
from meshcomm.pattern.roles import Sizes
from meshcomm.transport.torch_private import once_in_graphs

GatherRules: TypeAlias = GatherGrad | Mapping[str, GatherGrad]

_RULES = ("slice", "reduce_scatter")


@dataclass(frozen=True)
class _Call:
    """A method of Functional, its dim, what else it takes. Without a dim: what the tensor is reshaped or permuted to."""

    kind: str
    dim: str
    args: tuple[Any, ...]
    rule: GatherGrad | None


@dataclass(frozen=True)
class _Calls:
    """What a graph is made from. It can hold such values, and no plain tuples of them."""

    steps: tuple[_Call, ...]


@final
class Rearranger:
    """`rearrange` for one rank of one mesh. Recipes are cached, the last 1024 of them.

    Args:
        layout:     the mesh's. A mesh that gets further dims needs a new Rearranger, as a name
                    that was a tensor's axis may have become a dim.
        at:         the communicators, by dim.
        functional: their differentiable forms.
        who:        this rank with its coords, for errors.
    """

    __slots__ = ("_at", "_functional", "_layout", "_recipe", "_who")

    def __init__(self, layout: Layout, at: CommunicatorCache, functional: Functional, who: str) -> None:
        self._layout = layout
        self._at = at
        self._functional = functional
        self._who = who
        self._recipe = lru_cache(maxsize=1024)(self._plan)

    def run(
        self,
        x: Tensor,
        pattern: str,
        partial: str | None,
        grad: GatherRules | None,
        sizes: Mapping[str, int],
    ) -> Tensor:
        """Rearrange the local tensor `x`, and communicate where the pattern names a mesh dim.

        Called by: every rank along every dim that the pattern names, in the same program order.
        Returns:   new memory where data moved between ranks, else a view of x where einops would
                   give one; any strides.
        Gradient:  where x needs one: of every dim that moves, is sliced, or is reduced by sum or
                   avg; of a gathered dim by the rule `grad`, one for all or {dim: rule}.
        Raises:    PatternError, ShapeError, AutogradError before anything is sent; UnsupportedOp,
                   CommunicationError.
        """
        if not isinstance(x, Tensor):
            raise ShapeError(
                f"rearrange needs a torch.Tensor, got {type(x).__name__}",
                given=f"{type(x).__name__} on {self._who}",
                expected="a tensor, then a pattern",
                hint="torch.as_tensor(x), or torch.stack(x) for a list of tensors",
            )
        if type(x) is not Tensor or x.layout is not torch.strided or x.is_nested or x.is_quantized:
            check_tensor(x, (x.device.type,), lambda: f"rearrange on {self._who}")
        given = tuple(sizes.items()) if sizes else ()
        recipe = self.recipe(pattern, x.shape, partial, given)
        if followed(x):
            return _through(self._functional, self.calls(recipe, x.shape, grad, _needs_grad(x)), x)
        if grad is not None:
            self._check_rules(recipe, grad)
        for step in recipe.steps:
            if step.kind == "slice":
                axis, at = step.args[0], self._at[step.dim]
                length = x.shape[axis] // step.size
                x = x.narrow(axis, at.coord * length, length)
            elif step.dim:
                x = getattr(self._at[step.dim], step.kind)(x, *step.args)
            else:
                x = _local(step.kind, x, step.args if step.kind == "permute" else step.shape)
        return x

    def recipe(self, pattern: str, shape: tuple[int, ...], partial: str | None, sizes: Sizes) -> Recipe:
        """The steps for a tensor of this shape. Raises PatternError."""
        try:
            return self._recipe(pattern, shape, partial, sizes)
        except TypeError:
            # Something that no cache can hold, such as a list: planning says what is wrong with it.
            return self._plan(pattern, shape, partial, sizes)

    def _plan(self, pattern: object, shape: tuple[int, ...], partial: object, sizes: Sizes) -> Recipe:
        try:
            return plan(pattern, self._layout, tuple(shape), partial, sizes)
        except PatternError as error:
            error.given = f"{error.given}, {self._who}"
            raise

    def calls(
        self, recipe: Recipe, shape: tuple[int, ...], grad: GatherRules | None, needs_grad: bool
    ) -> _Calls:
        """The steps as calls that have derivatives. Raises AutogradError, PatternError."""
        rules = self._rules(recipe, shape, grad, needs_grad)
        if needs_grad and recipe.partial not in (None, "sum", "avg"):
            raise AutogradError(
                f'rearrange: partial="{recipe.partial}" has no gradient',
                given=f'"{recipe.text}" on {self._who}\n{_shown(shape)}',
                expected='partial="sum" or partial="avg", or a tensor without gradients',
                hint="x.detach()",
            )
        return _Calls(
            tuple(
                _Call(
                    step.kind,
                    step.dim,
                    step.args if step.kind != "reshape" else step.shape or (),
                    rules.get(step.dim, UNDETERMINED) if step.kind == "all_gather" else None,
                )
                for step in recipe.steps
            )
        )

    def _rules(
        self, recipe: Recipe, shape: tuple[int, ...], grad: GatherRules | None, needs_grad: bool
    ) -> Mapping[str, GatherGrad]:
        if grad is not None:
            return self._check_rules(recipe, grad)
        if recipe.gathered and needs_grad:
            dims = " and ".join(f'"{dim}"' for dim in recipe.gathered)
            raise AutogradError(
                f"rearrange: the gradient through the all_gather along {dims} is not determined",
                given=f'"{recipe.text}" on {self._who}\n{_shown(shape)}, no grad=',
                expected='grad="slice" where all ranks along the dim go on alike and compute one and the '
                'same loss,\ngrad="reduce_scatter" where they go on differently and their losses add up',
                hint='grad="reduce_scatter" for what each rank uses on its own data or weights, '
                'grad="slice" otherwise',
            )
        return {}

    def _check_rules(self, recipe: Recipe, grad: GatherRules) -> Mapping[str, GatherGrad]:
        """The rule of each gathered dim."""
        if not recipe.gathered:
            raise PatternError(
                f"rearrange: grad={grad!r} has no effect: no mesh dim is on the right only",
                given=f'"{recipe.text}" on {self._who}',
                expected="a gathered dim; the gradients of all others are determined",
                hint=f"remove grad={grad!r}",
            )
        rules = dict(grad) if isinstance(grad, Mapping) else dict.fromkeys(recipe.gathered, grad)
        wrong = [rule for rule in rules.values() if rule not in _RULES]
        if wrong or set(rules) != set(recipe.gathered):
            example = ", ".join(f'"{dim}": "slice"' for dim in recipe.gathered)
            raise AutogradError(
                f"rearrange: no gradient rule {wrong[0]!r}"
                if wrong
                else "rearrange: grad must have one rule for each gathered dim",
                given=f'grad={grad!r} for "{recipe.text}" on {self._who}',
                expected='"slice" or "reduce_scatter" for ' + ", ".join(recipe.gathered),
                hint=f'grad="slice", or grad={{{example}}}',
            )
        return rules


def rearrange_in_graph(
    mesh: Any,
    x: Tensor,
    pattern: str,
    partial: str | None,
    grad: GatherRules | None,
    sizes: Mapping[str, int],
) -> Tensor:
    """`Rearranger.run` on this mesh, as torch.compile traces it: planned while tracing, for the shape of `x`."""
    # Only text makes a number of a size that is to be one for good.
    shape = tuple(int(f"{size}") for size in x.shape)
    given = (pattern, shape, partial, tuple(sizes.items()), grad, _needs_grad(x))
    calls = _calls_in_graph(mesh, mesh.layout, *given)
    if isinstance(calls, MeshcommError):
        raise calls
    return _through(mesh.functional, calls, x)


@once_in_graphs
def _calls_in_graph(
    mesh: Any,
    layout: Layout,
    pattern: str,
    shape: tuple[int, ...],
    partial: str | None,
    sizes: Sizes,
    grad: GatherRules | None,
    needs_grad: bool,
) -> _Calls | MeshcommError:
    """The calls, or why there are none: an error of ours has to be raised by what is traced."""
    planner = Rearranger(layout, mesh._at, mesh.functional, mesh.label)
    try:
        return planner.calls(planner.recipe(pattern, shape, partial, sizes), shape, grad, needs_grad)
    except MeshcommError as error:
        return error


def _through(functional: Functional, calls: _Calls, x: Tensor) -> Tensor:
    for call in calls.steps:
        if not call.dim:
            x = _local(call.kind, x, call.args)
        elif call.rule is not None:
            x = functional.all_gather(call.dim, x, *call.args, grad=call.rule)
        else:
            x = getattr(functional, call.kind)(call.dim, x, *call.args)
    return x


def _local(kind: str, x: Tensor, args: tuple[int, ...] | None) -> Tensor:
    return x.reshape(args) if kind == "reshape" else x.permute(args)  # type: ignore[arg-type]


def _needs_grad(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _shown(shape: tuple[int, ...]) -> str:
    return f"x of shape {tuple(shape)} with requires_grad=True"
