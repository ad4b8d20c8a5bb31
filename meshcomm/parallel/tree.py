"""Trees of tensors: the inputs and outputs of a module, and the targets of a loss.

A tree is a tensor, or a tuple, list, dictionary or another mapping, dataclass or class registered with torch.utils._pytree, of
trees and other values. transformers' outputs are registered; a tokenizer's BatchEncoding is a mapping.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from meshcomm.errors import ShapeError, UnsupportedOp
from meshcomm.parallel.torch_private import paths_of, tree_map


def with_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return a copy of a tree in which `function` replaces each tensor."""

    def leaf(x: Any) -> Any:
        if isinstance(x, Tensor):
            return function(x)
        if is_dataclass(x) and not isinstance(x, type):
            made = copy.copy(x)
            for each in fields(x):
                object.__setattr__(made, each.name, with_tensors(function, getattr(x, each.name)))
            return made
        # pytree knows only some classes of mappings.
        return with_tensors(function, dict(x)) if isinstance(x, Mapping) else x

    return function(tree) if isinstance(tree, Tensor) else tree_map(leaf, tree)


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    found: list[Tensor] = []
    with_tensors(lambda x: found.append(x) or x, tree)  # type: ignore[func-returns-value]
    return found


def named_tensors(tree: Any, name: str) -> list[tuple[str, Tensor]]:
    """Return the tensors of a tree with expressions such as `inputs["ids"][0]`."""
    if isinstance(tree, Tensor):
        return [(name, tree)]
    found: list[tuple[str, Tensor]] = []
    for path, leaf in paths_of(tree):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            for each in fields(leaf):
                found += named_tensors(getattr(leaf, each.name), f"{name}{path}.{each.name}")
        elif isinstance(leaf, Mapping):
            found += named_tensors(dict(leaf), f"{name}{path}")
        elif isinstance(leaf, Tensor):
            found.append((f"{name}{path}", leaf))
    return found


def check_samples(tree: Any, name: str, count: int, expected: str) -> None:
    """Raise ShapeError unless axis 0 of each tensor of a tree, except scalars, has `count` samples."""
    for each, tensor in named_tensors(tree, name):
        if tensor.layout != torch.strided:
            raise UnsupportedOp(
                "a step takes dense tensors, which are divided along axis 0",
                given=f"{each} with layout {tensor.layout}",
                expected="torch.strided",
                hint=f"{each}.to_dense(); or indices and values as two tensors, padded to equally many for each sample",
            )
        if tensor.ndim and len(tensor) != count:
            raise ShapeError(
                "a tensor of the step does not have this rank's samples along axis 0",
                given=f"{each} of shape {tuple(tensor.shape)}",
                expected=f"{count} samples: {expected}",
                hint="x.expand(samples, *x.shape) for a tensor that all samples share; a buffer of the module if it never changes; "
                "padding to (samples, length), in place of all samples' values with offsets",
            )


def samples_of(tree: Any) -> int:
    """Return the number of samples in a tree: the length of axis 0 of its first tensor that is not a scalar."""
    return next((each.shape[0] for each in tensors_of(tree) if each.ndim), 0)


def first_tensor(tree: Any) -> Tensor:
    """Return the first tensor of a tree. Raises UnsupportedOp if there is none."""
    for each in tensors_of(tree):
        return each
    raise UnsupportedOp(
        "a step needs a tensor",
        given=f"a {type(tree).__name__} without tensors",
        expected="a tensor, or a tree of tuples, lists, dictionaries or dataclasses of tensors",
    )


def in_parts(tree: Any, count: int) -> list[Any]:
    """Return `count` trees of consecutive samples, equally many in each. Scalars are in each."""
    if isinstance(tree, Tensor):
        return list(tree.tensor_split(count))
    parts = [x.tensor_split(count) if x.ndim else (x,) * count for x in tensors_of(tree)]
    found = []
    for place in range(count):
        left = iter(parts)
        found.append(with_tensors(lambda x, left=left, place=place: next(left)[place], tree))  # type: ignore[misc]
    return found


def sliced(tree: Any, samples: slice) -> Any:
    """Return the tree of these samples."""
    return with_tensors(lambda x: x[samples] if x.ndim else x, tree)


def called(function: Callable[..., Any], inputs: Any, **more: Any) -> Any:
    """Call a module as torch programs do: a tuple or list as its arguments, a dictionary as its named arguments."""
    if isinstance(inputs, Mapping):
        return function(**inputs, **more)
    if isinstance(inputs, Sequence) and not hasattr(inputs, "_fields"):
        return function(*inputs, **more)
    return function(inputs, **more)
