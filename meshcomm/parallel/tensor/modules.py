"""Classes that the modules of a user get when they are split, to compute on this rank's part.

Objects stay, so names, hooks, shared modules and attributes stay. Only the class changes, to one made
from the module's own (as fully_shard does it).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshcomm.errors import ShapeError
from meshcomm.parallel.tensor.parameters import local
from meshcomm.parallel.tensor.split import TensorSplit


class SharedEntry:
    """`split.enter`, once for all column-parallel layers that read the same tensor.

    Siblings share one. It keeps its last input until the module around them returns, so the same object
    is the same input, unless it was written to in between.
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


class Around:
    """A module whose own forward reads this rank's part of each parameter, which all others read as DTensor; and
    whose arguments or result change where it begins and ends, by `split.enter` and the like.

    Not by hooks: torch.compile would compile each layer anew, as every hook has another number.
    """

    meshcomm_split: TensorSplit
    meshcomm_computes = False
    meshcomm_enter: tuple[int | str, ...] = ()
    meshcomm_gather: tuple[int | str, ...] = ()
    meshcomm_scatter = False
    meshcomm_axis: int | None = None
    meshcomm_shared: SharedEntry | None = None

    def forward(self, *args: Any, **named: Any) -> Any:
        """The forward of the module's own class, between the changes of its arguments and result."""
        split, outer = self.meshcomm_split, self.meshcomm_computes
        given: dict[int | str, Any] = dict(enumerate(args))
        given.update(named)
        for key in (*self.meshcomm_enter, *self.meshcomm_gather):
            if not isinstance(given.get(key), Tensor):
                raise ShapeError(
                    f"a {type(self).__name__} was called without the argument that its plan names",
                    given=f"{len(args)} arguments by place" + "".join(f", {name}" for name in named),
                    expected=f"a tensor as argument {key!r}",
                    hint='"args": [0] for the first by place, "args": ["hidden_states"] for one by name',
                )
        for key in self.meshcomm_enter:
            given[key] = split.enter(given[key])
        for key in self.meshcomm_gather:
            given[key] = split.gather(given[key], self.meshcomm_axis)
        args = tuple(given[place] for place in range(len(args)))
        self.meshcomm_computes = True
        try:
            y = super().forward(*args, **{name: given[name] for name in named})  # type: ignore[misc]
        finally:
            self.meshcomm_computes = outer
            if self.meshcomm_shared is not None and not torch.compiler.is_compiling():
                self.meshcomm_shared.clear()
        if not self.meshcomm_scatter:
            return y
        if isinstance(y, tuple):
            return (split.scatter(y[0], self.meshcomm_axis), *y[1:])
        return split.scatter(y, self.meshcomm_axis)

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)  # type: ignore[misc]
        if isinstance(value, DTensor) and self.__dict__.get("meshcomm_computes"):
            return local(value)
        return value
