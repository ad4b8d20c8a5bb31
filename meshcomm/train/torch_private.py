"""Private torch APIs used for counting FLOPs, tracking operators, and checkpoints. Tested with torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

# The number of the backward pass that runs in this thread, -1 if none; the current pack and unpack hooks of saved tensors.
backward_number: Callable[[], int] = torch._C._current_graph_task_id
_saved_tensor_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks


def recomputes() -> bool:
    """Return whether a forward pass is running inside a backward pass, as in torch.utils.checkpoint.

    The backward computation itself is not recorded for another backward pass, and it saves no tensors.
    """
    return backward_number() != -1 and (torch.is_grad_enabled() or _saved_tensor_hooks(True) is not None)


CHECKSUM: Final = "crc32"
"""The attribute of a tensor part's location that torch's own reader ignores: the CRC-32 of the part's bytes in the file."""


def storage_info(file: str, offset: int, length: int, crc32: int) -> Any:
    """Return the location of a tensor part, in the form that torch's checkpoint reader expects in the metadata."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    info = _StorageInfo(file, offset, length)
    setattr(info, CHECKSUM, crc32)
    return info


def _grouped(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of a grouped matmul.

    If both operands have three axes, there is one matmul per group; otherwise there is a single matmul.
    """
    groups = a.shape[0] if a.ndim == b.ndim == 3 else 1
    return int(2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1])


def _attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of attention's two matrix products.

    The operands have shape (batch, heads, queries or keys, size); k and v may have fewer heads than q.
    """
    return int(2 * q.shape[:3].numel() * k.shape[2] * (q.shape[3] + v.shape[3]))


def _attention_backward(_: Any, q: Any, k: Any, v: Any, *__: Any, **___: Any) -> int:
    """Return the FLOPs of five products: the recomputed scores, and the gradients of scores, q, k and v."""
    return int(2 * q.shape[:3].numel() * k.shape[2] * (3 * q.shape[3] + 2 * v.shape[3]))


# Operators without a formula in some version of torch from 2.11 to 2.15, by name.
_MORE_FLOPS: dict[str, Callable[..., int]] = {
    "aten._grouped_mm": _grouped,
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}


def flops_of(operator: Any) -> Callable[..., int] | None:
    """Return the formula for an operator's FLOPs, a function of its arguments and, as `out_val`, its result.

    Return None if the operator has no FLOPs.
    """
    from torch.utils.flop_counter import flop_registry

    packet = getattr(operator, "_overloadpacket", operator)
    return flop_registry.get(packet) or _MORE_FLOPS.get(str(packet))
