"""The names of a model's tensors in its published folder, and which part of which parameter each of them is.

A model says what it stores by a function of names and values. Applied to values without memory, it says where in a parameter
each tensor lies: at one index of the experts, in some of the rows, transposed. So no parameter is gathered for its names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshcomm.transfer.fused import Kept, unfused
from meshcomm.transfer.placement import Box
from meshcomm.transfer.tensors import Cut, Cutout, Region

Naming: TypeAlias = Callable[[str, Tensor], Mapping[str, Tensor]]
"""The tensors, by name, that store a parameter of this name and value, also if the value has no memory."""


# The cuts of the parameters of each model, by name and shape. They do not change, and are asked for with each version of weights.
_CUTS: Final[WeakKeyDictionary[nn.Module, dict[Any, dict[str, Cut] | None]]] = WeakKeyDictionary()


def stored_parts(model: nn.Module) -> dict[str, Any]:
    """Return this rank's parts of the tensors of a model, by their names in the model's folder, as `Parted`, and whatever else
    its state dict has.

    These are the parameters and persistent buffers. Those of a ModelSpec's stage and of a model of transformers have the names of
    the folder, which may store each expert separately. Other modules keep their names. A parameter from which a
    tensor of the folder has to be computed keeps its name in the module. A ModuleList has the stages of this rank, as
    `Trainer.modules` does.
    """
    if isinstance(model, nn.ModuleList):
        return {name: part for stage in model for name, part in stored_parts(stage).items()}
    state = model.state_dict(keep_vars=True)
    naming: Naming | None = getattr(model, "meshcomm_stored", None) or _of_transformers(model)
    # torch.compile puts a module around the model.
    own: dict[str, Any] = {
        name.replace("_orig_mod.", ""): tensor for name, tensor in unfused(state, model).items()
    }
    if naming is None:
        return own
    parts: dict[str, Any] = {}
    known = _CUTS.setdefault(model, {})
    for name, tensor in own.items():
        if not isinstance(tensor, Tensor | Kept):
            parts[name] = tensor
            continue
        shape = tuple(tensor.shape)
        cuts = known[name, shape] = (
            known[name, shape] if (name, shape) in known else cuts_of(naming, name, shape)
        )
        if cuts is None:
            parts[name] = tensor
            continue
        for stored_name, cut in cuts.items():
            whole = cut == Cut((0,) * len(shape), shape, tuple(range(len(shape))))
            part = Cutout(tensor, cut)
            # A rank without the expert does not name it, like a stage without the parameter.
            if whole or part.is_held:
                parts[stored_name] = tensor if whole else part
    return parts


def cuts_of(naming: Naming, name: str, shape: Sequence[int]) -> dict[str, Cut] | None:
    """Return where in a parameter each of its stored tensors lies; None if one of them has to be computed."""
    parameter = torch.empty(shape, device="meta")
    with _Views(), torch.no_grad():
        stored = naming(name, parameter)
    cuts = {stored_name: _cut_of(tensor, parameter) for stored_name, tensor in stored.items()}
    known = {stored_name: cut for stored_name, cut in cuts.items() if cut is not None}
    return known if len(known) == len(cuts) else None


@final
class _Views(TorchFunctionMode):
    """In this context, tensors stay views where a copy would only change the order of memory."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (Tensor.contiguous, Tensor.clone):
            return args[0]
        return function(*args, **(kwargs or {}))


def _cut_of(view: Tensor, whole: Tensor) -> Cut | None:
    """Return where a view lies in a contiguous tensor, or None if it is none."""
    if view.untyped_storage() is not whole.untyped_storage():
        return None
    begin: list[int] = []
    rest = int(view.storage_offset())
    for stride in whole.stride():
        begin.append(rest // stride if stride else 0)
        rest -= begin[-1] * stride
    axes: list[int] = []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        fitting = [axis for axis, other in enumerate(whole.stride()) if other == stride and axis not in axes]
        # Next to an axis of length 1, another axis has the same stride.
        axes.append(min(fitting, key=lambda axis: whole.shape[axis] < size, default=-1))
    end = [at + (view.shape[axes.index(axis)] if axis in axes else 1) for axis, at in enumerate(begin)]
    if -1 in axes or any(at > size for at, size in zip(end, whole.shape, strict=True)):
        return None
    cut = Cut(tuple(begin), tuple(end), tuple(axes))
    same = cut.of(Region(Box.at((0,) * whole.ndim, whole.shape), whole))
    facts = [(x.shape, x.stride(), x.storage_offset()) for x in (view, *([same.held] if same else []))]
    return cut if facts[0] == facts[-1] else None


def _of_transformers(model: Any) -> Naming | None:
    """Return the naming of a model of transformers; None for any other module."""
    library: Any = sys.modules.get("transformers.modeling_utils")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return None
    return lambda name, value: reverted(model, name, value)


def reverted(model: Any, name: str, value: Tensor) -> dict[str, Tensor]:
    """Return the tensors that store a parameter of a model of transformers. If a tensor combines several parameters, the
    parameter keeps its name, which from_pretrained can also read.
    """
    from transformers.core_model_loading import revert_weight_conversion

    with _published(model):
        try:
            stored: dict[str, Tensor] = revert_weight_conversion(model, {name: value})
        except Exception:
            return {name: value}
    return stored


@contextmanager
def _published(model: Any) -> Iterator[None]:
    """In this context, a model has its family's names, and not those of the folder that it was read from, which may be older."""
    own = vars(model).pop("_weight_conversions", None)
    try:
        yield
    finally:
        if own is not None:
            model._weight_conversions = own
