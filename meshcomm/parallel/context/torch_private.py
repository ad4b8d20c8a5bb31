"""torch's attention kernels that give the log-sum-exp, which its public function keeps to itself. Tried on torch 2.11 to 2.15."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

AttentionKernel: TypeAlias = Literal["cpu", "flash", "efficient"]


def attention_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> AttentionKernel | None:
    """Which of torch's kernels that give the log-sum-exp trains with these; None: none does.

    "cpu": floating point of any width. "flash", "efficient": what torch says of the CUDA device, the dtype and the
    head, and what torch.nn.attention.sdpa_kernel allows; float64 never. cuDNN's is not among them: the shape of its
    log-sum-exp and the layouts that it takes differ between its versions.
    """
    if not q.numel() or not k.numel():
        return None
    if q.device.type == "cpu":
        there = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
        floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        return "cpu" if there and q.dtype in floats else None
    if q.device.type != "cuda":
        return None
    # Some devices run a kernel forward and not backward, which torch only asks for where a gradient is needed.
    with torch.enable_grad():
        leaf = q.detach().requires_grad_()
        if can_use_flash_attention(SDPAParams(leaf, k, v, None, 0.0, causal, True)):
            return "flash"
        keys, values = (x[:, :1].expand(-1, q.shape[1], -1, -1) for x in (k, v))
        if can_use_efficient_attention(SDPAParams(leaf, keys, values, None, 0.0, causal, False)):
            return "efficient"
    return None


def kernel_alignment(device: torch.device) -> int:
    """Elements of whose multiples heads must be, and begin at, for the kernels of a device."""
    return 8 if device.type == "cuda" else 1


def kernel_attention(
    kernel: AttentionKernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and the log-sum-exp of each query's scores, which the public function keeps to itself.

    Heads of q, k and v are as many for "efficient"; so is its log-sum-exp padded at the end, to a multiple of 32.
    """
    aten = torch.ops.aten
    if kernel == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    elif kernel == "flash":
        out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]
    else:
        out, lse = aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, causal, scale=scale
        )[:2]
    return out, lse[..., : q.shape[2]]


def kernel_attention_backward(
    kernel: AttentionKernel,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients for q, k, v; `out` and `lse` may be those over more keys than are in k.

    CUDA's kernels take the layout of out, dout and lse for granted: tokens outside heads, and dense
    (flash_api.cpp, mem_eff_attention/kernel_backward.h). Nothing is dropped, so no random state is read.
    """
    aten = torch.ops.aten
    if kernel == "cpu":
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, causal, scale=scale
        )
        return dq, dk, dv
    dout, out = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (dout, out))
    if kernel == "flash":
        state, unused = (torch.empty(shape, dtype=torch.uint64, device=q.device) for shape in ((2,), ()))
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal,
            state, unused, scale=scale,
        )  # fmt: skip
        return dq, dk, dv
    if torch.version.hip is None:
        # As the forward pass leaves it: rows of a multiple of 32, of which the last say "no query".
        lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
    seed = torch.empty((), dtype=torch.int64, device=q.device)
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        dout, q, k, v, None, out, lse.contiguous(), seed, seed, 0.0, [True, True, True, False], causal,
        scale=scale,
    )  # fmt: skip
    return dq, dk, dv
