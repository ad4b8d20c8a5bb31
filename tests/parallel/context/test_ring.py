"""Attention over a split sequence is attention over the whole one: results, gradients, balance, errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import meshcomm
from meshcomm.comm import Handle
from meshcomm.errors import ShapeError, UnknownDim, UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.parallel.context import (
    ContextSplit,
    gather_sequence,
    ring,
    ring_attention,
    sequence_positions,
    split_sequence,
    ulysses_attention,
)
from meshcomm.parallel.context.block import (
    Queries,
    attend_block,
    block_gradients,
    plain_attention,
    plain_gradients,
)
from meshcomm.parallel.tensor.split import wide_dtype

pytestmark = pytest.mark.long

Attend = Callable[..., Tensor]
KINDS: dict[str, Attend] = {"ring": ring_attention, "ulysses": ulysses_attention}
BATCH, SEQUENCE, HEAD = 2, 24, 6


def draw(heads: int, kv_heads: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v and the gradient of the result, of the whole sequence."""
    made = torch.Generator().manual_seed(heads * 100 + kv_heads)
    return [
        torch.randn(BATCH, count, SEQUENCE, HEAD, generator=made, dtype=torch.float64).to(dtype)
        for count in (heads, kv_heads, kv_heads, heads)
    ]


def one_process(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    causal: bool,
    scale: float | None,
    window: int | None = None,
) -> list[Tensor]:
    """The result and the gradients of q, k and v: torch's attention on the whole sequence in one process."""
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    seen = {"is_causal": causal} if window is None else {"attn_mask": pairs_within(q.shape[2], window)}
    out = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True, **seen)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def pairs_within(sequence: int, window: int) -> Tensor:
    """A causal mask: each query sees the last `window` keys up to its own position."""
    return torch.ones(sequence, sequence, dtype=torch.bool).tril().triu(1 - window)


def split_up(
    mesh: Mesh, dim: str, attend: Attend, order: Any, whole: list[Tensor], **how: Any
) -> list[Tensor]:
    """The result and the gradients of `attend` on split sequences, gathered."""
    q, k, v, dout = (split_sequence(x, 2, mesh, dim, order) for x in whole)
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    how |= {"order": order} if attend is ring_attention else {}
    out = attend(mesh, dim, q, k, v, **how)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    assert out.dtype == q.dtype
    return [gather_sequence(x.detach(), 2, mesh, dim, order) for x in (out, *gradients)]


def farthest(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max((a.double() - b.double()).abs().max().item() for a, b in zip(found, wanted, strict=True))


ORDERS = (("ring", "zigzag"), ("ring", "contiguous"), ("ulysses", "contiguous"))
CASES = [
    (kind, order, causal, heads, kv_heads, scale)
    for (kind, order), causal in product(ORDERS, (True, False))
    for heads, kv_heads, scale in ((12, 12, None), (12, 2, 0.7), (12, 1, None))
]


def every_case(mesh: Mesh) -> list[tuple[Any, float]]:
    found = []
    for kind, order, causal, heads, kv_heads, scale in CASES:
        whole = draw(heads, kv_heads)
        mine = split_up(mesh, "cp", KINDS[kind], order, whole, causal=causal, scale=scale)
        error = farthest(mine, one_process(*whole, causal, scale))
        found.append(((kind, order, causal, heads, kv_heads), error))
    return found


@pytest.mark.parametrize("n", [1, 3, 4])
def test_split_attention_is_that_of_one_process(n: int) -> None:
    # Values are about 1. Sums of 24 terms in another order differ by a few 1e-15.
    for found in meshcomm.simulate(every_case, dims={"cp": n}):
        assert len(found) == 18
        assert [case for case, error in found if not error < 1e-12] == []


def every_window(mesh: Mesh) -> list[tuple[Any, float]]:
    found = []
    for window in (*range(1, 14), 18, 23, 24, 99):
        whole = draw(12, 2)
        mine = split_up(mesh, "cp", ulysses_attention, "contiguous", whole, window=window)
        found.append((window, farthest(mine, one_process(*whole, True, None, window))))
    return found


@pytest.mark.parametrize("n", [1, 2, 6])
def test_windows_are_those_of_one_process(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    if n == 1:
        monkeypatch.setattr("meshcomm.parallel.context.block._ROWS", 3)  # computed in parts
    for found in meshcomm.simulate(every_window, dims={"cp": n}):
        assert [case for case, error in found if not error < 1e-12] == []


SINKS = torch.linspace(-1, 1, 12, dtype=torch.float64)


def capped(q: Tensor, k: Tensor, v: Tensor, heads: slice) -> Tensor:
    """Causal attention that a model defines: scores are capped, and each head has a sink."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.tanh(q @ k.mT)
    scores = scores.masked_fill(~pairs_within(q.shape[2], SEQUENCE), -torch.inf)
    sinks = SINKS[heads].view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v


def by_capped(mesh: Mesh) -> list[float]:
    found = []
    for kv_heads in (12, 2, 1):
        whole = draw(12, kv_heads)
        q, k, v = (x.clone().requires_grad_() for x in whole[:3])
        out = capped(q, k, v, slice(0, 12))
        expected = [out.detach(), *torch.autograd.grad(out, (q, k, v), whole[3])]
        mine = split_up(mesh, "cp", ulysses_attention, "contiguous", whole, by=capped)
        found.append(farthest(mine, expected))
    q, k, v, _ = (split_sequence(x, 2, mesh, "cp", "zigzag") for x in draw(12, 12))
    if mesh.size("cp") > 1:
        with pytest.raises(UnsupportedOp, match=r"does not support a model's own attention(.|\n)*ulysses"):
            ContextSplit(mesh, "cp", "ring").attend(q, k, v, by=capped)
    else:
        alone = ContextSplit(mesh, "cp", "ring").attend(q, k, v, by=capped)
        assert torch.equal(alone, capped(q, k, v, slice(0, 12)))
    return found


@pytest.mark.parametrize("n", [1, 2, 4])
def test_attention_of_a_models_own_has_whole_sequences_and_some_heads(n: int) -> None:
    for found in meshcomm.simulate(by_capped, dims={"cp": n}):
        assert max(found) < 1e-12


# -- precision ---------------------------------------------------------------------------------


def narrow(mesh: Mesh, dtype: torch.dtype, autocast: bool) -> list[float]:
    whole = draw(4, 2, dtype)
    given = [x.float() for x in whole[:3]] + whole[3:] if autocast else whole
    wanted = one_process(*(x.double() for x in whole), True, None)
    errors = []
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        for attend in KINDS.values():
            order: Any = "zigzag" if attend is ring_attention else "contiguous"
            q, k, v, dout = (split_sequence(x, 2, mesh, "cp", order) for x in given)
            q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
            out = attend(mesh, "cp", q, k, v)
            assert out.dtype == dtype
            gradients = torch.autograd.grad(out, (q, k, v), dout)
            assert [x.dtype for x in gradients] == [given[0].dtype] * 3
            parts = [split_sequence(x, 2, mesh, "cp", order) for x in wanted]
            errors.append(farthest([out.detach(), *gradients], parts))
    return errors


@pytest.mark.parametrize(
    ("dtype", "autocast", "bound"),
    [(torch.float32, False, 1e-5), (torch.bfloat16, False, 0.05), (torch.bfloat16, True, 0.05)],
)
def test_narrow_dtypes(dtype: torch.dtype, autocast: bool, bound: float) -> None:
    # A few units in the last place, 2^-23 and 2^-8, of values up to 4.
    whole = draw(4, 2, dtype)
    plain = farthest(one_process(*whole, True, None), one_process(*(x.double() for x in whole), True, None))
    for errors in meshcomm.simulate(narrow, dims={"cp": 4}, args=(dtype, autocast)):
        assert all(error < min(bound, 3 * plain) for error in errors)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("causal", "keys"), [(True, 10), (False, 6)])
def test_blocks_by_kernel_and_by_formula(dtype: torch.dtype, causal: bool, keys: int, strided: bool) -> None:
    torch.manual_seed(0)
    q, dout = torch.randn(2, BATCH, 6, 10, HEAD).to(dtype)
    k, v = torch.randn(2, BATCH, 2, keys, HEAD).to(dtype)
    if strided:
        # torch.cat can leave this layout for heads of 2 elements; torch's kernel would read the wrong memory.
        q, k, v, dout = (x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v, dout))
        assert q.stride(-1) != 1
    out, lse = plain_attention(q, k, v, causal, 0.3)
    assert out.dtype == lse.dtype == wide_dtype(dtype)
    # Other blocks have keys too, so the denominator is larger than this block's.
    queries = Queries(q, (0.7 * out).to(dtype), lse + 0.4, dout)
    double = Queries(*(x.double() for x in queries))
    bound = 1e-12 if dtype == torch.float64 else 8 * torch.finfo(dtype).eps
    assert farthest(list(attend_block(q, k, v, causal, 0.3)), [out, lse]) < bound
    exact = plain_gradients(double, k.double(), v.double(), causal, 0.3)
    for gradients in (block_gradients, plain_gradients):
        assert farthest(list(gradients(queries, k, v, causal, 0.3)), list(exact)) < bound


def test_the_formula_carries_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "attend_block", plain_attention)
    monkeypatch.setattr(ring, "block_gradients", plain_gradients)
    for found in meshcomm.simulate(every_case, dims={"cp": 2}):
        assert all(error < 1e-12 for _, error in found)


# -- who computes what, when -------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("causal", [True, False])
def test_blocks_cover_each_pair_once(n: int, order: Any, causal: bool) -> None:
    length = 4
    counted = torch.zeros(n * length, n * length, dtype=torch.int64)
    area = torch.zeros(n, n)
    for coord, turn in product(range(n), range(n)):
        here: Any = SimpleNamespace(size=lambda _: n, coord=lambda _, coord=coord: coord)
        if block := ring._Ring("", here, "cp", causal, order).block(turn, length, length):
            queries, keys, masked = block
            mine = sequence_positions(n * length, n, coord, order)[queries]
            theirs = sequence_positions(n * length, n, (coord - turn) % n, order)[keys]
            pairs = torch.ones(len(mine), len(theirs), dtype=torch.int64)
            area[coord, turn] += pairs.numel() / (2 if masked else 1)
            counted[mine[:, None], theirs] += pairs.tril() if masked else pairs
    wanted = torch.ones_like(counted)
    assert torch.equal(counted, wanted.tril() if causal else wanted)
    if causal and order == "zigzag":
        assert (area == length * length / 2).all()


def both_ways(mesh: Mesh) -> None:
    q, k, v, dout = (split_sequence(x, 2, mesh, "cp", "zigzag") for x in draw(2, 1))
    ring_attention(mesh, "cp", q.requires_grad_(), k, v).backward(dout)


def test_the_next_block_is_under_way_while_one_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn computes only the half of a rank's pairs that a causal mask leaves."""
    events: dict[int, list[Any]] = {}

    def noted(owner: Any, name: str, event: Any) -> None:
        known = getattr(owner, name)

        def call(*args: Any, **more: Any) -> Any:
            events.setdefault(threading.get_ident(), []).append(event(*args))
            return known(*args, **more)

        monkeypatch.setattr(owner, name, call)

    def pairs(*args: Any) -> float:
        q, k = getattr(args[0], "q", args[0]), args[1]
        return float(q.shape[2] * k.shape[2] / (2 if args[3] else 1))

    noted(ring, "attend_block", pairs)
    noted(ring, "block_gradients", pairs)
    noted(Mesh, "exchange", lambda *_: "start")
    noted(Handle, "wait", lambda *_: "wait")
    meshcomm.simulate(both_ways, dims={"cp": 3})
    half = (SEQUENCE // 3) ** 2 / 2
    forward = ["start", half, "wait"] * 2 + [half]
    # Each turn starts with the exchange of keys and values and ends with the wait for it. In between, their gradients
    # arrive while one block is computed, and are sent on while the next one is.
    backward = ["start", half, "start", "wait", "start", half, "wait", "start", "wait"]
    backward += [half, "wait", "start", "wait"]
    assert list(events.values()) == [forward + backward] * 3


# -- errors ------------------------------------------------------------------------------------


def refusals(mesh: Mesh) -> None:
    def x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    good = x(1, 6, 4, 2)
    wrong: list[tuple[Attend, tuple[Tensor, Tensor, Tensor], dict[str, Any], str]] = [
        (ring_attention, (good[0], good, good), {}, "do not fit together"),
        (ring_attention, (good, good, good[..., :1]), {}, "do not fit together"),
        (ring_attention, (good, x(2, 6, 4, 2), x(2, 6, 4, 2)), {}, "do not fit together"),
        (ring_attention, (good, good[:, :4], good[:, :4]), {}, "a multiple of 4 heads in q, got 6"),
        (ring_attention, (good, good[:, :0], good[:, :0]), {}, "expected: a head in k and v"),
        (ring_attention, (good, good.double(), good), {}, "need one floating-point dtype"),
        (ring_attention, (good.long(),) * 3, {}, "need one floating-point dtype"),
        (ring_attention, (good, good[:, :, :2], good[:, :, :2]), {}, "q and k have different lengths"),
        (
            ulysses_attention,
            (good, good[:, :, :2], good[:, :, :2]),
            {"causal": False},
            "have different lengths",
        ),
        (ring_attention, (good[:, :, :3],) * 3, {}, "an even number of tokens on each rank"),
        (ulysses_attention, (good,) * 3, {}, "a multiple of 4 heads; 6 % 4 = 2"),
        (ulysses_attention, (good,) * 3, {}, "1 or 2 or 3 along cp, or ring_attention"),
        (ring_attention, (good.to("meta"),) * 3, {}, "cannot carry this tensor"),
        (ulysses_attention, ([0.0], good, good), {}, "was given a list"),  # type: ignore[list-item]
    ]
    for attend, tensors, how, text in wrong:
        with pytest.raises(ShapeError, match=text):
            attend(mesh, "cp", *tensors, **how)
    with pytest.raises(UnsupportedOp, match="order 'natural'"):
        ring_attention(mesh, "cp", good, good, good, order="natural")  # type: ignore[arg-type]
    with pytest.raises(UnknownDim):
        ring_attention(mesh, "nowhere", good, good, good)
    with pytest.raises(ShapeError) as raised:
        ring_attention(mesh, "cp", good[:, :, :3], good[:, :, :3], good[:, :, :3])
    assert str(raised.value).splitlines() == [
        f'ring_attention along "cp" on {mesh.label}: an odd number of tokens cannot be divided into the two chunks of a zig-zag',
        "  given:    q (1, 6, 3, 2), k (1, 6, 3, 2), v (1, 6, 3, 2)",
        "  expected: an even number of tokens on each rank",
        '  try:      a sequence length that is a multiple of 8, or order="contiguous", as in ContextSplit(mesh, dim, "ulysses")',
    ]
    with pytest.raises(ShapeError, match=r"split_sequence along .* has no axis 2"):
        split_sequence(x(4, 4), 2, mesh, "cp", "contiguous")
    with pytest.raises(ShapeError, match="a multiple of 4; 6 % 4 = 2"):
        split_sequence(x(6), 0, mesh, "cp", "contiguous")
    with pytest.raises(ShapeError, match="12 % 8 = 4"):
        gather_sequence(x(3), 0, mesh, "cp", "zigzag")


def no_windows(mesh: Mesh) -> None:
    q = torch.zeros(1, 2, 4, 8)
    for attend in (ring_attention, ulysses_attention):
        with pytest.raises(UnsupportedOp, match=r"attention along .*the window is invalid(.|\n)*window=0"):
            attend(mesh, "cp", q, q, q, window=0)
    for dim in (None, "cp"):
        with pytest.raises(UnsupportedOp, match="window=2, causal=False"):
            ContextSplit(mesh, dim).attend(q, q, q, causal=False, window=2)
    assert torch.equal(ring_attention(mesh, "cp", q, q, q, window=8), ring_attention(mesh, "cp", q, q, q))
    with pytest.raises(
        UnsupportedOp,
        match=r"does not support a sliding window(.|\n)*window=7, 2 ranks of 4 tokens(.|\n)*ulysses",
    ):
        ring_attention(mesh, "cp", q, q, q, window=7)


def test_windows_that_are_none_are_refused() -> None:
    meshcomm.simulate(no_windows, dims={"cp": 2})


def test_what_does_not_fit_is_refused() -> None:
    meshcomm.simulate(refusals, dims={"cp": 4})
