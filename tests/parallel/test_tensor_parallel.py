"""Modules that know nothing of meshes, split by a plan: every value equals the whole module's.

Ranks are threads of this process (`simulate`), where parameters are plain parts. One test runs on
processes, where they are DTensors.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import meshcomm
from meshcomm.config import load_config
from meshcomm.errors import (
    ConfigError,
    MeshMismatchError,
    RankFailed,
    ShapeError,
    TrainingError,
    UnsupportedOp,
)
from meshcomm.mesh import Mesh
from meshcomm.mesh.stats import Stats
from meshcomm.parallel.expert import Experts
from meshcomm.parallel.tensor import (
    ColumnParallel,
    RowParallel,
    TensorSplit,
    VocabParallelEmbedding,
    assign,
    cross_entropy,
    local,
    tensor_parallel,
    unsplit_state,
    whole,
)
from meshcomm.parallel.tensor import layers as tensor_layers
from meshcomm.parallel.tensor.parameters import Parts, kept
from meshcomm.testing import Pool
from tests.parallel.same import close, part, randn

VOCAB, WIDTH, TOKENS = 16, 16, 8


# -- modules of users -----------------------------------------------------------------------------


class Fused(nn.Module):
    """q, k and v in one weight, with as many heads for k and v as for q (GPT-2) or fewer."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, WIDTH // heads
        self.config = SimpleNamespace(kv_heads=kv_heads)
        self.qkv = nn.Linear(WIDTH, (heads + 2 * kv_heads) * self.size)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        counts = [self.heads, self.kv_heads, self.kv_heads]
        parts = self.qkv(x).split([n * self.size for n in counts], -1)
        q, k, v = (p.view(b, t, n, self.size).transpose(1, 2) for p, n in zip(parts, counts, strict=True))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return cast(Tensor, self.out(y.transpose(1, 2).flatten(2)))


class Separate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.v, self.out = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, 2)).transpose(1, 2) for w in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return cast(Tensor, self.out(y.transpose(1, 2).flatten(2)))


class Sinks(nn.Module):
    """Separate heads with a sink each. The forward reads a part's weight to mix the input over time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.mix = Separate(), nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * 8), nn.Linear(4 * 8, WIDTH)
        self.sinks = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        mix, length = self.mix, x.shape[1]
        x = F.conv1d(x.transpose(1, 2), mix.weight, mix.bias, padding=2, groups=WIDTH)[..., :length]
        heads = self.up(self.inner(x.transpose(1, 2))).unflatten(-1, (-1, 8))
        scale = (heads.logsumexp(-1) - self.sinks).sigmoid()
        # The result is (batch * sequence, width), as from a mixture of experts.
        return cast(Tensor, self.down((heads * scale.unsqueeze(-1)).flatten(2))).flatten(0, 1)


class Flat(nn.Module):
    """A wrapper around a part that returns batch and sequence in one axis."""

    def __init__(self) -> None:
        super().__init__()
        self.own = Sinks()

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.own(x)).view(x.shape)


class Reader(nn.Module):
    """A module without direct parameters. It reads a part's weight without calling the part."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.part.weight, self.part.bias)


class Block(nn.Module):
    def __init__(self, attn: nn.Module) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(WIDTH), attn, nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return cast(Tensor, x + self.mlp(self.norm2(x)))


class Small(nn.Module):
    """A GPT with tied embeddings; `recompute` runs its blocks a second time in backward."""

    def __init__(self, kind: str, recompute: bool = False) -> None:
        super().__init__()
        makes: dict[str, Callable[[], nn.Module]] = {
            "fused": lambda: Fused(4, 4),
            "gqa": lambda: Fused(8, 4),
            "mqa": lambda: Fused(4, 1),
            "separate": Separate,
            "own": Flat,
        }
        self.embed = nn.Embedding(VOCAB, WIDTH, padding_idx=3)
        self.places = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Block(makes[kind]()) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.recompute = recompute

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(ids) + self.places(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        logits = cast(Tensor, self.head(self.norm(x)))
        return logits if labels is None else F.cross_entropy(logits.view(-1, VOCAB), labels.flatten())


ATTENTION: dict[str, dict[str, Any]] = {
    "fused": {
        "layers.*.attn": {"style": "enter", "set": {"heads": "split", "kv_heads": "split"}},
        "layers.*.attn.qkv": "column:3",
        "layers.*.attn.out": "row",
    },
    "gqa": {
        "layers.*.attn": {"style": "enter", "set": {"heads": "split", "kv_heads": "split"}},
        "layers.*.attn.qkv": {"style": "column", "parts": [16, 8, 8]},
        "layers.*.attn.out": "row",
    },
    "separate": {"layers.*.attn.[qkv]": "column", "layers.*.attn.out": "row"},
    "own": {
        # The wildcard is meant for modules, but also matches the parameter `sinks` next to them.
        "layers.*.attn.own.[ims]*": {"set": {"training": True}},
        "layers.*.attn.own": "replicate",
        "layers.*.attn.own.inner.[qkv]": "column",
        "layers.*.attn.own.inner.out": "row",
        "layers.*.attn.own.up": "column",
        "layers.*.attn.own.sinks": "split",
        "layers.*.attn.own.down": "row",
    },
}


def plan_of(kind: str) -> dict[str, Any]:
    return {
        **ATTENTION[kind],
        "embed": "vocab",
        "places": {"style": "replicate", "input": "whole", "axis": 0},
        "**.norm*": "sequence",
        "layers.*.mlp.0": "column",
        "layers.*.mlp.2": "row",
        "head": "column",
    }


def module_of(kind: str, recompute: bool = False) -> Small:
    # Threads share torch's generator, so the weights are made once and copied.
    return copy.deepcopy(made(kind, recompute))


@functools.cache
def made(kind: str, recompute: bool) -> Small:
    torch.manual_seed(1)
    module = Small(kind, recompute).double()
    for name, parameter in module.named_parameters():
        if "norm" in name or name.endswith("bias"):
            nn.init.normal_(parameter, 0.5)
    return module


IDS = torch.randint(VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(2))
IDS[0, 0] = 3  # the padding
TARGETS = torch.randint(VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(3))
TARGETS[0, 2:5] = -100


def step(module: nn.Module, split: TensorSplit | None) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Logits, every whole gradient, and the weights after a step of AdamW."""
    # A key's bias has no effect and a gradient of 1e-17. eps keeps AdamW from scaling it up to a full step.
    optimiser = torch.optim.AdamW(module.parameters(), lr=0.1, eps=1e-3)
    logits = module(IDS)
    if split is None:
        loss = F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten())
    else:
        loss = cross_entropy(split, logits, TARGETS)
    loss.backward()
    if split is not None:
        split.finish_gradients(module)
        logits = split.mesh.all_gather(split.dim, logits.detach(), -1)
    grads = {name: whole(cast(Tensor, p.grad)) for name, p in module.named_parameters()}
    optimiser.step()
    return logits, grads, unsplit_state(module)


def parity(mesh: Mesh, kind: str, sequence: bool, recompute: bool = False) -> None:
    module = module_of(kind, recompute)
    names = list(module.state_dict())
    split = tensor_parallel(module, mesh, "tp", plan_of(kind), sequence_parallel=sequence, example=(IDS,))
    assert list(module.state_dict()) == names
    found, expected = step(module, split), step(module_of(kind), None)
    close(found[0], expected[0], "logits")
    sizes = {"fused": [16] * 3, "gqa": [16, 8, 8], "separate": [], "own": []}[kind]
    for mine, other in zip(found[1:], expected[1:], strict=True):
        assert list(mine) == list(other)
    for name, grad in expected[1].items():
        close(found[1][name], kept(grad, Parts(tuple(sizes))) if "qkv" in name else grad, name)
    for name, weight in expected[2].items():
        close(found[2][name], weight, name)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", list(ATTENTION))
@pytest.mark.deep_cases(r"\[(own|fused|separate)-2")
def test_a_split_module_has_the_outputs_gradients_and_steps_of_the_whole_one(size: int, kind: str) -> None:
    """Along 4 ranks the sequence is split too; one kind of block is recomputed in backward."""
    meshcomm.simulate(parity, dims={"tp": size}, args=(kind, size == 4, kind == "separate" and size == 4))


def entries(mesh: Mesh, sequence: bool) -> int:
    module = module_of("separate")
    tensor_parallel(module, mesh, "tp", plan_of("separate"), sequence_parallel=sequence)
    before = ENTERED[mesh.rank]
    module(IDS).sum().backward()
    module(IDS).sum().backward()
    entry = cast(Any, module.layers[0]).attn.q.meshcomm_entry
    assert entry._given is None and entry._entered is None  # nothing is kept between two calls
    return ENTERED[mesh.rank] - before


ENTERED = [0, 0]


def test_columns_that_read_the_same_tensor_enter_once(monkeypatch: pytest.MonkeyPatch) -> None:
    enter = TensorSplit.enter

    def counted(split: TensorSplit, x: Tensor) -> Tensor:
        ENTERED[split.coord] += 1
        return enter(split, x)

    monkeypatch.setattr(TensorSplit, "enter", counted)
    # Each block's q, k and v, its feed-forward, and the head, for two calls.
    assert meshcomm.simulate(entries, dims={"tp": 2}, args=(True,)) == [10, 10]


class Twice(nn.Module):
    """Reads an input, writes into it, and reads it again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.no_grad():
            a = self.a(x)
        x.mul_(2.0)
        return cast(Tensor, self.out(a + self.a(x) * self.b(x)))


def written(mesh: Mesh, module: nn.Module) -> None:
    x = torch.ones(1, 4, WIDTH, dtype=torch.float64)
    plan = {"a": "column", "b": "column", "out": "row"}
    tensor_parallel(module, mesh, "tp", plan, example=(x,))


def test_a_tensor_that_was_written_to_enters_again() -> None:
    meshcomm.simulate(written, dims={"tp": 2}, args=(Twice().double(),))


# -- wrong on purpose -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "broken", "sequence", "seen"),
    [
        ("leave", lambda split, x: x, False, "output 0: off by"),
        ("enter", lambda split, x: x, False, "gradient of embed.weight: off by"),
        ("partial_parameters", lambda split, module: {}, True, r"gradient of layers.0.norm1.weight: off by"),
    ],
)
def test_an_example_shows_what_is_computed_otherwise(
    monkeypatch: pytest.MonkeyPatch, name: str, broken: Any, sequence: bool, seen: str
) -> None:
    monkeypatch.setattr(TensorSplit, name, broken)
    with pytest.raises(RankFailed, match=seen) as caught:
        meshcomm.simulate(parity, dims={"tp": 2}, args=("separate", sequence))
    assert "output" in seen or "output" not in str(caught.value).split("expected:")[0]


def other_weights(mesh: Mesh) -> None:
    module = module_of("separate")
    if mesh.rank == 5:
        with torch.no_grad():
            cast(Any, module.norm).bias[3] += 1e-9
    plan = plan_of("separate")
    if mesh.rank > 3:
        with pytest.raises(
            MeshMismatchError, match=r'norm\.bias differs along "tp" before it is split'
        ) as caught:
            tensor_parallel(module, mesh, "tp", plan)
        assert caught.value.mismatched_ranks == (5,)
        assert "given:    rank 5 of [4, 5, 6, 7]" in str(caught.value)
    else:
        tensor_parallel(module, mesh, "tp", plan)


def other_plans(mesh: Mesh) -> None:
    plan = plan_of("separate") | ({"head": "column:whole"} if mesh.rank == 2 else {})
    with pytest.raises(
        MeshMismatchError, match="the plan, or the names and shapes of the parameters, differs"
    ):
        tensor_parallel(module_of("separate"), mesh, "tp", plan)


def test_ranks_with_other_weights_or_plans_are_named() -> None:
    meshcomm.simulate(other_weights, dims={"dp": 2, "tp": 4})
    meshcomm.simulate(other_plans, dims={"tp": 4})


WRONG: list[tuple[str, Any, str]] = [
    ("layers.*.atn.q", "column", 'matches no part of the module; did you mean "layers.*.attn.q"?'),
    ("layers.*.attn.q", "colum", 'style \'colum\' is not one of "column", "row", "vocab", "latent", "enter"'),
    ("norm", "column", '"norm", a LayerNorm: style "column" splits an nn.Linear, but this is not one'),
    ("embed", "column", '"embed", a Embedding: style "column" splits an nn.Linear'),
    ("odd", "column", '"odd", a Linear: 6 outputs are not divisible by tp: 6 % 4 = 2'),
    ("odd", "row", '"odd", a Linear: 6 inputs are not divisible by tp: 6 % 4 = 2'),
    ("odd", "split", '"odd" is a module; style "split" is for parameters'),
    ("odd.weight", "column", '"odd.weight" is a parameter, whose style is "split"'),
    (
        "odd.bias",
        "split",
        '"odd", a Linear: axis 0 of its bias, (6,), is not divisible by the 4 ranks along tp',
    ),
    ("odd.bias", {"style": "split", "axis": "rows"}, "axis is 'rows'; it must be an integer of 0 or more"),
    (
        "odd.bias",
        {"style": "split", "set": {"a": 1}},
        "style \"split\" has no option 'set'; its options are style, axis",
    ),
    ("odd.bias", {"style": "split", "axis": 1}, "axis 1 of its bias, (6,), is not divisible"),
    ("layers.*.attn.q", "column:3", "its 16 outputs are not 3 equal parts"),
    ("layers.*.attn.q", {"style": "column", "parts": [8, 4]}, "its 16 outputs are not 8 + 4"),
    ("layers.*.attn.q", {"style": "column", "parts": [10, 6]}, "not divisible by tp: 2 % 4 = 2"),
    (
        "layers.*.attn.q",
        {"style": "column", "part": 2},
        "has no option 'part'; its options are style, parts, output, sequence, set",
    ),
    (
        "layers.*.attn.q",
        {"style": "column", "output": "all"},
        'output is \'all\'; it must be "split" or "whole"',
    ),
    ("layers.*.attn.q", 3, "3 is neither a style"),
    ("layers.0.attn", {"set": {"haeds": "split"}}, "it has no attribute 'haeds' to set"),
    ("layers.0.attn", {"set": {"heads": "split"}}, "heads = 6 is not divisible by tp: 6 % 4 = 2"),
    ("layers.0.attn", {"set": {"name": "split"}}, "name = 'a' is not an integer"),
    ("layers.0.attn.q", {"style": "row"}, 'is matched by "layers.*.attn.[qkv]" and by "layers.0.attn.q"'),
    ("layers.0", "heads", 'has style "heads", but "layers.0.attn.q" inside it has another style'),
    ("head", "row", '"embed.weight" and "head.weight" are one parameter and would be split differently'),
    ("ten", "vocab", '"ten", a Embedding: 10 rows are not divisible by tp: 10 % 4 = 2'),
    ("capped", "vocab", "an embedding with max_norm cannot be split"),
]


def wrong(mesh: Mesh, module: nn.Module) -> None:
    state = {name: value.clone() for name, value in module.state_dict().items()}
    for pattern, entry, text in WRONG:
        plan = plan_of("separate")
        # These would match the same parts.
        plan.pop("**.norm*")
        if pattern == "layers.*.attn.q":
            plan.pop("layers.*.attn.[qkv]")
        plan[pattern] = entry
        with pytest.raises(ConfigError) as caught:
            tensor_parallel(module, mesh, "tp", plan)
        assert text in str(caught.value), f"{pattern}, {entry}: {caught.value}"
    with pytest.raises(ConfigError) as caught:
        tensor_parallel(module, mesh, "tp", {"norm": "row", "nrm": "row"})
    assert str(caught.value).startswith('the plan to split a Small along "tp" has 2 problems\n')
    with pytest.raises(ConfigError, match="these have none: odd, ten, capped"):
        tensor_parallel(module, mesh, "tp", plan_of("separate"), sequence_parallel=True)
    # A refused plan does not change the module.
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert type(module) is Small and type(module.norm) is nn.LayerNorm


def test_plans_that_do_not_fit_are_refused_with_everything_that_is_wrong() -> None:
    module: Any = module_of("separate")
    module.odd, module.ten = nn.Linear(6, 6), nn.Embedding(10, 4)
    module.capped = nn.Embedding(8, 4, max_norm=1.0)
    module.layers[0].attn.heads, module.layers[0].attn.name = 6, "a"
    meshcomm.simulate(wrong, dims={"tp": 4}, args=(module,))


def without(*names: str, kind: str = "fused", **more: Any) -> dict[str, Any]:
    return {name: style for name, style in {**plan_of(kind), **more}.items() if name not in names}


MQA = {
    "layers.*.attn": {"set": {"heads": "split"}},
    "layers.*.attn.qkv": {"style": "column", "parts": [16, 4, 4]},
    "layers.*.attn.out": "row",
}
FAILING: list[tuple[str, dict[str, Any], str, bool, str, str]] = [
    ("fused", without("layers.*.mlp.2"), "", False, '"layers.0.mlp.2", a Linear', '"layers.0.mlp.2": "row", as it gets 16 of its 32 inputs'),
    ("fused", without("layers.*.mlp.0"), "", False, '"layers.0.mlp.2", a Linear', '"layers.0.mlp.2" gets all of its 32 inputs: a "column" before it'),
    ("fused", without("layers.*.attn"), "", False, '"layers.0.attn", a Fused', '"layers.0.attn": {"set": {"heads": "split"}}, 4 now'),
    ("mqa", without(**MQA), "", False, '"layers.0.attn", a Fused', "a size of tp that divides kv_heads = 1, which cannot be split by tp = 2"),
    ("fused", plan_of("fused"), "labels", False, "the module itself, a Small", '"head": "column:whole", or no labels'),
    ("separate", without(places="sequence", kind="separate"), "", True, "the module itself, a Small", '{"style": "replicate", "input": "whole", "axis": 0} for a part'),
    ("gqa", without(kind="gqa", **{"layers.*.attn": {"set": {"heads": "split", "kv_heads": "split"}}}), "", True, '"layers.0.attn", a Fused', '"layers.0.attn": "enter" if it reads the length from its input, "replicate" if it needs all: it gets 4 of 8 positions'),
]  # fmt: skip


def failing(mesh: Mesh) -> None:
    for kind, plan, labels, sequence, where, cure in FAILING:
        example = {"ids": IDS} | ({"labels": IDS} if labels else {})
        with pytest.raises(TrainingError) as caught:
            tensor_parallel(module_of(kind), mesh, "tp", plan, sequence_parallel=sequence, example=example)
        text = str(caught.value)
        assert f" fails on its example in {where}" in text.splitlines()[0], text
        assert text.count(cure) == 1, text
        assert isinstance(caught.value.__cause__, Exception)
    # The change that the error proposes makes the module equal again.
    cured = plan_of("fused") | {"head": "column:whole"}
    tensor_parallel(module_of("fused"), mesh, "tp", cured, example={"ids": IDS, "labels": IDS})


def test_a_part_that_fails_behind_the_split_its_size_and_the_cure_are_named() -> None:
    meshcomm.simulate(failing, dims={"tp": 2})


class Reshaped(nn.Module):
    """Attention that reshapes to the full width after the split columns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, 8) -> the same shape."""
        y: Tensor = self.down(self.up(x).transpose(1, 2).transpose(1, 2).reshape(x.shape[0], x.shape[1], 16))
        return y


def reshaped(mesh: Mesh) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(Reshaped())
    with pytest.raises(TrainingError) as caught:
        tensor_parallel(
            module, mesh, "tp", {"0.up": "column", "0.down": "row"}, example=(torch.randn(2, 3, 8),)
        )
    text = str(caught.value)
    assert 'fails on its example in "0", a Reshaped' in text
    line = Reshaped.forward.__code__.co_firstlineno + 2
    assert f"at {__file__}:{line} in forward: y: Tensor = self.down(self.up(x)" in text, text
    assert "reshape to [2, 3, -1] instead of [2, 3, 16]" in text


def test_the_line_of_the_users_forward_and_a_reshape_that_fits_are_named() -> None:
    meshcomm.simulate(reshaped, dims={"tp": 2})


def states(mesh: Mesh) -> None:
    module = module_of("gqa")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    tensor_parallel(module, mesh, "tp", plan_of("gqa"))
    state = unsplit_state(module)
    assert list(state) == list(before)
    assert all(torch.equal(state[name], value) for name, value in before.items())


def test_the_state_of_the_whole_module_comes_out() -> None:
    meshcomm.simulate(states, dims={"tp": 4})


# -- custom layers with sequence_parallel ---------------------------------------------------------


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


def alone(mesh: Mesh, module: Any) -> None:
    plan = plan_of("fused") | {"layers.0.attn": {"set": {"size": 5}}}
    state = module.state_dict()
    split = tensor_parallel(module, mesh, "tp", plan, sequence_parallel=True)
    assert split.size == 1 and not split.sequence_parallel
    assert (module.layers[0].attn.heads, module.layers[0].attn.size) == (4, 5)
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert type(module.head) is nn.Linear


def test_on_one_rank_only_what_is_set_is_set() -> None:
    meshcomm.simulate(alone, dims={"dp": 2, "tp": 1}, args=(module_of("fused"),))


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


# -- processes ------------------------------------------------------------------------------------


def placed() -> None:
    views = {"expert": {"edp": 1, "ep": 2, "tp": 2}}
    config = load_config({"mesh": {"dims": {"dp": 2, "tp": 2}, "views": views, "device": "cpu"}})
    with meshcomm.init(config) as mesh:
        module: Any = module_of("gqa")
        tensor_parallel(module, mesh, "tp", plan_of("gqa"), sequence_parallel=True)
        assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
        layer = module.layers[0]
        assert layer.attn.qkv.weight.placements == layer.attn.qkv.bias.placements == (Shard(0),)
        assert layer.attn.out.weight.placements == (Shard(1),)
        assert module.norm.weight.placements == (Replicate(),)
        split = TensorSplit(mesh, "tp", torch.float64)
        experts: Any = Experts(mesh, "ep", split, hidden_size=WIDTH, intermediate_size=8, experts=4)
        assert experts.experts.w1.placements == experts.experts.w3.placements == (Shard(0), Shard(1))
        assert experts.experts.w2.placements == (Shard(0), Shard(2))
        assert experts.experts.w1.shape == (4, 8, WIDTH)
        close(whole(module.norm.weight), module_of("gqa").norm.weight)
        for sequence in (False, True):
            parity(mesh, "own", sequence)
        own: Any = module_of("own")
        tensor_parallel(own, mesh, "tp", plan_of("own"))
        assert own.layers[0].attn.own.sinks.placements == (Shard(0),)
        reader = nn.Sequential(Reader())
        x = randn(2, TOKENS, WIDTH).float()
        before = reader(x)
        tensor_parallel(reader, mesh, "tp", {"0.part": "sequence"})
        close(reader(x), before)


def test_on_processes_parameters_are_dtensors_that_parts_read_as_their_own(pool: Pool) -> None:
    pool.run(placed, ranks=4)
