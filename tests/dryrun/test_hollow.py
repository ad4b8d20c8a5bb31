"""Operators on tensors without memory compute nothing, give tensors of torch's sizes, and account for every byte."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshcomm.comm.torch_private import below_autograd
from meshcomm.dryrun.hollow import Hollow
from meshcomm.dryrun.ledger import Ledger
from meshcomm.parallel.torch_private import has_memory


class NoCalls:
    """A program without calls on groups."""

    calls = ()

    def waiting(self) -> Callable[[], None]:
        raise AssertionError


def hollow() -> tuple[Ledger, Hollow]:
    ledger = Ledger(lambda: ("forward 0", True), hollow=True)
    return ledger, Hollow(ledger, NoCalls())


def attended(q: Tensor, k: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, k, is_causal=True)


def reshaped(x: Tensor) -> Tensor:
    # As inside an operator, torch does not decompose this before the mode sees it.
    with below_autograd():
        return x.t().reshape(-1)


OPERATORS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "product": (torch.matmul, ((4, 6), (6, 8))),
    "of a transposed one": (lambda x, y: x.t() @ y, ((6, 4), (6, 8))),
    "broadcast": (torch.add, ((4, 1, 6), (5, 1))),
    "a view": (lambda x: x.view(2, -1)[:, 1:].transpose(0, 1), ((4, 6),)),
    "a copy by reshape": (lambda x: x.t().reshape(-1), ((4, 6),)),
    "a copy by reshape inside an operator": (reshaped, ((4, 6),)),
    "a view by reshape": (lambda x: x.reshape(-1), ((4, 6),)),
    "another dtype": (lambda x: x.to(torch.bfloat16), ((4, 6),)),
    "whole numbers": (lambda x: x.argmax(-1) + 1, ((4, 6),)),
    "a number added": (lambda x: (x.long() + 1, x.long() + 1.0), ((4, 6),)),
    "several": (lambda x: x.topk(2), ((4, 6),)),
    "a list": (lambda x: torch.stack(x.split(2)), ((4, 6),)),
    "in place": (lambda x, y: x.add_(y), ((4, 6), (6,))),
    "into another": (lambda x, y: torch.mul(x, 2, out=y), ((4, 6), (4, 6))),
    "into one of another size": (lambda x, y: torch.mul(x, 2, out=y), ((4, 6), (0,))),
    "attention": (attended, ((1, 2, 8, 4), (1, 2, 8, 4))),
    "bins": (lambda x: torch.bincount((x * 0).long().view(-1), minlength=5), ((4, 6),)),
    "norm": (lambda x: F.layer_norm(x, (6,)), ((4, 6),)),
}


@pytest.mark.parametrize("case", OPERATORS)
def test_results_have_the_size_and_memory_of_real_ones(case: str) -> None:
    function, shapes = OPERATORS[case]
    ledger, mode = hollow()

    def found() -> list[tuple[Any, ...]]:
        given = [torch.ones(shape) for shape in shapes]
        # The second run looks up the results of the first.
        results = [function(*[each.clone() for each in given]) for _ in range(2)]
        flat = torch.utils._pytree.tree_leaves(results)
        assert [has_memory(each) for each in flat] == [not ledger.live] * len(flat)
        sizes = [each.untyped_storage().nbytes() for each in flat]
        return [
            (each.shape, each.stride(), each.dtype, each.storage_offset(), size)
            for each, size in zip(flat, sizes, strict=True)
        ]

    expected = found()
    with mode:
        assert found() == expected


MOVED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]] = {
    # an operator, the shapes of float32 arguments, and the elements that it reads and writes
    "a sum of two": (torch.add, ((8, 6), (8, 6)), 3 * 48),
    "a row to all": (torch.add, ((8, 6), (6,)), 48 + 6 + 48),
    "an expanded one": (lambda x: x.expand(8, 6) + 1, ((1, 6),), 6 + 48),
    "half of one": (lambda x: x[:4].exp(), ((8, 6),), 24 + 24),
    "in place": (lambda x, y: x.add_(y), ((8, 6), (8, 6)), 3 * 48),
    "lists in place": (lambda x, y: torch._foreach_add_([x], [y]), ((8, 6), (8, 6)), 3 * 48),
    "a copy over": (lambda x, y: x.copy_(y), ((8, 6), (8, 6)), 2 * 48),
    "into another": (lambda x, y, z: torch.add(x, y, out=z), ((8, 6), (8, 6), (8, 6)), 3 * 48),
    "zeros over": (lambda x: x.zero_(), ((8, 6),), 48),
    "memory alone": (lambda x: torch.empty_like(x), ((8, 6),), 0),
    "a view": (lambda x: x.t(), ((8, 6),), 0),
    "a product": (torch.matmul, ((4, 6), (6, 8)), 0),
    # Rows of the table, and two float32 for each index of 8 bytes.
    "some rows": (
        lambda x: F.embedding(torch.zeros(2, dtype=torch.int64), x),
        ((100, 6),),
        2 * 12 + 2 * 4 + 4,
    ),
}


@pytest.mark.parametrize("case", MOVED)
def test_an_operator_s_bytes_are_those_of_its_arguments_and_results(case: str) -> None:
    function, shapes, elements = MOVED[case]
    ledger, mode = hollow()
    with mode:
        given = [torch.ones(shape) for shape in shapes]
        ledger.restart()
        function(*given)
    assert ledger.moved == 4 * elements


def test_no_memory_is_taken_and_every_byte_is_accounted_for() -> None:
    ledger, mode = hollow()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with mode:
        weight = torch.empty(1 << 18, 1 << 12, requires_grad=True)
        assert ledger.live == weight.nbytes == 1 << 32
        y = (torch.ones(1 << 12, 1 << 12) @ weight.t()).relu()
        assert ledger.flops == 2 * (1 << 42)
        y.sum().backward()
        assert ledger.flops == 4 * (1 << 42)
        assert weight.grad is not None and weight.grad.shape == weight.shape
        assert not has_memory(weight.grad) and has_memory(torch.empty(3, device="meta")) is True
        kept = ledger.live
        storage = y.untyped_storage()
        storage.resize_(0)
        assert (storage.size(), storage.nbytes()) == (0, 0) and ledger.live == kept - y.nbytes
        storage.resize_(y.nbytes)
        assert storage.size() == y.nbytes and ledger.live == kept
        del storage, y, weight
    assert ledger.live == 0
    # In KiB. The weight alone would need 4 GiB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 19


def test_every_look_at_a_value_is_zero() -> None:
    _, mode = hollow()
    with mode:
        x = torch.arange(3)
        assert x.sum().item() == 0 and not (x == x).all()
        assert x.tolist() == [0, 0, 0]
        assert torch.equal(x, x + 1) and not torch.equal(x, x[:2])
        assert type(x.float()[1].item()) is float
        assert torch.randn(5).to("meta").device.type == "meta"
        with pytest.raises(RuntimeError, match="broadcast"):
            torch.ones(3) + torch.ones(4)
