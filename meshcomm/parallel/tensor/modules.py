"""What becomes of a module of the user's: its own object, of a class that computes on this rank's part.

Objects stay, so names, hooks, shared modules and attributes stay. Only the class is another one, made
from the module's own (as fully_shard does it).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshcomm.errors import ShapeError
from meshcomm.parallel.tensor.fused import joined
from meshcomm.parallel.tensor.layers import look_up
from meshcomm.parallel.tensor.parameters import local
from meshcomm.parallel.tensor.split import TensorSplit

FUSED = "meshcomm_fused"


class Entry:
    """`split.enter`, once for all column-parallel layers that read the same tensor.

    Siblings share one. It holds what it was last given until the module around them returns, so
    the same object is the same input; a tensor that was written to in between is another.
    """

    def __init__(self, split: TensorSplit) -> None:
        self._split = split
        self._given: Tensor | None = None
        self._entered: Tensor | None = None
        self._state: tuple[int, bool] = (0, False)

    def __call__(self, x: Tensor) -> Tensor:
        """`x` behind `enter`."""
        if torch.compiler.is_compiling():
            return self._split.enter(x)
        state = (0 if x.is_inference() else x._version, torch.is_grad_enabled())
        if self._entered is None or x is not self._given or state != self._state:
            self._given, self._state = x, state
            self._entered = self._split.enter(x)
        return self._entered

    def clear(self) -> None:
        """Forget the tensor: the module around the layers has returned."""
        self._given = self._entered = None


def held(module: Any, name: str) -> Any:
    """What this rank holds of a parameter of `module`; None where it has none."""
    parameter = module._parameters[name]
    return None if parameter is None else local(parameter)


class LocalParameters:
    """A module whose forward reads this rank's part of each parameter; all others read the DTensor."""

    meshcomm_computes = False

    def forward(self, *args: Any, **named: Any) -> Any:
        """That of the module's own class."""
        outer, self.meshcomm_computes = self.meshcomm_computes, True
        try:
            return super().forward(*args, **named)  # type: ignore[misc]
        finally:
            self.meshcomm_computes = outer

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)  # type: ignore[misc]
        if isinstance(value, DTensor) and self.__dict__.get("meshcomm_computes"):
            return value.to_local()
        return value


class Around:
    """A module whose arguments or result change where it begins and ends, by `split.enter` and the like.

    Not by hooks: torch.compile would compile each layer anew, as every hook has a number of its own.
    """

    meshcomm_split: TensorSplit
    meshcomm_enter: tuple[int | str, ...] = ()
    meshcomm_gather: tuple[int | str, ...] = ()
    meshcomm_scatter = False
    meshcomm_axis: int | None = None
    meshcomm_shared: Entry | None = None

    def forward(self, *args: Any, **named: Any) -> Any:
        """That of the module's own class, and what is around it."""
        split = self.meshcomm_split
        given: dict[int | str, Any] = dict(enumerate(args))
        given.update(named)
        for key in (*self.meshcomm_enter, *self.meshcomm_gather):
            if not isinstance(given.get(key), Tensor):
                raise _no_argument(self, key, args, named)
        for key in self.meshcomm_enter:
            given[key] = split.enter(given[key])
        for key in self.meshcomm_gather:
            given[key] = split.gather(given[key], self.meshcomm_axis)
        args = tuple(given[place] for place in range(len(args)))
        try:
            y = super().forward(*args, **{name: given[name] for name in named})  # type: ignore[misc]
        finally:
            if self.meshcomm_shared is not None and not torch.compiler.is_compiling():
                self.meshcomm_shared.clear()
        if not self.meshcomm_scatter:
            return y
        if isinstance(y, tuple):
            return (split.scatter(y[0], self.meshcomm_axis), *y[1:])
        return split.scatter(y, self.meshcomm_axis)


def _no_argument(module: object, key: int | str, args: tuple[Any, ...], named: dict[str, Any]) -> ShapeError:
    return ShapeError(
        f"a {type(module).__name__} was called without the argument that its plan names",
        given=f"{len(args)} arguments by place" + "".join(f", {name}" for name in named),
        expected=f"a tensor as argument {key!r}",
        hint='"args": [0] for the first by place, "args": ["hidden_states"] for one by name',
    )


class Column:
    """nn.Linear with outputs split: x (..., n_in), whole or split along the sequence -> (..., n_out / ranks)."""

    meshcomm_split: TensorSplit
    meshcomm_entry: Callable[[Tensor], Tensor]
    meshcomm_output: str

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        weight, bias = held(self, "weight"), held(self, "bias")
        sizes = getattr(self, FUSED, {}).get("weight")
        if sizes:
            weight = joined(weight, sizes)
            bias = None if bias is None else joined(bias, sizes)
        y = F.linear(self.meshcomm_entry(x), weight, bias)
        if self.meshcomm_output == "whole" and self.meshcomm_split.size > 1:
            split = self.meshcomm_split
            return split.mesh.functional.all_gather(split.dim, y, -1, grad="slice")
        return y


class Row:
    """nn.Linear with inputs split: x (..., n_in / ranks) -> (..., n_out), whole or split along the sequence."""

    meshcomm_split: TensorSplit

    def forward(self, x: Tensor) -> Tensor:
        """See the class. The bias is added once, after the sum."""
        y = self.meshcomm_split.leave(F.linear(x, held(self, "weight")))
        bias = held(self, "bias")
        return y if bias is None else y + bias.to(y.dtype)


class Vocab:
    """nn.Embedding with rows split: ids (...) -> (..., width), whole or split along the sequence."""

    padding_idx: int | None
    meshcomm_split: TensorSplit

    def forward(self, ids: Tensor) -> Tensor:
        """See the class."""
        split = self.meshcomm_split
        return split.leave(look_up(split, ids, held(self, "weight"), self.padding_idx))


def become(module: nn.Module, kind: type, made: dict[tuple[type, type], type]) -> None:
    """Give `module` a class of `kind` and its own; `made` has those that were made before."""
    own = type(module)
    if (kind, own) not in made:
        made[kind, own] = type(f"{kind.__name__}{own.__name__}", (kind, own), {"__module__": __name__})
    module.__class__ = made[kind, own]


def work_on_slices_of_the_sequence(split: TensorSplit, module: nn.Module) -> None:
    """Mark all parameters in `module` as having partial gradients."""
    for part in module.modules():
        split.partial(part, *part._parameters)
