"""Detects optimizers that combine several elements of a parameter that is split across ranks.

With real processes, such a parameter is a DTensor, whose norm or mean covers the full tensor or raises an error. In the
simulator, the parameter is a plain tensor with this rank's part, whose norm would silently differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, final

from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from meshcomm.errors import UnsupportedOp
from meshcomm.transport.torch_private import DispatchMode, leaves_of, storage_id

# Operators that combine elements and return as many elements as their inputs have.
_MIXES: Final = frozenset((
    "mm", "bmm", "addmm", "addmm_", "baddbmm", "mv", "addmv", "cumsum", "cumprod", "sort", "topk", "_softmax",
))  # fmt: skip


@contextmanager
def elementwise_steps() -> Iterator[None]:
    """While this context is active, an optimizer step that combines elements of a part raises an error, in any thread."""
    entered: dict[Optimizer, _Elementwise] = {}

    def before(made: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        leave(made)
        dims = {dim for group in made.param_groups for each in group["params"] for dim in _split(each)}
        if not dims:
            return None
        mode = entered[made] = _Elementwise(made, sorted(dims))
        mode.__enter__()
        return tuple(map(mode.outside, args)), {name: mode.outside(each) for name, each in kwargs.items()}

    def leave(made: Optimizer, *_: Any) -> None:
        mode = entered.pop(made, None)
        if mode is not None:
            mode.leave()

    hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@final
class _Elementwise(DispatchMode):  # type: ignore[misc]
    """Tracks the tensors that an optimizer step computes from the parts of its parameters."""

    def __init__(self, made: Optimizer, dims: list[str]) -> None:
        super().__init__()
        self._name, self._dims = type(made).__name__, dims
        self._made, self._inside, self._refused = made, False, False
        # Tensors with the parts and the results, by storage. They stay alive so that their storage ids stay unique.
        self._parts: dict[int, Tensor] = {}

    def __enter__(self) -> _Elementwise:
        for parameter in (each for group in self._made.param_groups for each in group["params"]):
            if _split(parameter):
                held = self._made.state.get(parameter, {}).values()
                self._follow([parameter, parameter.grad])
                self._follow([x for x in held if isinstance(x, Tensor) and x.shape == parameter.shape])
        self._inside = True
        super().__enter__()
        return self

    def leave(self) -> None:
        """Leave the mode if it is active. After an error, torch's stack keeps the mode, but it no longer checks anything."""
        if self._inside and not self._refused:
            self._inside = False
            self.__exit__(None, None, None)

    def outside(self, given: Any) -> Any:
        """Return an argument for `step`. A closure that computes the loss is wrapped, so that the mode does not check it."""
        if isinstance(given, Optimizer) or not callable(given):
            return given
        closure: Callable[..., Any] = given

        def called(*args: Any, **kwargs: Any) -> Any:
            self.leave()
            try:
                return closure(*args, **kwargs)
            finally:
                self.__enter__()

        return called

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See TorchDispatchMode."""
        found = func(*args, **(kwargs or {}))
        given = [each for each in leaves_of((args, kwargs)) if isinstance(each, Tensor)]
        parts = [each for each in given if storage_id(each) in self._parts]
        if parts and not self._refused:
            memories = {storage_id(each) for each in given}
            made = [each for each in leaves_of(found) if isinstance(each, Tensor)]
            new = [each for each in made if storage_id(each) not in memories]
            if self._mixes(str(func).split(".")[1], parts, new):
                self._refuse(str(func), parts[0])
            self._follow(new)
        return found

    def _mixes(self, name: str, parts: list[Tensor], new: list[Tensor]) -> bool:
        """Return whether an operator that computed `new` from `parts` combines several of their elements."""
        if name.startswith("_foreach_"):
            # Foreach operators work on lists of tensors. Only these two combine elements within a tensor.
            return name.startswith(("_foreach_norm", "_foreach_max.default"))
        size, ndim = max(x.numel() for x in parts), max(x.ndim for x in parts)
        smaller = any(each.numel() < size or each.ndim < ndim for each in new)
        return smaller or name in _MIXES or name.startswith("linalg_")

    def _follow(self, tensors: list[Any]) -> None:
        for each in tensors:
            if isinstance(each, Tensor):
                self._parts[storage_id(each)] = each

    def _refuse(self, operator: str, part: Tensor) -> None:
        self._refused = True
        self._parts.clear()
        raise UnsupportedOp(
            f"{self._name}.step treats a part of a parameter as the full parameter: {operator}",
            given=f"a part of shape {tuple(part.shape)}, split along {', '.join(self._dims)}; "
            "in the simulator parts are plain tensors",
            expected="an optimizer that treats each element separately, like SGD and AdamW",
            hint="meshcomm run: in real processes the parameter is a DTensor, whose norm covers the full tensor",
        )


def _split(parameter: Tensor) -> list[str]:
    """Return the dims along which a plain parameter is split, as recorded by parallel/tensor/parameters.py."""
    parts = getattr(parameter, "meshcomm_parts", ())
    return [part.dim for part in parts if part.mesh.size(part.dim) > 1]
