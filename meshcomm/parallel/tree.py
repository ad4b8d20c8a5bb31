"""Trees of tensors: the inputs and outputs of a module, and the targets of a loss.

A tree is a tensor, or a tuple, list, dictionary or another mapping, dataclass or class registered with torch.utils._pytree, of
trees and other values. transformers' outputs are registered; a tokenizer's BatchEncoding is a mapping.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshcomm.errors import UnsupportedOp
from meshcomm.parallel.torch_private import entries_of, tree_map


def with_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a copy of a tree in which `function` replaces each leaf: each value that is no tree."""

    def leaf(x: Any) -> Any:
        if is_dataclass(x) and not isinstance(x, type):
            copied = copy.copy(x)
            for field in fields(x):
                object.__setattr__(copied, field.name, with_leaves(function, getattr(x, field.name)))
            return copied
        # pytree knows only some classes of mappings.
        return with_leaves(function, dict(x)) if isinstance(x, Mapping) else function(x)

    return function(tree) if isinstance(tree, Tensor) else tree_map(leaf, tree)


def with_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return a copy of a tree in which `function` replaces each tensor."""
    return with_leaves(lambda x: function(x) if isinstance(x, Tensor) else x, tree)


def without_arrays(tree: Any) -> Any:
    """Return a copy of a tree with tensors in place of NumPy arrays, or the same tree if it has none. They share memory."""
    if isinstance(tree, Tensor) or (type(tree) is tuple and all(isinstance(x, Tensor) for x in tree)):
        return tree
    arrays: list[Any] = []
    with_leaves(lambda x: arrays.append(x) if isinstance(x, np.ndarray) else None, tree)
    return with_leaves(_tensor, tree) if arrays else tree


def _tensor(x: Any) -> Any:
    if not isinstance(x, np.ndarray):
        return x
    try:
        return torch.from_numpy(x if x.flags.writeable else x.copy())
    except (TypeError, ValueError) as error:
        raise UnsupportedOp(
            "a NumPy array of the step cannot become a tensor",
            given=f"dtype {x.dtype}, shape {x.shape}: {error}",
            expected="numbers, of which samples are divided along axis 0",
            hint="encode text as ids in an int64 tensor",
        ) from error


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    tensors: list[Tensor] = []
    with_tensors(lambda x: tensors.append(x) or x, tree)  # type: ignore[func-returns-value]
    return tensors


def children(tree: Any) -> list[tuple[str, Any]]:
    """Return what a tree consists of, with expressions such as `["ids"]`, or nothing for a leaf."""
    if isinstance(tree, Tensor):
        return []
    if isinstance(tree, Mapping):
        return [(f"[{key!r}]", child) for key, child in tree.items()]
    if is_dataclass(tree) and not isinstance(tree, type):
        return [(f".{field.name}", getattr(tree, field.name)) for field in fields(tree)]
    return entries_of(tree)


def named_leaves(tree: Any, name: str) -> list[tuple[str, Any]]:
    """Return the leaves of a tree with expressions such as `inputs["ids"][0]`."""
    parts = children(tree)
    if not parts:
        return [(name, tree)]
    return [leaf for path, child in parts for leaf in named_leaves(child, name + path)]


def named_tensors(tree: Any, name: str) -> list[tuple[str, Tensor]]:
    """Return the tensors of a tree with expressions such as `inputs["ids"][0]`."""
    return [(leaf_name, leaf) for leaf_name, leaf in named_leaves(tree, name) if isinstance(leaf, Tensor)]


def samples_of(tree: Any) -> int:
    """Return the number of samples in a tree: the length of axis 0 of its first tensor that is not a scalar."""
    return next((x.shape[0] for x in tensors_of(tree) if x.ndim), 0)


def first_tensor(tree: Any) -> Tensor:
    """Return the first tensor of a tree. Raises UnsupportedOp if there is none."""
    for x in tensors_of(tree):
        return x
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
    trees = []
    for place in range(count):
        unused = iter(parts)
        trees.append(with_tensors(lambda x, unused=unused, place=place: next(unused)[place], tree))  # type: ignore[misc]
    return trees


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
