"""Modules that know nothing of meshes, split by a plan: every value equals the whole module's.

Ranks are threads of this process (`simulate`), where parameters are plain parts. One test runs on
processes, where they are DTensors.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
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
from meshcomm.errors import MeshMismatchError
from meshcomm.mesh import Mesh
from meshcomm.parallel.expert import Experts
from meshcomm.parallel.tensor import TensorSplit, cross_entropy, tensor_parallel, unsplit_state, whole
from meshcomm.testing import Pool
from meshcomm.transfer.fused import Parts, kept
from tests.parallel.same import close, randn

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
@pytest.mark.deep_cases(r"\[(own|separate)-2")
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


def states(mesh: Mesh) -> None:
    module = module_of("gqa")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    tensor_parallel(module, mesh, "tp", plan_of("gqa"))
    state = unsplit_state(module)
    assert list(state) == list(before)
    assert all(torch.equal(state[name], value) for name, value in before.items())


def test_the_state_of_the_whole_module_comes_out() -> None:
    meshcomm.simulate(states, dims={"tp": 4})


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
