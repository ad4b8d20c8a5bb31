"""Two layers on 2 ranks, forward and backward: experts, and attention over a split sequence.

python -m tests.benchmarks.layers [--rounds 15]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

import meshcomm
from meshcomm.commands.measure import in_turn, slowest
from meshcomm.mesh import Mesh
from meshcomm.parallel import TensorSplit
from meshcomm.parallel.context import Order, ring_attention, sequence_positions, ulysses_attention
from meshcomm.parallel.expert import Experts
from meshcomm.show.units import bytes_text, seconds_text
from meshcomm.testing import Pool
from tests.benchmarks.table import Row, compare, markdown

# Experts: sizes of a layer, then the samples, tokens and width of a rank's input.
EXPERTS: Final[dict[str, Any]] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "experts": 8,
    "experts_per_token": 2,
}
INPUT: Final = (4, 256, 256)
# Attention: batch, heads, tokens of the full sequence, head size.
QUERIES: Final = (1, 8, 2048, 64)
DENSE: Final = "one dense SwiGLU of the same multiplications"
ONE: Final = "one process, `scaled_dot_product_attention`"
_VIEWS: Final = {"expert": {"edp": 1, "ep": 2}}


class Dense(torch.nn.Module):
    """A SwiGLU as wide as the experts of a token together."""

    def __init__(self) -> None:
        super().__init__()
        inner = EXPERTS["intermediate_size"] * EXPERTS["experts_per_token"]
        self.w1, self.w3 = (torch.nn.Linear(INPUT[-1], inner, bias=False) for _ in range(2))
        self.w2 = torch.nn.Linear(inner, INPUT[-1], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, tokens, width) -> the same."""
        y: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return y


def expert_ways(mesh: Mesh) -> dict[str, Callable[[], object]]:
    """Return forward and backward of each layer. Called by: every rank."""
    torch.manual_seed(mesh.rank)
    x = torch.randn(INPUT, requires_grad=True)

    def layer(dim: str | None, **more: Any) -> torch.nn.Module:
        made = Experts(mesh, dim, TensorSplit(mesh, None), **EXPERTS, **more)
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        return made

    def both(module: torch.nn.Module, summed: bool = False) -> None:
        module.zero_grad()
        module(x).square().mean().backward()
        if summed:
            mesh.all_reduce("dp", [each.grad for each in module.parameters() if each.grad is not None])

    whole = layer(None)
    return {
        DENSE: partial(both, Dense()),
        "all 8 experts on every rank": partial(both, whole),
        "the same, gradients summed along dp": partial(both, whole, True),
        "4 experts on each rank, exchanged along ep, dropless": partial(both, layer("ep")),
        "the same, `capacity_factor=1.0`": partial(both, layer("ep", capacity_factor=1.0)),
    }


def attention_ways(mesh: Mesh) -> dict[str, Callable[[], object]]:
    """Return forward and backward of each attention. Called by: every rank."""
    torch.manual_seed(0)
    whole = [torch.randn(QUERIES) for _ in range(3)]
    leaves = [each.clone().requires_grad_() for each in whole]

    def split(how: Order) -> list[Tensor]:
        places = sequence_positions(QUERIES[2], mesh.size("dp"), mesh.coord("dp"), how)
        return [each[:, :, places].clone().requires_grad_() for each in whole]

    def both(attend: Callable[..., Tensor], qkv: list[Tensor]) -> None:
        for each in qkv:
            each.grad = None
        attend(*qkv).square().mean().backward()

    alone = partial(both, partial(F.scaled_dot_product_attention, is_causal=True), leaves)
    ring = partial(ring_attention, mesh, "dp")
    return {
        ONE: alone if mesh.rank == 0 else lambda: None,
        "Ulysses": partial(both, partial(ulysses_attention, mesh, "dp"), split("contiguous")),
        "ring, zig-zag": partial(both, ring, split("zigzag")),
        "ring, contiguous": partial(both, partial(ring, order="contiguous"), split("contiguous")),
    }


def measured(rounds: int) -> list[tuple[Row, int, int]]:
    """Return each comparison with rank 0's calls and bytes of one forward and backward."""
    torch.set_num_threads(1)
    found = []
    with meshcomm.init(dims={"dp": 2}, views=_VIEWS, device="cpu", validate_calls=0) as mesh:
        for ways, base in ((expert_ways(mesh), DENSE), (attention_ways(mesh), ONE)):
            counted = {name: _counted(mesh, call) for name, call in ways.items()}
            times = in_turn(ways, rounds, 3, align=partial(mesh.barrier, "dp"))
            worst = dict(zip(times, slowest(mesh, list(times.values())), strict=True))
            found += [(compare(name, each, worst[base]), *counted[name]) for name, each in worst.items()]
    return found


def _counted(mesh: Mesh, call: Callable[[], object]) -> tuple[int, int]:
    # A layer's first calls make more comparisons between ranks than later ones.
    for _ in range(3):
        call()
    before = mesh.stats()
    call()
    rows = mesh.stats().since(before).rows
    return sum(row.calls for row in rows), sum(row.nbytes for row in rows)


def main() -> None:
    """Print both tables."""
    from tests.benchmarks import layers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    pool = Pool()
    try:
        found = pool.run(layers.measured, given.rounds, ranks=2, timeout_s=1200)[0]
    finally:
        pool.close()
    columns: dict[str, Callable[[tuple[Row, int, int]], str]] = {
        "": lambda row: row[0].name,
        "calls": lambda row: str(row[1]),
        "bytes": lambda row: bytes_text(row[2]),
        "time": lambda row: seconds_text(row[0].ours_s),
        "relative to the first row": lambda row: (
            f"{row[0].ratio:.2f} ({row[0].low:.2f} to {row[0].high:.2f})"
        ),
    }
    at = next(i for i, row in enumerate(found) if row[0].name == ONE)
    print(markdown(columns, found[:at]) + "\n\n" + markdown(columns, found[at:]))


if __name__ == "__main__":
    main()
