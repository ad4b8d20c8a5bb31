"""Linear layers whose matrix products are in float8, by torchao: train.float8."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor, nn

from meshcomm.errors import ConfigError, UnsupportedOp
from meshcomm.parallel.tensor.layers import ColumnParallel, RowParallel
from meshcomm.parallel.tensor.parameters import local

# The kernels need rows and columns in multiples of 16 elements.
_MULTIPLE: Final = 16
_NEWEST: Final = "a GPU with compute capability 8.9 or newer, such as L40S, H100 or B200"


def to_float8(
    module: nn.Module, recipe: str, device: torch.device, vocab_size: int, *, emulate: bool = False
) -> list[str]:
    """Make the linear layers of `module` multiply in float8, in forward and backward, and return their names. Weights, their
    gradients, outputs and messages keep their dtype.

    Left out are layers of which this rank has a part with a size that is not a multiple of 16, the head (a layer with `vocab_size`
    outputs), and routers. A split layer scales its own part of the weight.

    recipe: of torchao: "tensorwise" or "rowwise". emulate: whether to compute in float32 what float8 would round; for tests.
    Called by: each rank, before the module is sharded.
    Raises: ConfigError without torchao; UnsupportedOp on a device without float8 kernels, or if no layer is left.
    """
    if find_spec("torchao") is None:
        raise ConfigError(
            "float8 needs torchao, which is not installed",
            given=f"train.float8 = {recipe!r}",
            expected="torchao 0.18 or later",
            hint="pip install 'meshcomm[float8]'",
        )
    if not emulate and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9)):
        given = torch.cuda.get_device_name(device) if device.type == "cuda" else f"device {device}"
        raise UnsupportedOp(
            "this device cannot multiply in float8",
            given=f"train.float8 = {recipe!r} on {given}",
            expected=_NEWEST,
            hint="remove train.float8, and keep train.compute_dtype",
        )
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    # Of no size: its weight is given with each product.
    template = convert_to_float8_training(nn.Linear(1, 1, bias=False, device="meta"), config=config)
    fitting = {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, (nn.Linear, ColumnParallel, RowParallel)) and _fits(name, part, vocab_size)
    }
    split = {name for name, part in fitting.items() if isinstance(part, (ColumnParallel, RowParallel))}
    for name in split:
        fitting[name].meshcomm_product = partial(_product, template)
    swapped = fitting.keys() - split
    convert_to_float8_training(module, module_filter_fn=lambda _, name: name in swapped, config=config)
    if not fitting:
        raise UnsupportedOp(
            "this model has no linear layers that can multiply in float8",
            given=f"train.float8 = {recipe!r}",
            expected="a layer of which each rank has a part with sizes in multiples of 16, besides the head and routers",
            hint="remove train.float8",
        )
    return list(fitting)


def _fits(name: str, part: Any, vocab_size: int) -> bool:
    sizes = local(part.weight).shape
    is_router = name.rpartition(".")[2] in ("gate", "router")
    is_head = part.weight.shape[0] == vocab_size
    return not is_router and not is_head and all(size % _MULTIPLE == 0 for size in sizes)


def _product(template: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y: Tensor = torch.func.functional_call(template, {"weight": weight}, (x,))
    return y if bias is None else y + bias.to(y.dtype)


def check_tokens(tokens: int) -> None:
    """Raise UnsupportedOp if a microbatch on this rank has a number of tokens that float8 kernels do not take."""
    if tokens % _MULTIPLE:
        raise UnsupportedOp(
            "float8 takes tokens in multiples of 16",
            given=f"{tokens} tokens of a microbatch on each rank",
            expected="train.micro_batch_size * data.seq_len, divided by the size of parallel.context, in multiples of 16",
            hint="data.seq_len = 128; or remove train.float8",
        )
