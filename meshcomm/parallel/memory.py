"""A model's memory: modules are built, split and sharded before any of their values exist, and cast to one dtype."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from meshcomm.config import TrainConfig
from meshcomm.errors import UnsupportedOp
from meshcomm.layout.names import listed

_ALONE = threading.RLock()


@contextmanager
def on_meta() -> Iterator[None]:
    """In this context, the parameters of new modules move to the meta device when they are registered. Buffers keep their
    values.

    A constructor's initial values are discarded. At most one of this thread's parameters has memory at a time, and that memory
    is never touched. A parameter for which the host has no memory is created on the meta device. Only one thread can be in
    this context at a time.
    """
    register = nn.Module.register_parameter
    thread = threading.get_ident()

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta and threading.get_ident() == thread:
            module._parameters[name] = _like(parameter, parameter.detach().to("meta"))

    with _ALONE, patch.object(nn.Module, "register_parameter", registered), _MetaWhereRefused():
        yield


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """In this context, the CPU's default generator starts from `seed`. It is restored afterwards. Only one thread can be in
    this context at a time.
    """
    with _ALONE, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def without_values(module: nn.Module) -> nn.Module:
    """Move the parameters of `module` to the meta device, in place, and return it. Shared parameters stay shared."""
    meta_of: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in meta_of:
                    meta_of[id(parameter)] = _like(parameter, parameter.detach().to("meta"))
                part._parameters[name] = meta_of[id(parameter)]
    return module


class _MetaWhereRefused(TorchFunctionMode):
    """Creates an uninitialized tensor on the meta device if the host has no memory for it, as can happen with a layer's
    experts."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        try:
            return func(*args, **named)
        except RuntimeError:
            if func is not torch.empty or named.get("device") is not None:
                raise
            return func(*args, **{**named, "device": "meta"})


def materialise(module: nn.Module, device: torch.device) -> None:
    """Allocate uninitialized memory on `device` for the parameters of `module` that are on the meta device.

    A parameter that fully_shard has sharded gets memory for this rank's shard. Shared parameters stay shared.
    """
    allocated: dict[int, nn.Parameter] = {}
    plain: dict[tuple[nn.Module, str], nn.Parameter | None] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if not isinstance(parameter, DTensor):
                if parameter is not None and parameter.is_meta and id(parameter) not in allocated:
                    allocated[id(parameter)] = _like(parameter, torch.empty_like(parameter, device=device))
                plain[part, name] = allocated.get(id(parameter), parameter)
    # Plain parameters are removed meanwhile: torch would swap them too, and fail for a parameter with other references.
    for part, name in plain:
        part._parameters[name] = None
    try:
        # torch swaps the contents of DTensors in place, and informs FSDP.
        module._apply(lambda x: torch.empty_like(x, device=device) if x.is_meta else x)
    finally:
        for (part, name), parameter in plain.items():
            part._parameters[name] = parameter
    for part in module.modules():
        if isinstance(part, nn.RNNBase):
            # It keeps a second list of its parameters, which this renews.
            part._apply(lambda x: x)


def cast(module: nn.Module, dtype: torch.dtype, device: torch.device | None = None) -> None:
    """Cast all floating-point parameters and buffers to `dtype`, in place. For float64, complex parameters become complex128.

    Other complex tensors, such as rotary tables, keep their dtype: `module.to(dtype)` would drop their imaginary parts.
    """
    learned = {
        id(parameter)
        for parameter in module.parameters()
        if parameter.is_complex() and dtype == torch.float64
    }

    def as_cast(x: Tensor) -> Tensor:
        other_dtype = torch.complex128 if id(x) in learned else x.dtype
        return x.to(device=device, dtype=dtype if x.is_floating_point() else other_dtype)

    module._apply(as_cast)


def check_cast(module: nn.Module, train: TrainConfig) -> None:
    """Raise UnsupportedOp if `cast` to train.dtype would change what the module computes without being asked for.

    A module in one shorter dtype is cast to train.dtype, as every master weight is.
    """
    held: dict[torch.dtype, list[str]] = {}
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point():
            held.setdefault(parameter.dtype, []).append(name)
    kinds = "; ".join(f"{str(kind).removeprefix('torch.')}: {listed(names)}" for kind, names in held.items())
    way = {"float32": "module.float()", "float64": "module.double()"}[train.dtype]
    if len(held) > 1:
        raise UnsupportedOp(
            "the parameters of this module have different dtypes, and training would cast all to train.dtype",
            given=f"{kinds}; train.dtype = {train.dtype!r}",
            expected="parameters of one dtype. train.compute_dtype sets the dtype of matrix products",
            hint=f"{way} before the module is given to the Trainer, if all may be {train.dtype}",
        )
    if torch.float64 in held and train.dtype != "float64" and not train.given("dtype"):
        raise UnsupportedOp(
            "this module has float64 parameters, and training would round them to float32",
            given=f"{kinds}; train.dtype is not set, which is {train.dtype!r}",
            expected="train.dtype",
            hint=f'train.dtype = "float64", or train.dtype = {train.dtype!r} to round them',
        )


def _like(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    copy = nn.Parameter(data, parameter.requires_grad)
    copy.__dict__.update(parameter.__dict__)
    return copy


# -- modes -----------------------------------------------------------------------------------------


def to_train_mode(module: nn.Module) -> None:
    """Put a module into train mode, as torch programs do before they train.

    Not from_pretrained's eval mode. A part that is in eval mode inside a module in train mode stays so. A train method of the
    module's own may keep parts in eval mode.
    """
    if not module.training or type(module).train is not nn.Module.train:
        module.train()


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """In this context, the module is in eval mode. Each of its parts then returns to its own mode, which may be permanent."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training
