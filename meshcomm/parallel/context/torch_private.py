"""torch's attention kernels that also return the log-sum-exp, unlike torch's public function. Tested on torch 2.11 to 2.15."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

AttentionKernel: TypeAlias = Literal["cpu", "flash"]


def attention_kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> AttentionKernel | None:
    """Return the torch kernel that returns the log-sum-exp and supports training with these inputs, or None.

    "cpu": supports all floating-point dtypes. "flash": used if torch supports the CUDA device, the dtype and the head size,
    and if torch.nn.attention.sdpa_kernel allows it. The other CUDA kernels are not used: the layouts of cuDNN's kernel
    change between versions, and the memory-efficient kernel needs as many heads in k and v as in q.
    """
    if not q.numel() or not k.numel():
        return None
    if q.device.type == "cpu":
        has_kernel = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
        floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        return "cpu" if has_kernel and q.dtype in floats else None
    if q.device.type != "cuda":
        return None
    # Some devices support a kernel in forward but not in backward, which torch checks only if a gradient is needed.
    with torch.enable_grad():
        leaf = q.detach().requires_grad_()
        return "flash" if can_use_flash_attention(SDPAParams(leaf, k, v, None, 0.0, causal, True)) else None


def kernel_alignment(device: torch.device) -> int:
    """Return the alignment, in elements, that a device's kernels require for the size and start of a head."""
    return 8 if device.type == "cuda" else 1


def kernel_attention(
    kernel: AttentionKernel, inputs: tuple[Tensor, Tensor, Tensor], causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the attention of `inputs` (q, k and v), and the log-sum-exp of each query's scores."""
    aten = torch.ops.aten
    if kernel == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*inputs, 0.0, causal, scale=scale)
    else:
        out, lse = aten._scaled_dot_product_flash_attention(*inputs, 0.0, causal, scale=scale)[:2]
    return out, lse


def kernel_attention_backward(
    kernel: AttentionKernel,
    inputs: tuple[Tensor, Tensor, Tensor],
    queries: tuple[Tensor, Tensor, Tensor],
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `inputs` (q, k and v). queries: out, lse and dout, which may cover more keys than k contains.

    The CUDA kernel assumes that out, dout and lse are dense, with the token axis outside the head axis (flash_api.cpp). There
    is no dropout, so no random state is read.
    """
    aten, (q, k, v), (out, lse, dout) = torch.ops.aten, inputs, queries
    if kernel == "cpu":
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, causal, scale=scale
        )
        return dq, dk, dv
    dout, out = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (dout, out))
    state, unused = (torch.empty(shape, dtype=torch.uint64, device=q.device) for shape in ((2,), ()))
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal,
        state, unused, scale=scale,
    )  # fmt: skip
    return dq, dk, dv
