"""State of a program outside of its module: variables that functions enclose, globals, attributes of classes, generators."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

_LIBRARIES: Final = ("torch", "transformers", "meshcomm", "numpy", "einops", "peft", "functools", "builtins")
_PLAIN: Final = (int, float, complex, str, bytes, type(None), list, dict, set, tuple, deque, Tensor)


def functions_of(module: nn.Module | None, *others: Any) -> list[FunctionType]:
    """Return the functions of a module's parts and hooks, and of callables, with those that they enclose."""
    unvisited: list[Any] = [*others]
    for part in () if module is None else module.modules():
        if not _is_own(type(part)):
            continue
        unvisited += vars(type(part)).values()
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            unvisited += getattr(part, hooks, {}).values()
    functions: dict[FunctionType, None] = {}
    while unvisited:
        value = unvisited.pop()
        if isinstance(value, FunctionType):
            if value not in functions and _is_own(value):
                functions[value] = None
                unvisited += [cell.cell_contents for cell in filter(_holds, value.__closure__ or ())]
        elif isinstance(value, (MethodType, partial)):
            unvisited.append(value.__func__ if isinstance(value, MethodType) else value.func)
        elif callable(value) and not isinstance(value, (type, nn.Module)):
            call = vars(type(value)).get("__call__")
            unvisited += [call] if isinstance(call, FunctionType) else []
    return list(functions)


def _is_own(value: Any) -> bool:
    """Return whether a function or class is a program's own: not of a library, whose registries must not be copied."""
    return str(getattr(value, "__module__", "")).partition(".")[0] not in _LIBRARIES


def _holds(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def held_by(functions: Iterable[FunctionType]) -> Iterator[tuple[Any, Callable[[Any], None]]]:
    """Yield the values of the variables that functions enclose, and of the globals that they read, each with its setter."""
    for function in functions:
        for cell in filter(_holds, function.__closure__ or ()):
            yield cell.cell_contents, partial(setattr, cell, "cell_contents")
        names = function.__globals__
        for name in _names_in(function.__code__):
            if name in names:
                yield names[name], partial(names.__setitem__, name)


@contextmanager
def kept(functions: list[FunctionType], classes: list[type]) -> Iterator[None]:
    """In this context, functions may change numbers, containers and tensors that are not theirs. Afterwards, these are as
    before. Objects of other kinds, such as iterators, stay changed.
    """
    undo: list[Callable[[], None]] = []
    for value, put in held_by(functions):
        _keep(value, put, undo)
    for kind in filter(_is_own, classes):
        for name, value in list(vars(kind).items()):
            if not name.startswith("__"):
                _keep(value, partial(setattr, kind, name), undo)
    try:
        yield
    finally:
        for action in undo:
            action()


@contextmanager
def undisturbed() -> Iterator[None]:
    """In this context, compiled functions run eagerly. Afterwards, all random generators are as before."""
    state, numbers = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(), torch.compiler.set_stance("force_eager"):
        try:
            yield
        finally:
            random.setstate(state)
            np.random.set_state(numbers)


def apart(loss: Any) -> Any:
    """Return a copy of a function with copies of the numbers, containers and tensors that it, and the program's functions that
    it encloses, hold: each simulated rank counts for itself. Modules and other objects are shared.
    """
    return _apart(loss, {}, {})


def keeps_samples(loss: Any) -> bool:
    """Return whether a loss holds containers or tensors, in which it may keep something for each sample."""
    if isinstance(loss, nn.Module) or not callable(loss):
        return any(True for _ in loss.buffers()) if isinstance(loss, nn.Module) else False
    held = [value for value, _ in held_by(functions_of(None, loss))]
    held += getattr(getattr(loss, "__self__", loss), "__dict__", {}).values()
    return any(isinstance(variable, (Tensor, list, dict, set, deque)) for variable in held)


def _apart(original: Any, copies: dict[Any, Any], memo: dict[int, Any]) -> Any:
    """copies: the copies of functions, cells and namespaces so far, by identity."""
    if isinstance(original, partial):
        args = [_apart(value, copies, memo) for value in original.args]
        named = {name: _apart(value, copies, memo) for name, value in original.keywords.items()}
        return partial(_apart(original.func, copies, memo), *args, **named)
    if not isinstance(original, FunctionType):
        return _copy_of(original, memo)
    if not _is_own(original):
        return original
    if original in copies:
        return copies[original]
    cells = [copies.setdefault(id(cell), CellType()) for cell in original.__closure__ or ()]
    names = {name for name in _names_in(original.__code__) if name in original.__globals__}
    held = {name for name in names if isinstance(original.__globals__[name], _PLAIN)}
    into = original.__globals__
    if held:
        into = copies.setdefault(id(original.__globals__), {**original.__globals__})
        for name in held:
            into[name] = _copy_of(original.__globals__[name], memo)
    new = copies[original] = FunctionType(
        original.__code__, into, original.__name__, original.__defaults__, tuple(cells) if cells else None
    )
    new.__kwdefaults__, new.__module__ = original.__kwdefaults__, original.__module__
    new.__dict__.update(original.__dict__)
    for cell, mine in zip(original.__closure__ or (), cells, strict=True):
        if _holds(cell) and not _holds(mine):
            mine.cell_contents = _apart(cell.cell_contents, copies, memo)
    return new


def _names_in(code: CodeType) -> set[str]:
    """Return the names that a function, and the functions within it, look up."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names}.union(*map(_names_in, inner))


def _copy_of(value: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of plain data, or the same object."""
    if not isinstance(value, _PLAIN):
        return value
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        return value


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
