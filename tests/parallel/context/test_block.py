"""Ring attention with CUDA's kernels on a machine without CUDA: stand-ins read memory as the kernels do."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import meshcomm
from meshcomm.mesh import Mesh
from meshcomm.parallel.context import block, ring_attention, torch_private
from meshcomm.parallel.context.block import (
    Queries,
    attend_block,
    block_gradients,
    plain_attention,
    plain_gradients,
)
from meshcomm.transport.torch_private import DispatchMode
from tests.parallel.context.test_ring import SEQUENCE, draw, farthest, one_process, split_up

pytestmark = pytest.mark.long

FLASH = "aten._scaled_dot_product_flash_attention.default"
FLASH_BACK = "aten._scaled_dot_product_flash_attention_backward.default"
HALVES = (torch.float16, torch.bfloat16)

# -- stand-ins: sizes, strides and padding as in torch's flash_api.cpp ----------------------------------


class StandIns(DispatchMode):  # type: ignore[misc]
    """Compute what CUDA's kernels compute, by the formula, on CPU tensors and from the memory that the kernels would read."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = {FLASH: forward, FLASH_BACK: backward}
        if str(op) not in call:
            return op(*args, **(kwargs or {}))
        self.seen.add(str(op))
        return call[str(op)](**complete(op, args, kwargs))


def complete(op: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """All arguments of a call by name. The dispatcher omits trailing arguments that have their default values."""
    known = op._schema.arguments
    given = dict(zip((each.name for each in known), args, strict=False)) | (kwargs or {})
    return {each.name: given.get(each.name, each.default_value) for each in known}


def wide(*tensors: Tensor) -> list[Tensor]:
    return [x.double() for x in tensors]


def tokens_first(x: Tensor) -> Tensor:
    """The same tensor in the kernels' memory layout: (batch, tokens, heads, head)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def checked(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    for x in (q, k, v):
        assert x.dtype == q.dtype and x.stride(-1) == 1 and x.shape[-1] % 8 == 0
        assert not any(place % 8 for place in (*x.stride()[:-1], x.storage_offset()))
    assert k.shape == v.shape and (q.shape[2] == k.shape[2] or not causal)
    assert q.shape[1] % k.shape[1] == 0


def forward(query: Tensor, key: Tensor, value: Tensor, **rest: Any) -> tuple[Any, ...]:
    assert rest["dropout_p"] == 0.0 and query.dtype in HALVES
    checked(query, key, value, rest["is_causal"])
    out, lse = plain_attention(*wide(query, key, value), rest["is_causal"], rest["scale"])
    none = torch.empty(0)
    return tokens_first(out.to(query.dtype)), lse.float(), none, none, 0, 0, none, none, none


def backward(query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, **rest: Any) -> Any:
    dout = rest["grad_out"]
    checked(query, key, value, rest["is_causal"])
    assert dout.dtype == out.dtype == query.dtype and logsumexp.dtype == torch.float32
    assert rest["dropout_p"] == 0.0
    batch, heads, s, _ = query.shape
    assert (rest["cum_seq_q"], rest["cum_seq_k"]) == (None, None)
    assert (rest["max_q"], rest["max_k"]) == (s, key.shape[2])
    assert rest["philox_seed"].shape == (2,) and rest["philox_seed"].dtype == torch.uint64
    # The kernel gets only a pointer, so it reads each head's rows as contiguous.
    logsumexp = logsumexp.as_strided((batch, heads, s), (heads * s, s, 1))
    queries = Queries(*wide(query, out, logsumexp, dout))
    found = plain_gradients(queries, *wide(key, value), rest["is_causal"], rest["scale"])
    return tuple(tokens_first(x.to(query.dtype)) for x in found)


@pytest.fixture
def stood_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Select the kernel as on a CUDA device. Ranks switch the stand-ins on themselves."""
    monkeypatch.setattr(block, "attention_kernel", lambda *_: "flash")
    monkeypatch.setattr(block, "kernel_alignment", lambda device: 8)


CASES = [*product(("zigzag", "contiguous"), (True, False), ((12, 12), (12, 2), (6, 1)))]


def by_kernels(mesh: Mesh, dtype: torch.dtype) -> tuple[list[tuple[Any, float, float]], set[str]]:
    """The errors against float64 of the ring, and of torch's own attention in `dtype` on one process."""
    errors = []
    with StandIns() as mode:
        for order, causal, heads in CASES:
            whole = draw(*heads, dtype)
            exact = one_process(*wide(*whole), causal, 0.4)
            alone = farthest(one_process(*whole, causal, 0.4), exact)
            found = split_up(mesh, "cp", ring_attention, order, whole, causal=causal, scale=0.4)
            errors.append(((order, causal, heads), farthest(found, exact), alone))
    return errors, mode.seen


@pytest.mark.usefixtures("stood_in")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("n", [2, 3])
def test_the_ring_by_kernels_is_attention_of_the_whole(dtype: torch.dtype, n: int) -> None:
    for errors, seen in meshcomm.simulate(by_kernels, dims={"cp": n}, args=(dtype,)):
        assert seen == {FLASH, FLASH_BACK}
        assert len(errors) == len(CASES)
        # Each block's result and gradients are rounded before they are summed: n roundings instead of one.
        assert [case for case, error, alone in errors if not error < 3 * alone] == []


@pytest.mark.usefixtures("stood_in")
@pytest.mark.parametrize(("s", "t", "head"), [(33, 33, 8), (64, 32, 16), (5, 7, 6), (31, 31, 1)])
def test_padding_strides_and_offsets(s: int, t: int, head: int) -> None:
    """Extra rows in the log-sum-exp, head sizes that are no multiple of 8, views of larger tensors, gaps between heads."""
    torch.manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(torch.bfloat16)

    # Aligned except for the storage offset.
    flat = (random(3 + 2 * s * 6 * head)[3:] for _ in range(3))
    q, dout, out = (x.view(2, s, 6, head).transpose(1, 2) for x in flat)
    k, v = random(2, 2, 2, t, head + 1)[..., 1:].unbind()
    lse = torch.randn(2, 6, s + 5)[..., 5:] + math.log(t)
    for causal in (True, False) if s == t else (False,):
        with StandIns():
            found = [*attend_block(q, k, v, causal, 0.3)]
            found += block_gradients(Queries(q, out, lse, dout), k, v, causal, 0.3)
        exact = [*plain_attention(*wide(q, k, v), causal, 0.3)]
        exact += plain_gradients(Queries(*wide(q, out, lse, dout)), *wide(k, v), causal, 0.3)
        for mine, wanted in zip(found, exact, strict=True):
            # With few keys, the weights may be far above 1, because lse is random instead of computed.
            room = 8 * torch.finfo(torch.bfloat16).eps * max(1.0, wanted.abs().max().item())
            assert mine.shape == wanted.shape and farthest([mine], [wanted]) < room


# -- memory, and the inputs of the CPU kernel ------------------------------------------------------------------


class Largest(DispatchMode):  # type: ignore[misc]
    """Record the element count of the largest tensor that an operator allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = op(*args, **(kwargs or {}))
        for each in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(each, Tensor) and each._base is None:
                self.found = max(self.found, each.numel())
        return made


def test_the_formula_holds_few_scores_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, dout = draw(12, 2)
    lse = torch.randn(q.shape[:3], dtype=torch.float64) + 3
    for causal in (True, False):
        at_once = [
            *plain_attention(q, k, v, causal, 0.4),
            *plain_gradients(Queries(q, q, lse, dout), k, v, causal, 0.4),
        ]
        monkeypatch.setattr(block, "_SCORES", 5 * 2 * 12 * SEQUENCE)
        with Largest() as largest:
            some = [
                *plain_attention(q, k, v, causal, 0.4),
                *plain_gradients(Queries(q, q, lse, dout), k, v, causal, 0.4),
            ]
        monkeypatch.undo()
        assert farthest(some, at_once) < 1e-12
        assert largest.found == max(5 * 2 * 12 * SEQUENCE, q.numel())


def test_what_the_kernel_for_cpus_takes() -> None:
    q = torch.empty(1, 2, 8, 16)
    assert torch_private.attention_kernel(q, q, q, True) == "cpu"
    assert torch_private.attention_kernel(q.long(), q.long(), q.long(), True) is None
    assert torch_private.attention_kernel(q[:, :, :0], q, q, False) is None
