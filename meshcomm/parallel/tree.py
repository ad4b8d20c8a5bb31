"""Trees of tensors: the inputs and outputs of a module, and the targets of a loss.

A tree is a tensor, or a tuple, list, dictionary or another mapping, dataclass or class registered with torch.utils._pytree, of
trees and other values. transformers' outputs are registered; a tokenizer's BatchEncoding is a mapping.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from meshcomm.errors import ShapeError, UnsupportedOp
from meshcomm.parallel.torch_private import paths_of, tree_map

# Values that are the same for all samples, and for all ranks.
PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), np.generic)


def with_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a copy of a tree in which `function` replaces each leaf: each value that is no tree."""

    def leaf(x: Any) -> Any:
        if is_dataclass(x) and not isinstance(x, type):
            made = copy.copy(x)
            for each in fields(x):
                object.__setattr__(made, each.name, with_leaves(function, getattr(x, each.name)))
            return made
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
    found: list[Tensor] = []
    with_tensors(lambda x: found.append(x) or x, tree)  # type: ignore[func-returns-value]
    return found


def named_tensors(tree: Any, name: str) -> list[tuple[str, Tensor]]:
    """Return the tensors of a tree with expressions such as `inputs["ids"][0]`."""
    return [(each, leaf) for each, leaf in named_leaves(tree, name) if isinstance(leaf, Tensor)]


def named_leaves(tree: Any, name: str) -> list[tuple[str, Any]]:
    """Return the leaves of a tree with expressions such as `inputs["ids"][0]`."""
    if isinstance(tree, Tensor):
        return [(name, tree)]
    found: list[tuple[str, Any]] = []
    for path, leaf in paths_of(tree):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            for each in fields(leaf):
                found += named_leaves(getattr(leaf, each.name), f"{name}{path}.{each.name}")
        elif isinstance(leaf, Mapping):
            found += named_leaves(dict(leaf), f"{name}{path}")
        else:
            found.append((f"{name}{path}", leaf))
    return found


def scalars_of(tree: Any, name: str) -> list[list[str]]:
    """Return the names and texts of the values in a tree that all samples share: numbers, strings, and tensors without axes."""
    found = []
    for each, leaf in named_leaves(tree, name):
        if isinstance(leaf, PLAIN) or (isinstance(leaf, Tensor) and not leaf.ndim and not leaf.is_nested):
            value = leaf.item() if isinstance(leaf, (Tensor, np.generic)) else leaf
            found.append([each, repr(value)])
    return found


def check_dense(tree: Any, name: str) -> None:
    """Raise UnsupportedOp for tensors of a tree that cannot be divided along axis 0."""
    for each, tensor in named_tensors(tree, name):
        if tensor.layout != torch.strided or tensor.is_nested:
            raise UnsupportedOp(
                "a step takes dense tensors, which are divided along axis 0",
                given=f"{each}, a nested tensor"
                if tensor.is_nested
                else f"{each} with layout {tensor.layout}",
                expected="torch.strided",
                hint=f"{each}.to_padded_tensor(0.0)"
                if tensor.is_nested
                else f"{each}.to_dense(); or indices and values as two tensors, padded to equally many for each sample",
            )


def check_lists(tree: Any, name: str, count: int) -> None:
    """Raise UnsupportedOp for a list in a tree with a plain value for each of `count` samples, which would not be divided."""
    for key, each in _children(tree):
        check_lists(each, f"{name}{key}", count)
    if not isinstance(tree, (list, tuple)) or hasattr(tree, "_fields") or len(tree) != count:
        return
    # A tuple of numbers is a size, for example.
    kinds = PLAIN if isinstance(tree, list) else str
    if count and all(isinstance(each, kinds) for each in tree):
        kind = type(tree[0]).__name__
        raise UnsupportedOp(
            "a list has one value for each of this rank's samples, and only tensors are divided among microbatches",
            given=f"{name}, a {type(tree).__name__} of {count} values such as {tree[0]!r}",
            expected="a tensor with the samples along axis 0",
            hint="ids of the text in an int64 tensor (samples, length), with padding"
            if kind == "str"
            else f"torch.tensor({name}); or a tuple, if all samples share the values",
        )


def _children(tree: Any) -> list[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        return [(f"[{key!r}]", each) for key, each in tree.items()]
    if isinstance(tree, (list, tuple)):
        return [(f"[{place}]", each) for place, each in enumerate(tree)]
    if is_dataclass(tree) and not isinstance(tree, type):
        return [(f".{each.name}", getattr(tree, each.name)) for each in fields(tree)]
    return []


def check_samples(tree: Any, name: str, count: int, expected: str) -> None:
    """Raise ShapeError unless axis 0 of each tensor of a tree, except scalars, has `count` samples."""
    for each, tensor in named_tensors(tree, name):
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
