"""Published transfers of models' weights, as text placements: the meshes, the weights, and what their ranks send at least."""

from __future__ import annotations

from math import prod
from typing import NamedTuple, TypeAlias

from meshcomm.layout import Layout
from meshcomm.transfer.placement import Placement
from meshcomm.transfer.plan import Entry

Transfer: TypeAlias = tuple[Layout, Layout, list[Entry]]


class Model(NamedTuple):
    """A decoder of Llama's shape. layers, hidden, feed-forward, q, kv, vocabulary."""

    layers: int
    d: int
    f: int
    q: int
    kv: int
    vocab: int


LLAMA_8B = Model(32, 4096, 14336, 4096, 1024, 128256)
LLAMA_70B = Model(80, 8192, 28672, 8192, 1024, 128256)
LLAMA_405B = Model(126, 16384, 53248, 16384, 1024, 128256)
# Splits by the kind of weight: the projections in and out, the embedding, and the norms.
FSDP = {"in": "n/fsdp k", "out": "n/fsdp k", "embed": "n/fsdp k", "norm": "n/fsdp"}
FSDP_TP = {"in": "n/tp/fsdp k", "out": "n/fsdp k/tp", "embed": "n/tp/fsdp k", "norm": "n/fsdp"}
TP = {"in": "n/tp k", "out": "n k/tp", "embed": "n/tp k", "norm": "n"}


def llama(model: Model, source: dict[str, str], target: dict[str, str], stages: int = 1) -> list[Entry]:
    """The weights of a model in bfloat16. stages: of the source, along pp."""
    layers, d, f, q, kv, vocab = model
    kinds = {
        "q": ("in", (q, d)), "k": ("in", (kv, d)), "v": ("in", (kv, d)), "o": ("out", (d, q)), "gate": ("in", (f, d)),
        "up": ("in", (f, d)), "down": ("out", (d, f)), "norm1": ("norm", (d,)), "norm2": ("norm", (d,)),
    }  # fmt: skip
    ends = {
        "embed": ("embed", (vocab, d), 0),
        "head": ("embed", (vocab, d), stages - 1),
        "norm": ("norm", (d,), stages - 1),
    }

    def entry(name: str, kind: str, shape: tuple[int, ...], stage: int) -> Entry:
        at = {"pp": [stage]} if stages > 1 else None
        return Entry(name, 2, Placement.read(source[kind], shape, at=at), Placement.read(target[kind], shape))

    return [entry(name, *rest) for name, rest in ends.items()] + [
        entry(f"{layer}.{name}", kind, shape, stage_of(layer, layers, stages))
        for layer in range(layers)
        for name, (kind, shape) in kinds.items()
    ]


def stage_of(layer: int, layers: int, stages: int) -> int:
    return layer // -(-layers // stages)


def qwen_235b(
    experts: tuple[str, str], target_experts: tuple[str, str], source: dict[str, str], stages: int = 1
) -> list[Entry]:
    """Qwen3-235B in bfloat16. experts: splits of the projections in and out of all experts of a layer."""
    d, f, count, q, kv, vocab = 4096, 1536, 128, 8192, 512, 151936
    kinds = {
        "q": (source["in"], "n/tp k", (q, d)), "k": (source["in"], "n/tp:4 k", (kv, d)), "v": (source["in"], "n/tp:4 k", (kv, d)),
        "o": (source["out"], "n k/tp", (d, q)), "router": (source["router"], "n k", (count, d)),
        "gate": (experts[0], target_experts[0], (count, f, d)), "up": (experts[0], target_experts[0], (count, f, d)),
        "down": (experts[1], target_experts[1], (count, d, f)), "norm1": (source["norm"], "n", (d,)), "norm2": (source["norm"], "n", (d,)),
    }  # fmt: skip

    def entry(name: str, given: str, wanted: str, shape: tuple[int, ...], stage: int) -> Entry:
        at = {"pp": [stage]} if stages > 1 else None
        return Entry(name, 2, Placement.read(given, shape, at=at), Placement.read(wanted, shape))

    embed = source["embed"], "n/tp k", (vocab, d)
    return [entry("embed", *embed, 0), entry("head", *embed, stages - 1)] + [
        entry(f"{layer}.{name}", *kind, stage_of(layer, 94, stages))
        for layer in range(94)
        for name, kind in kinds.items()
    ]


def side(first: int, views: dict[str, dict[str, int]] | None = None, /, **dims: int) -> Layout:
    return Layout(dims, rank_order=range(first, first + prod(dims.values())), views=views)


MEGATRON = {**TP, "router": "n k"}
SHARDED = {**FSDP, "router": "n/fsdp k"}
EP16 = side(0, {"expert": {"pp": 4, "ep": 16}}, pp=4, dp=8, tp=2)
EFSDP = side(0, {"expert": {"efsdp": 8, "ep": 8}}, fsdp=64)
# The transfer, and in GB what a rank has to receive and to send at least, and what a rank sends directly.
ROWS: dict[str, tuple[Transfer, float, float, float]] = {
    "8B fsdp8 -> tp4 x 2": ((side(0, fsdp=8), side(8, copy=2, tp=4), llama(LLAMA_8B, FSDP, TP)), 4.02, 2.01, 4.02),
    "the same, on the same ranks": ((side(0, fsdp=8), side(0, copy=2, tp=4), llama(LLAMA_8B, FSDP, TP)), 3.86, 2.01, 3.86),
    "8B fsdp4 tp2 -> 32 copies": ((side(0, fsdp=4, tp=2), side(8, copy=32, tp=1), llama(LLAMA_8B, FSDP_TP, TP)), 16.1, 2.01, 64.2),
    "70B fsdp16 tp4 -> tp4 x 16": ((side(0, fsdp=16, tp=4), side(64, copy=16, tp=4), llama(LLAMA_70B, FSDP_TP, TP)), 35.3, 2.20, 35.3),
    "70B pp4 dp2 tp8 -> tp8 x 8": ((side(0, pp=4, dp=2, tp=8), side(64, copy=8, tp=8), llama(LLAMA_70B, TP, TP, 4)), 17.6, 2.27, 18.2),
    "70B fsdp32 -> tp8 x 16": ((side(0, fsdp=32), side(32, copy=16, tp=8), llama(LLAMA_70B, FSDP, TP)), 17.6, 4.41, 70.6),
    "235B pp4 ep16 -> tp8 x 8": ((EP16, side(64, copy=8, tp=8), qwen_235b(("e/ep n k",) * 2, ("e n/tp k", "e n k/tp"), MEGATRON, 4)), 59.0, 7.54, 60.5),
    "235B pp4 ep16 -> tp8 ep8 x 8": ((EP16, side(64, copy=8, tp=8), qwen_235b(("e/ep n k",) * 2, ("e/tp n k",) * 2, MEGATRON, 4)), 59.0, 7.54, 60.5),
    "235B fsdp64 ep8 -> tp8 ep8 x 4": ((EFSDP, side(64, copy=4, tp=8), qwen_235b(("e/ep n/efsdp k",) * 2, ("e/tp n k",) * 2, SHARDED)), 59.0, 7.35, 29.5),
}  # fmt: skip


def llama_405b() -> Transfer:
    """Llama 3 405B from 16,384 ranks to 1,024."""
    source, target = side(0, pp=16, fsdp=128, tp=8), side(16384, copy=128, tp=8)
    return source, target, llama(LLAMA_405B, FSDP_TP, TP, 16)
