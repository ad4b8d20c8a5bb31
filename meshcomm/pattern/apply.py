"""Applies a recipe to a tensor. einops runs the local steps, and communicators run the other steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias, final

import torch
from einops import rearrange
from torch import Tensor

from meshcomm.collectives import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER
from meshcomm.comm import CommunicatorCache, Functional
from meshcomm.comm.checks import check_tensor, followed, value_of
from meshcomm.comm.functional import GatherGrad
from meshcomm.comm.operators import UNDETERMINED, groups_of
from meshcomm.errors import AutogradError, MeshcommError, PatternError, ShapeError
from meshcomm.layout import Layout
from meshcomm.pattern.plan import plan
from meshcomm.pattern.recipe import Recipe, RecipeStep
from meshcomm.pattern.roles import Sizes
from meshcomm.reductions import REDUCTIONS, with_gradient
from meshcomm.transport.torch_private import once_in_graphs

GatherRules: TypeAlias = GatherGrad | Mapping[str, GatherGrad]

_RULES = ("slice", "reduce_scatter")
# How to call a communicator with the arguments of a step.
_CALLS: Mapping[str, Callable[..., Tensor]] = {
    "reduce_scatter": lambda at, x, axis, op: at.collective(REDUCE_SCATTER, x, False, op, axis=axis),
    "all_gather": lambda at, x, axis: at.collective(ALL_GATHER, x, axis=axis),
    "all_to_all": lambda at, x, axis, concat: at.collective(ALL_TO_ALL, x, axis=axis, concat=concat),
}


@dataclass(frozen=True)
class _Calls:
    """A recipe and the gradient rule of each gathered dim. A traced graph can hold an instance, but not a plain tuple."""

    recipe: Recipe
    rules: Mapping[str, GatherGrad]


@final
class Rearranger:
    """`rearrange` for one rank of one mesh. The 1024 most recently used recipes are cached.

    When dims are added to a mesh, the mesh needs a new Rearranger, because a name in a pattern may now be a dim.
    """

    def __init__(
        self, layout: Layout, communicators: CommunicatorCache, functional: Functional, who: str
    ) -> None:
        self._layout = layout
        self._at = communicators
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
        Returns:   a new tensor if data moved between ranks, otherwise a view of x if einops would
                   return one; any strides.
        Gradient:  computed if x requires grad, for every dim that moves, is sliced, or is reduced by
                   sum or avg. A gathered dim needs the rule `grad`: one rule for all dims, or {dim: rule}.
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
            x = value_of(x)
            check_tensor(x, (x.device.type,), lambda: f"rearrange on {self._who}", plain=False)
        given_sizes = tuple(sizes.items()) if sizes else ()
        recipe = self.recipe(pattern, x.shape, partial, given_sizes)
        tracked = followed(x)
        if tracked or grad is not None:
            calls = self.calls(recipe, x.shape, grad, _needs_grad(x))
            if tracked:
                return _through(self._functional, calls, x)
        for step in recipe.steps:
            if step.kind == "slice":
                axis, communicator = step.args[0], self._at[step.dim]
                length = x.shape[axis] // step.size
                x = x.narrow(axis, communicator.coord * length, length)
            elif step.dim:
                x = _CALLS[step.kind](self._at[step.dim], x, *step.args)
            else:
                x = _local(step, x)
        return x

    def recipe(self, pattern: str, shape: tuple[int, ...], partial: str | None, sizes: Sizes) -> Recipe:
        """Return the steps for a tensor of this shape. Raises PatternError."""
        try:
            return self._recipe(pattern, shape, partial, sizes)
        except TypeError:
            # An argument, such as a list, is not hashable. Planning raises the appropriate error.
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
        """Return the recipe with its gradient rules. Raises AutogradError, PatternError."""
        call, gathered = f'"{recipe.text}" on {self._who}', recipe.gathered
        tensor = f"x of shape {tuple(shape)} with requires_grad=True"
        if grad is None and gathered and needs_grad:
            dims = " and ".join(f'"{dim}"' for dim in gathered)
            raise AutogradError(
                f"rearrange: the gradient through the all_gather along {dims} is not determined",
                given=f"{call}\n{tensor}, no grad=",
                expected='grad="slice" if all ranks along the dim continue identically and compute the '
                'same loss,\ngrad="reduce_scatter" if they continue differently and their losses add up',
                hint='grad="reduce_scatter" if each rank uses the result on its own data or weights, '
                'grad="slice" otherwise',
            )
        if grad is not None and not gathered:
            raise PatternError(
                f"rearrange: grad={grad!r} has no effect: no mesh dim is on the right only",
                given=call,
                expected="a gathered dim; the gradients of all other dims are determined",
                hint=f"remove grad={grad!r}",
            )
        default: Any = UNDETERMINED if grad is None else grad
        rules = dict(grad) if isinstance(grad, Mapping) else dict.fromkeys(gathered, default)
        wrong = [rule for rule in rules.values() if grad is not None and rule not in _RULES]
        if wrong or set(rules) != set(gathered):
            example = ", ".join(f'"{dim}": "slice"' for dim in gathered)
            raise AutogradError(
                f"rearrange: no gradient rule {wrong[0]!r}"
                if wrong
                else "rearrange: grad must have one rule for each gathered dim",
                given=f"grad={grad!r} for {call}",
                expected='"slice" or "reduce_scatter" for ' + ", ".join(gathered),
                hint=f'grad="slice", or grad={{{example}}}',
            )
        if needs_grad and recipe.partial and not REDUCTIONS[recipe.partial].linear:
            raise AutogradError(
                f'rearrange: partial="{recipe.partial}" has no gradient',
                given=f"{call}\n{tensor}",
                expected=f"{with_gradient('partial')}, or a tensor without gradients",
                hint="x.detach()",
            )
        return _Calls(recipe, rules)


def rearrange_in_graph(
    mesh: Any,
    x: Tensor,
    pattern: str,
    partial: str | None,
    grad: GatherRules | None,
    sizes: Mapping[str, int],
) -> Tensor:
    """Return the result of `Rearranger.run` under torch.compile. The recipe for the shape of `x` is planned while tracing."""
    # Formatting a symbolic size as text specializes it to a constant.
    shape = tuple(int(f"{size}") for size in x.shape)
    listed = tuple(sizes.items())
    key, dims = mesh.functional._groups.key, len(mesh.layout.merge)
    calls = _calls_in_graph(key, dims, (pattern, shape, partial, listed), grad, _needs_grad(x))
    if isinstance(calls, MeshcommError):
        raise calls
    return _through(mesh.functional, calls, x)


@once_in_graphs
def _calls_in_graph(
    key: str,
    merged: int,
    key_of_recipe: tuple[str, tuple[int, ...], str | None, Sizes],
    grad: GatherRules | None,
    needs_grad: bool,
) -> _Calls | MeshcommError:
    """Return the calls, or the planning error, which the traced code must raise.

    All arguments are constants of a graph, as torch 2.11 requires. They include `merged`, the number of merged dims, so
    that the recipe is planned again when a merged dim is added. key_of_recipe: the arguments of `Rearranger.recipe`.
    """
    planner: Rearranger = groups_of(key, f'rearrange "{key_of_recipe[0]}"').planner()
    try:
        return planner.calls(planner.recipe(*key_of_recipe), key_of_recipe[1], grad, needs_grad)
    except MeshcommError as error:
        return error


def _through(functional: Functional, calls: _Calls, x: Tensor) -> Tensor:
    for step in calls.recipe.steps:
        if not step.dim:
            x = _local(step, x)
        elif step.kind == "all_gather":
            x = functional.all_gather(step.dim, x, *step.args, grad=calls.rules[step.dim])
        else:
            x = getattr(functional, step.kind)(step.dim, x, *step.args)
    return x


def _local(step: RecipeStep, x: Tensor) -> Tensor:
    pattern, lengths = step.args
    return rearrange(x, pattern, **dict(lengths))


def _needs_grad(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()
