"""Layers of one's own, split along a dim, and the loss on split logits."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import profile

import meshcomm
from meshcomm.errors import ShapeError, UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.mesh.stats import Stats
from meshcomm.parallel.tensor import (
    ColumnParallel,
    RowParallel,
    TensorSplit,
    VocabParallelEmbedding,
    assign,
    columns,
    cross_entropy,
    local,
    whole,
)
from meshcomm.parallel.tensor import layers as tensor_layers
from tests.parallel.same import close, part, randn
from tests.parallel.tensor.test_apply import IDS, TARGETS, TOKENS, VOCAB, WIDTH


class Norm(nn.Module):
    def __init__(self, split: TensorSplit) -> None:
        super().__init__()
        self.weight = split.parameter(WIDTH, axis=None)
        split.partial(self, "weight")

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return F.rms_norm(x, (WIDTH,), weight)


class Own(nn.Module):
    def __init__(self, split: TensorSplit) -> None:
        super().__init__()
        self.split = split
        self.embed = VocabParallelEmbedding(split, VOCAB, WIDTH)
        self.norm = Norm(split)
        self.a = ColumnParallel(split, WIDTH, 32, bias=True)
        self.b = ColumnParallel(split, WIDTH, 32)
        self.out = RowParallel(split, 32, WIDTH, bias=True)
        self.alike = nn.Parameter(torch.full((TOKENS, 1), 0.5, dtype=torch.float64))
        self.head = ColumnParallel(split, WIDTH, VOCAB)
        for number, p in enumerate(self.parameters()):
            assign(p, randn(*p.shape, seed=number))

    def forward(self, ids: Tensor) -> Tensor:
        split = self.split
        x = self.embed(ids)
        places = split.positions(x.shape[1])
        x = x * (1 + 0.1 * places[:, None])
        y = split.enter(self.norm(x))
        x = x + self.out(F.silu(self.a(y)) * self.b(y))
        # A part that needs the whole sequence, computed identically on every rank.
        x = x + split.scatter((split.gather(x) * self.alike).cumsum(1))
        return cast(Tensor, self.head(split.enter(x)))


def own_layers(mesh: Mesh, sequence: bool) -> None:
    found = []
    for dim in (None, "tp"):
        split = TensorSplit(mesh, dim, torch.float64, sequence)
        module = Own(split)
        cross_entropy(split, module(IDS), TARGETS).backward()
        split.finish_gradients(module)
        assert len(split.partial_parameters(module)) == (2 if sequence and dim else 0)
        found.append({name: whole(cast(Tensor, p.grad)) for name, p in module.named_parameters()})
    for name, expected in found[0].items():
        close(found[1][name], expected, name)


@pytest.mark.parametrize(("size", "sequence"), [(2, False), (4, True)])
def test_own_layers_with_the_sequence_split(size: int, sequence: bool) -> None:
    meshcomm.simulate(own_layers, dims={"tp": size}, args=(sequence,))


def sent(mesh: Mesh, before: Stats) -> Counter[str]:
    """The bytes sent by each kind of call, blocking or not."""
    found: Counter[str] = Counter()
    for row in mesh.stats().since(before).rows:
        found[row.call] += row.nbytes
    return found


def narrow(mesh: Mesh, sequence: bool) -> None:
    """Under autocast, (2, 8, 16) travels in bfloat16: 512 bytes, forward and backward. An embedding keeps the dtype it is given."""
    split = TensorSplit(mesh, "tp", sequence_parallel=sequence)
    up, down = ColumnParallel(split, 16, 32), RowParallel(split, 32, 16)
    table = VocabParallelEmbedding(split, 12, 16, dtype=torch.bfloat16)
    torch.manual_seed(0)
    for each in (up, down, table):
        nn.init.normal_(local(each.weight.detach()))
    x = randn(2, 8, 16).float()
    mine = (part(mesh, "tp", x, 1) if sequence else x).clone().requires_grad_()
    before = mesh.stats()
    with torch.autocast("cpu", torch.bfloat16):
        y = down(up(split.enter(mine)))
        found = table(torch.arange(8).expand(2, 8))
    assert (y.dtype, found.dtype) == (torch.bfloat16, torch.bfloat16)
    counted = sent(mesh, before)
    (y.float().square().sum() + found.float().sum()).backward()
    assert mine.grad is not None
    assert {each.grad.dtype for each in (mine, up.weight, down.weight, table.weight)} == {torch.float32}
    both = sent(mesh, before)
    if sequence:
        assert counted == {"all_gather": 512, "reduce_scatter": 2 * 512}
        assert both == {"all_gather": 3 * 512, "reduce_scatter": 3 * 512}
    else:
        assert (counted, both) == ({"all_reduce": 2 * 512}, {"all_reduce": 3 * 512})
    assert torch.equal(split.gather(found.detach()), whole(table.weight)[:8].bfloat16().expand(2, 8, 16))


@pytest.mark.parametrize("sequence", [False, True])
def test_under_autocast_what_is_sent_is_as_narrow_as_what_is_multiplied(sequence: bool) -> None:
    meshcomm.simulate(narrow, dims={"tp": 2}, args=(sequence,))


def entered_once(mesh: Mesh, sequence: bool, case: str) -> None:
    """Columns of one input against plain torch: results, gradients, calls, and the order of calls and products in backward."""
    split = TensorSplit(mesh, "tp", torch.float64, sequence)
    a, b = ColumnParallel(split, 16, 32), ColumnParallel(split, 16, 8, bias=case == "bias")
    full = {each: randn(*each.weight.shape, seed=n).requires_grad_() for n, each in enumerate((a, b))}
    for each, weight in full.items():
        assign(each.weight, weight.detach())
    if case == "bias":
        nn.init.zeros_(local(cast(Tensor, b.bias).detach()))
    seen: list[str] = []
    if case == "hook":
        b.register_forward_hook(lambda *_: seen.append("hook"))
    if case == "frozen":
        b.weight.requires_grad_(False)
    x, weights = randn(2, 8, 16).requires_grad_(), [full[a], full[b]]
    expected = [x @ weight.T for weight in weights]
    sum((y * y).sum() for y in expected).backward()
    mine = (part(mesh, "tp", x.detach(), 1) if sequence else x.detach().clone()).requires_grad_(
        case != "data"
    )
    found = columns(mine, a, b)
    for y, want in zip(found, expected, strict=True):
        close(y, part(mesh, "tp", want, -1))
    before = mesh.stats()
    with profile() as profiled:
        sum((y * y).sum() for y in found).backward()
    call = "reduce_scatter" if sequence else "all_reduce"
    assert sent(mesh, before)[call] == (0 if case == "data" else 2 * 8 * 16 * 8)
    assert seen == (["hook"] if case == "hook" else [])
    if case != "data":
        close(
            cast(Tensor, mine.grad),
            part(mesh, "tp", cast(Tensor, x.grad), 1) if sequence else cast(Tensor, x.grad),
        )
    for each, weight in full.items():
        if each is a or case != "frozen":
            close(whole(cast(Tensor, each.weight.grad)), cast(Tensor, weight.grad))
    if case == "plain":
        # The sum starts after the two products for the input, and before those for the weights.
        names = [event.name for event in profiled.events()]
        started = next(n for n, name in enumerate(names) if name.startswith(f"meshcomm::{call}"))
        assert [names[:started].count("aten::mm"), names[started:].count("aten::mm")] == [2, 2]


@pytest.mark.parametrize("case", ["plain", "bias", "hook", "frozen", "data"])
@pytest.mark.parametrize("sequence", [False, True])
def test_the_input_of_columns_is_summed_while_weights_get_their_gradients(sequence: bool, case: str) -> None:
    meshcomm.simulate(entered_once, dims={"tp": 2}, args=(sequence, case))


def test_ids_outside_the_vocabulary_are_named_on_one_rank() -> None:
    def body(mesh: Mesh) -> None:
        table = VocabParallelEmbedding(TensorSplit(mesh, "tp"), 8, 4)
        with pytest.raises(ShapeError, match=r"an embedding's ids are outside the vocabulary(.|\n)*1 to 9"):
            table(torch.tensor([[1, 9]]))

    meshcomm.simulate(body, dims={"tp": 1})


def refusals(mesh: Mesh) -> None:
    split = TensorSplit(mesh, "tp", torch.float64, True)
    with pytest.raises(ShapeError) as caught:
        ColumnParallel(split, 8, 10)
    assert str(caught.value) == (
        'axis 0 of a weight of shape (10, 8) cannot be split along "tp"\n'
        "  given:    10, and 4 ranks along tp\n"
        "  expected: a multiple of 4; 10 % 4 = 2\n"
        "  try:      12, or a smaller tp"
    )
    assert split.positions(3).tolist() == [3 * mesh.rank, 3 * mesh.rank + 1, 3 * mesh.rank + 2]
    assert TensorSplit(mesh, "tp").positions(3).tolist() == [0, 1, 2]
    with pytest.raises(ShapeError):
        split.leave(torch.ones(2, 7, 4))  # 7 tokens on 4 ranks
    with pytest.raises(ShapeError, match="an embedding's ids are outside the vocabulary on rank"):
        Own(split)(IDS + VOCAB)
    logits = torch.zeros(2, 3, 4)
    with pytest.raises(ShapeError, match=r"targets are outside the vocabulary(.|\n)*-1 to 2"):
        cross_entropy(split, logits, torch.tensor([[0, 1, -1], [2, 2, 2]]))
    with pytest.raises(UnsupportedOp, match="has no reduction 'none'"):
        cross_entropy(split, logits, torch.zeros(2, 3, dtype=torch.int64), reduction=cast(Any, "none"))


def test_what_cannot_be_is_refused() -> None:
    meshcomm.simulate(refusals, dims={"tp": 4})


def losses(mesh: Mesh) -> None:
    split = TensorSplit(mesh, "tp", torch.float64)
    plain = randn(2, TOKENS, VOCAB, seed=7)
    peak, never = plain.clone(), plain.clone()
    peak[..., 7], never[..., 1:4] = 1e300, -torch.inf
    none, some = torch.full_like(TARGETS, 5), torch.where(TARGETS < 0, 5, TARGETS)
    cases = [(plain, TARGETS, -100), (plain, none, 5), (plain, some, 5)]
    cases += [(logits, some % 4 + 8, -100) for logits in (plain * 1e4, peak, never, plain - 1e12)]
    for (logits, targets, ignore), reduction in product(cases, ("mean", "sum")):
        how: Any = {"ignore_index": ignore, "reduction": reduction}
        ref = logits.clone().requires_grad_()
        expected = F.cross_entropy(ref.flatten(0, 1), targets.flatten(), **how)
        (expected * 3).backward()
        mine = part(mesh, "tp", logits, -1).clone().requires_grad_()
        loss = cross_entropy(split, mine, targets, **how)
        (loss * 3).backward(retain_graph=True)
        if targets is none and reduction == "mean":
            assert loss.isnan() and expected.isnan()
            continue
        close(loss, expected)
        close(mine.grad, part(mesh, "tp", cast(Tensor, ref.grad), -1))
        (loss * 3).backward()  # the saved values are intact for a second backward
        close(mine.grad, 2 * part(mesh, "tp", cast(Tensor, ref.grad), -1))
    half = plain.bfloat16()
    loss = cross_entropy(split, half.chunk(split.size, -1)[split.coord], TARGETS)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(half.float().flatten(0, 1), TARGETS.flatten()))


@pytest.mark.parametrize("dims", [{"tp": 4}, {"tp": 1}], ids=str)
@pytest.mark.parametrize("few", [None, 1], ids=["at once", "some rows at a time"])
def test_the_loss_is_that_of_one_process_and_leaves_out_what_does_not_count(
    dims: dict[str, int], few: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if few is not None:
        monkeypatch.setattr(tensor_layers, "_FEW", few)
        assert len(tensor_layers._parts(torch.zeros(2 * TOKENS, VOCAB))) == 8
    meshcomm.simulate(losses, dims=dims)


def refused_columns(mesh: Mesh) -> None:
    split, other = TensorSplit(mesh, "tp", torch.float64), TensorSplit(mesh, "cp", torch.float64)
    a, b, c = ColumnParallel(split, 6, 4), ColumnParallel(other, 6, 4), ColumnParallel(split, 5, 4)
    sequence = ColumnParallel(TensorSplit(mesh, "tp", torch.float64, sequence_parallel=True), 6, 4)
    x = randn(2, 4, 6, seed=1)
    calls: list[tuple[str, type[Exception], Any]] = [
        (r"tp \(seq.* and along cp \(seq", UnsupportedOp, lambda: columns(x, a, b)),
        ("do not share one", UnsupportedOp, lambda: columns(x, a, sequence)),
        (
            "do not share one",
            UnsupportedOp,
            lambda: columns(x, ColumnParallel(TensorSplit(mesh, None), 6, 4), a),
        ),
        ("given: *no layers", UnsupportedOp, lambda: columns(x)),
        (
            r"given: *a list(.|\n)*columns\(x, \*layers\)",
            UnsupportedOp,
            lambda: columns(x, cast(Any, [a, a])),
        ),
        ("given: *a Linear", UnsupportedOp, lambda: columns(x, a, cast(Any, nn.Linear(6, 8)))),
        ("given: *a RowParallel", UnsupportedOp, lambda: columns(x, cast(Any, RowParallel(split, 6, 4)))),
        ("a layer of 5 inputs", ShapeError, lambda: columns(x, a, c)),
        (r"shape \(2, 4, 5\)(.|\n)*\(\.\.\., 6\)", ShapeError, lambda: columns(x[..., :5], a, a)),
        (r"x.to\(torch.float64\)", ShapeError, lambda: columns(x.float(), a)),
        (r"x.to\(torch.float64\)", ShapeError, lambda: columns(x.long(), a)),
        ("x of shape ()", ShapeError, lambda: columns(torch.zeros((), dtype=torch.float64), a)),
        (r"given: *a ndarray(.|\n)*as_tensor", ShapeError, lambda: columns(cast(Any, x.numpy()), a)),
    ]
    for text, kind, call in calls:
        with pytest.raises(kind, match=text):
            call()
    # Another object with the same split enters in the same way.
    columns(x, a, ColumnParallel(TensorSplit(mesh, "tp", torch.float64), 6, 4))


def test_columns_refuses_what_does_not_read_one_input() -> None:
    """With layers of two dims, the gradient of the input would be summed over the first layer's dim only."""
    meshcomm.simulate(refused_columns, dims={"tp": 2, "cp": 2})
