"""Compares a module's results on an example before and after the split. Errors name the failing part and suggest fixes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from traceback import extract_tb
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from meshcomm.errors import MeshcommError, TrainingError
from meshcomm.lines import source_line
from meshcomm.parallel.memory import eval_mode
from meshcomm.parallel.tensor.parameters import local, whole
from meshcomm.parallel.tensor.plan import Rule
from meshcomm.parallel.tensor.split import TensorSplit
from meshcomm.parallel.tree import tensors_of
from meshcomm.transfer.fused import unfused
from meshcomm.watching.callsite import is_ours

Example: TypeAlias = Sequence[Any] | Mapping[str, Any]
Shapes: TypeAlias = dict[str, tuple[int, ...]]
"""The shape of each tensor argument of a forward call, by position or name."""

# The largest error that a different order of additions causes, with a margin, relative to a tensor's largest value.
_ROOM = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


@final
class Calls:
    """Records the calls to a module's parts.

    given: each part's argument shapes, call by call. open: the parts that have not returned. values: the module's arguments.
    """

    def __init__(self) -> None:
        self.given: dict[str, list[Shapes]] = {}
        self.open: list[str] = []
        self.module: nn.Module = nn.Identity()
        self.values: Sequence[Any] = ()

    @contextmanager
    def watching(self, module: nn.Module, *values: Any) -> Iterator[None]:
        """Record calls in this context. values: the arguments of `module`."""
        self.module, self.values = module, values
        hooks: list[Any] = []
        for name, part in module.named_modules():
            hooks.append(part.register_forward_pre_hook(partial(self._called, name), with_kwargs=True))
            hooks.append(part.register_forward_hook(self._returned))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _returned(self, *_: Any) -> None:
        self.open.pop()

    def _called(self, name: str, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.open.append(name)
        every: dict[str, Any] = {**{str(place): value for place, value in enumerate(args)}, **named}
        shapes = {key: tuple(x.shape) for key, x in every.items() if isinstance(x, Tensor)}
        self.given.setdefault(name, []).append(shapes)


@final
class Seen:
    """A module's outputs on an example, and all gradients of a sum of the outputs with fixed random weights, all unsharded.

    like: the `Seen` of the module before it was split. Outputs that are slices of the earlier outputs are gathered.
    rules: the rules by which the module was split.

    Raises TrainingError if the split module fails.
    """

    def __init__(
        self,
        split: TensorSplit,
        module: nn.Module,
        example: Example,
        like: Seen | None = None,
        rules: Mapping[str, Rule] | None = None,
    ) -> None:
        self.calls = Calls()
        self.values: dict[str, Tensor] = {}
        try:
            outputs = tensors_of(self._run(module, example))
        except MeshcommError:
            raise
        except Exception as error:
            if like is None:
                raise
            raise explained(error, split, rules or {}, like.calls, self.calls, " on its example") from error
        total = torch.zeros((), device=split.device)
        for number, y in enumerate(output for output in outputs if output.is_floating_point()):
            name = f"output {number}"
            axis = None if like is None else _axis(split, y, like.values.get(name, y))
            shape, value = list(y.shape), y.detach()
            if axis is not None:
                shape[axis] *= split.size
                value = split.mesh.all_gather(split.dim, value, axis)
            # Drawn on the CPU, so that the numbers are the same on every rank and device type.
            weights = torch.randn(shape, generator=torch.Generator().manual_seed(number))
            if axis is not None:
                weights = weights.chunk(split.size, axis)[split.coord]
            total = total + (y * weights.to(y)).sum()
            self.values[name] = value
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        grads: Sequence[Tensor | None] = [None] * len(named)
        if named and total.requires_grad:
            grads = torch.autograd.grad(total, list(named.values()), allow_unused=True)
        grad_of = dict(zip(named, grads, strict=True))
        if like is not None:
            marked = [grad_of.get(name) for name in split.partial_parameters(module)]
            parts = [local(grad) for grad in marked if grad is not None]
            if parts:
                split.mesh.all_reduce(split.dim, parts)
        known = {name: torch.zeros_like(named[name]) if g is None else g for name, g in grad_of.items()}
        for name, gradient in unfused(known, module).items():
            self.values[f"gradient of {name}"] = whole(gradient)

    def _run(self, module: nn.Module, example: Example) -> Any:
        """Run forward in eval mode and record the calls to every part."""
        named = example if isinstance(example, Mapping) else {}
        args = () if isinstance(example, Mapping) else example
        with eval_mode(module), torch.enable_grad(), self.calls.watching(module, *args, *named.values()):
            return module(*args, **named)


def compare_outputs(split: TensorSplit, before: Seen, after: Seen) -> None:
    """Raise TrainingError on every rank if the two results differ by more than rounding errors."""
    odd = []
    for name, expected in before.values.items():
        value = after.values.get(name)
        if value is None or value.shape != expected.shape:
            given = "missing" if value is None else f"of shape {tuple(value.shape)}"
            odd.append(f"{name}: {given}; the shape before the split is {tuple(expected.shape)}")
            continue
        most = float(expected.abs().max()) if expected.numel() else 0.0
        off = float((value - expected).abs().max()) if expected.numel() else 0.0
        # Not "off > room", because nan must not pass.
        if not off <= _ROOM.get(expected.dtype, 1e-3) * max(most, 1e-6):
            odd.append(f"{name}: off by {off:.2g}; the largest value is {most:.2g}")
    count = torch.tensor([len(odd)], device=split.device)
    split.mesh.all_reduce(split.dim, count, op="max")
    if int(count):
        shown = odd[:8] + ([f"and {len(odd) - 8} more"] if len(odd) > 8 else [])
        raise TrainingError(
            f'the module split along "{split.dim}" does not compute the same results as before',
            given="\n".join(shown) or "other ranks see differences",
            expected="outputs and gradients on the example that are equal up to rounding",
            hint='"set": {"heads": "split"} for head counts; "column:3" for q, k and v in one weight; '
            'a "row" after every "column"',
        )


def _axis(split: TensorSplit, y: Tensor, ref: Tensor) -> int | None:
    """Return the axis along which `y` is a slice of a tensor shaped like `ref`, or None."""
    if y.ndim != ref.ndim:
        return None
    other = [axis for axis in range(y.ndim) if y.shape[axis] != ref.shape[axis]]
    if len(other) == 1 and y.shape[other[0]] * split.size == ref.shape[other[0]]:
        return other[0]
    return None


# -- where the split module fails, but did not before -----------------------------------------------


def explained(
    error: Exception,
    split: TensorSplit,
    rules: Mapping[str, Rule],
    before: Calls,
    after: Calls,
    where: str = "",
) -> TrainingError:
    """Return the error that replaces torch's `error`. The new error names the part and the line that raised `error`, gives the
    part's sizes before and after the split, and suggests fixes.

    where: the text after "fails".
    """
    module, name = after.module, after.open[-1] if after.open else ""
    part = module.get_submodule(name)
    calls, past = after.given.get(name, []), before.given.get(name, [])
    shapes_now = calls[-1] if calls else {}
    was = past[len(calls) - 1] if 0 < len(calls) <= len(past) else {}
    sizes = [
        f"its argument {key} has shape {shapes_now[key]}, but had {was[key]} before the split"
        for key in shapes_now
        if key in was and shapes_now[key] != was[key]
    ]
    cures = [
        *_of_linear(split, name, part, rules.get(name, Rule()), shapes_now, was),
        *_of_sequence(split, name, shapes_now, was),
        *_of_columns(split, name, part, rules, after),
        *_of_shape(split, str(error)),
    ]
    if not cures and split.sequence_parallel:
        cures.append(
            '{"style": "replicate", "input": "whole", "axis": 0} for a part, such as a table of positions, that '
            "returns the full sequence"
        )
    (message, *_) = str(error).strip().splitlines() or [type(error).__name__]
    kind = next(base for base in type(part).__mro__ if not base.__module__.startswith("meshcomm."))
    label = f'"{name}"' if name else "the module itself"
    lines = [frame for frame in extract_tb(error.__traceback__) if not is_ours(frame.filename)]
    line = [
        f"at {source_line(line.filename, line.lineno)} in {line.name}: {line.line}" for line in lines[-1:]
    ]
    return TrainingError(
        f'the module split along "{split.dim}" fails{where} in {label}, a {kind.__name__}',
        given="\n".join([f"{type(error).__name__}: {message}", *line, *sizes]),
        expected="the same results as before the split",
        hint="\n".join(dict.fromkeys(cures))
        or 'set a style for each part that receives or creates a slice, and "set" for its head counts',
    )


def _of_columns(
    split: TensorSplit, name: str, part: nn.Module, rules: Mapping[str, Rule], calls: Calls
) -> Iterator[str]:
    """Suggest fixes for head counts, or for the loss, in a part with split columns or in the parent of a Linear."""
    around = name.rpartition(".")[0] if isinstance(part, nn.Linear) else name
    columns = [
        other
        for other, rule in rules.items()
        if rule.style == "column" and rule.output == "split" and other.rpartition(".")[0] == around
    ]
    if not columns:
        return
    yield from _of_heads(split, around, calls.module.get_submodule(around), rules.get(around, Rule()))
    if sum(isinstance(x, Tensor) and x.dtype == torch.int64 for x in calls.values) > 1:
        yield (
            f'with labels, the module computes its loss from a slice of the logits: "{columns[-1]}": "column:whole", '
            "or no labels, and cross_entropy(split, logits, labels)"
        )


def _of_linear(
    split: TensorSplit, name: str, part: nn.Module, rule: Rule, shapes_now: Shapes, was: Shapes
) -> Iterator[str]:
    """Suggest a "row" that is missing from the plan, or a fix for a "row" with nothing split before it."""
    if not isinstance(part, nn.Linear) or not shapes_now.get("0") or not was.get("0"):
        return
    inputs, all_inputs = shapes_now["0"][-1], was["0"][-1]
    if rule.style != "row" and inputs * split.size == all_inputs:
        yield f'"{name}": "row", as it gets {inputs} of its {all_inputs} inputs'
    elif rule.style == "row" and inputs == all_inputs:
        yield f'"{name}" gets all of its {all_inputs} inputs: a "column" before it, or no style for it'


def _of_sequence(split: TensorSplit, name: str, shapes_now: Shapes, was: Shapes) -> Iterator[str]:
    """Suggest styles for a part that needs the full sequence, or reads the sequence length from a slice."""
    axis = split.axis
    for key, shape in shapes_now.items() if split.sequence_parallel else ():
        before = was.get(key, ())
        if axis < len(shape) == len(before) and shape[axis] * split.size == before[axis]:
            places = f"it gets {shape[axis]} of {before[axis]} positions of the sequence"
            yield f'"{name}": "enter" if it reads the length from its input, "replicate" if it needs all: {places}'
            yield "pass positions (position_ids) if the module counts the positions of its input"
            return


def _of_shape(split: TensorSplit, message: str) -> Iterator[str]:
    """Suggest a fix for a view or reshape that uses a size from before the split."""
    match = re.search(r"shape '\[([\d, ]+)\]' is invalid for input of size (\d+)", message)
    if match is None:
        return
    shape, size = [int(length) for length in match[1].split(",")], int(match[2])
    if prod(shape) == size * split.size:
        inferred = [*shape[:-1], -1] if len(shape) < 4 else [*shape[:-2], -1, shape[-1]]
        yield (
            f"reshape to {inferred} instead of {shape}: after a split column, each rank has 1/{split.size} of the "
            "last axis, or of the heads"
        )


def _of_heads(split: TensorSplit, name: str, part: nn.Module, rule: Rule) -> Iterator[str]:
    """Suggest fixes for head counts, in the part or its config, that were not divided or cannot be."""
    config = getattr(part, "config", None)
    holders: list[Any] = [part] if config is None else [part, config]
    for holder in holders:
        for key, value in vars(holder).items():
            if "head" not in key or "dim" in key or "size" in key or key in rule.set:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                continue
            if value % split.size:
                yield f"a size of {split.dim} that divides {key} = {value}, which cannot be split by {split.dim} = {split.size}"
            elif holder is part:
                yield f'"{name}": {{"set": {{"{key}": "split"}}}}, {value} now'
            elif not hasattr(part, key):
                yield (
                    f'"{name}": {{"set": {{"config": ...}}}}, a copy of its config with {key} = {value // split.size}, '
                    f"{value} now, if its forward reads this number"
                )
