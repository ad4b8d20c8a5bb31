"""What a program's functions hold outside of a module: variables that they enclose, globals, and attributes of classes."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Final

from torch import Tensor, nn

_LIBRARIES: Final = ("torch", "transformers", "meshcomm", "numpy", "einops", "peft", "functools", "builtins")
_PLAIN: Final = (int, float, complex, str, bytes, type(None), list, dict, set, tuple, deque, Tensor)


def functions_of(module: nn.Module | None, *others: Any) -> list[FunctionType]:
    """Return the functions of a module's parts and hooks, and of callables, with those that they enclose."""
    left: list[Any] = [*others]
    for part in () if module is None else module.modules():
        if not _is_own(type(part)):
            continue
        left += vars(type(part)).values()
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            left += getattr(part, hooks, {}).values()
    found: dict[FunctionType, None] = {}
    while left:
        each = left.pop()
        if isinstance(each, FunctionType):
            if each not in found and _is_own(each):
                found[each] = None
                left += [cell.cell_contents for cell in filter(_holds, each.__closure__ or ())]
        elif isinstance(each, (MethodType, partial)):
            left.append(each.__func__ if isinstance(each, MethodType) else each.func)
        elif callable(each) and not isinstance(each, (type, nn.Module)):
            call = vars(type(each)).get("__call__")
            left += [call] if isinstance(call, FunctionType) else []
    return list(found)


def _is_own(what: Any) -> bool:
    """Return whether a function or class is a program's own: not of a library, whose registries must not be copied."""
    return str(getattr(what, "__module__", "")).partition(".")[0] not in _LIBRARIES


def _holds(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def modules_in(functions: list[FunctionType]) -> list[nn.Module]:
    """Return the modules that functions enclose, or read as globals."""
    values = [cell.cell_contents for each in functions for cell in each.__closure__ or () if _holds(cell)]
    values += [each.__globals__.get(name) for each in functions for name in each.__code__.co_names]
    return [each for each in values if isinstance(each, nn.Module)]


@contextmanager
def kept(functions: list[FunctionType], classes: list[type]) -> Iterator[None]:
    """In this context, functions may change numbers, containers and tensors that are not theirs. Afterwards, these are as
    before. Objects of other kinds, such as iterators, stay changed.
    """
    undo: list[Callable[[], None]] = []
    for function in functions:
        for cell in filter(_holds, function.__closure__ or ()):
            _keep(cell.cell_contents, partial(setattr, cell, "cell_contents"), undo)
        for name in function.__code__.co_names:
            if name in function.__globals__:
                into = function.__globals__
                _keep(into[name], partial(into.__setitem__, name), undo)
    for kind in filter(_is_own, classes):
        for name, value in list(vars(kind).items()):
            if not name.startswith("__"):
                _keep(value, partial(setattr, kind, name), undo)
    try:
        yield
    finally:
        for action in undo:
            action()


def _keep(value: Any, put: Callable[[Any], None], undo: list[Callable[[], None]]) -> None:
    """Add an action that restores `value` in place, or puts it back."""
    if not isinstance(value, _PLAIN):
        return
    held: Any = value
    try:
        before = copy.deepcopy(held)
    except Exception:
        return

    def restore() -> None:
        put(held)
        if isinstance(held, Tensor):
            if not held.requires_grad and held.shape == before.shape:
                held.copy_(before)
        elif isinstance(held, (list, deque)):
            held.clear()
            held.extend(before)
        elif isinstance(held, (dict, set)):
            held.clear()
            held.update(before)

    undo.append(restore)
