"""Dropout masks against one process and plain Python integers."""

from __future__ import annotations

import functools
import hashlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshcomm
from meshcomm.errors import ShapeError, TrainingError
from meshcomm.mesh import Mesh
from meshcomm.parallel.dropout import Dropout, Drops, _number

SEED, STEP, BATCH, SEQUENCE, FEATURES = 3, 17, 8, 12, 10


def by_integers(p: float, site: str, sample: int, position: int, feature: int) -> bool:
    """Whether one process keeps an element: the definition in Python's unbounded integers."""

    def hashed(text: str) -> int:
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")

    def mixed(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    def number(state: int, index: int) -> int:
        return mixed((state + (index + 1) * 0x9E3779B97F4A7C15) % 2**64)

    key = number(hashed(f"{SEED} {STEP}"), sample)
    word = number(number(mixed(key ^ hashed(site)), position), feature // 2)
    half = word >> 32 if feature % 2 else word % 2**32
    # An element is dropped if its half word, read as a signed number, is among the lowest share p.
    return (half + 2**31) % 2**32 >= round(p * 2**32)


@functools.cache
def one_process(p: float, site: str) -> Tensor:
    return torch.tensor(
        [
            [[by_integers(p, site, b, s, f) for f in range(FEATURES)] for s in range(SEQUENCE)]
            for b in range(BATCH)
        ]
    )


def test_the_generator_is_splitmix64() -> None:
    known = (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431)
    found = _number(torch.tensor(1234567), torch.arange(4))
    assert [value % 2**64 for value in found.tolist()] == list(known)


@pytest.mark.parametrize(("p", "site"), [(0.5, "3.attn"), (0.1, "3.ff"), (0.999, "0.attn")])
def test_a_mask_is_that_of_python_integers(p: float, site: str) -> None:
    drops = Drops.at(SEED, STEP, torch.arange(BATCH), torch.arange(SEQUENCE))
    keep = Dropout(p, site).keep(drops, torch.Size((BATCH, SEQUENCE, FEATURES)))
    assert torch.equal(keep, one_process(p, site))
    assert keep.shape == (BATCH, SEQUENCE, FEATURES)


def part_of_the_mask(mesh: Mesh) -> Tensor:
    """Check two microbatches and an uneven slice of features against one process. Returns the first mask with all features."""
    share, width = BATCH // mesh.size("dp"), SEQUENCE // mesh.size("cp")
    positions = torch.arange(SEQUENCE).view(-1, mesh.size("cp"))[:, mesh.coord("cp")]
    features = range(3, FEATURES) if mesh.coord("tp") else range(3)
    drop = Dropout(0.5, "3.attn")
    samples = torch.arange(BATCH).view(mesh.size("dp"), 2, -1)[mesh.coord("dp")]
    for some in samples:
        keep = drop.keep(
            Drops.at(SEED, STEP, some, positions), torch.Size((share // 2, width, len(features))), features[0]
        )
        assert torch.equal(keep, one_process(0.5, "3.attn")[some][:, positions][..., list(features)])
    return drop.keep(Drops.at(SEED, STEP, samples[0], positions), torch.Size((share // 2, width, FEATURES)))


def test_every_mesh_drops_what_one_process_drops() -> None:
    found = meshcomm.simulate(part_of_the_mask, dims={"dp": 2, "cp": 2, "tp": 2})
    for rank in range(0, 8, 2):
        assert torch.equal(found[rank], found[rank + 1]), "ranks along tp hold the same activations"
    for rank in range(4):
        assert not torch.equal(found[rank], found[rank + 4]), "ranks along dp hold other samples"


def test_masks_are_independent_and_uniform() -> None:
    """Bounds are five standard deviations; for the chi-square over byte values, a probability of about 1e-6."""
    shape = torch.Size((32, 64, 128))
    n, samples, positions = shape.numel(), torch.arange(32), torch.arange(64)

    def words(step: int, site: str, p: float = 0.5, first: int = 0) -> Tensor:
        return Dropout(p, site).keep(Drops.at(SEED, step, samples + first, positions), shape).double()

    for p in (0.5, 0.1, 0.9):
        assert abs(words(1, "0.attn", p).mean().item() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / n)
    here = words(1, "0.attn") - 0.5
    neighbours = {
        "feature": (here[..., 1:], here[..., :-1]),
        "position": (here[:, 1:], here[:, :-1]),
        "sample": (here[1:], here[:-1]),
        "far sample": (here, words(1, "0.attn", first=2**40) - 0.5),
        "step": (here, words(2, "0.attn") - 0.5),
        "site": (here, words(1, "0.ff") - 0.5),
        "layer": (here, words(1, "1.attn") - 0.5),
        # Sample and position swapped.
        "transposed": (here[:, :32], here[:, :32].transpose(0, 1) + torch.eye(32)[..., None] * 9),
    }
    for name, (a, b) in neighbours.items():
        apart = b.abs() < 1
        correlation = (a[apart] * b[apart]).mean().item() * 4
        assert abs(correlation) < 5 / math.sqrt(apart.sum().item()), name
    # The means of its rows and columns would show a weak mix.
    for axes in ((0, 1), (0, 2), (1, 2)):
        means = here.mean(axes)
        assert (means.abs() * 2 * math.sqrt(n / means.numel()) < 5).all()
    bits = _number(torch.arange(64)[:, None], torch.arange(2048)).view(torch.uint8)
    for byte in range(8):
        counts = torch.bincount(bits.view(-1, 8)[:, byte].int(), minlength=256).double()
        even = counts.sum() / 256
        assert ((counts - even) ** 2 / even).sum().item() < 255 + 5 * math.sqrt(2 * 255)
    ones = torch.stack([(bits >> bit & 1).double().mean() for bit in range(8)])
    assert ((ones - 0.5).abs() < 2.5 / math.sqrt(bits.numel())).all()


def test_a_seed_means_the_same_numbers_for_ever() -> None:
    drops = Drops.at(0, 1, torch.arange(3), torch.arange(2))
    assert drops.keys.tolist() == [-6043980424572639240, 5489981380185723003, -5527408334897693866]
    keep = Dropout(0.5, "0.attn").keep(drops, torch.Size((3, 2, 4)))
    assert "".join(map(str, keep.flatten().int().tolist())) == "001000011101010001101010"


def test_dropout_scales_what_it_keeps() -> None:
    drops = Drops.at(SEED, STEP, torch.arange(BATCH), torch.arange(SEQUENCE))
    for dtype in (torch.float64, torch.bfloat16):
        x = torch.full((BATCH, SEQUENCE, FEATURES), 3.0, dtype=dtype, requires_grad=True)
        y = Dropout(0.25, "3.attn")(x, drops)
        y.sum().backward()
        keep = one_process(0.25, "3.attn")
        assert y.dtype == dtype
        torch.testing.assert_close(y, torch.where(keep, 4.0, 0.0).to(dtype), rtol=0, atol=0)
        torch.testing.assert_close(x.grad, torch.where(keep, 4 / 3, 0.0).to(dtype))
    for off in (Dropout(0.0, "3.attn"), Dropout(0.25, "3.attn").eval()):
        assert off(x) is x


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(6, 6, dtype=torch.float64)
        self.drop = Dropout(0.4, "1.ff")

    def forward(self, x: Tensor, drops: Drops) -> Tensor:
        return x + self.drop(self.w(x).relu(), drops)


def test_a_block_that_runs_again_in_backward_drops_the_same() -> None:
    """This holds with another microbatch's forward in between, too, as in a pipeline."""
    torch.manual_seed(0)
    block = Blocks()
    x = torch.randn(2, 4, 5, 6, dtype=torch.float64)
    given = [Drops.at(0, 1, torch.arange(4) + 4 * micro, torch.arange(5)) for micro in (0, 1)]
    grads = []
    for again in (False, True):
        block.zero_grad()
        run: Any = functools.partial(checkpoint, block, use_reentrant=False) if again else block
        losses = [run(x[micro], given[micro]).square().sum() for micro in (0, 1)]
        for loss in losses:
            loss.backward()
        grads.append(block.w.weight.grad)
    assert torch.equal(*grads)  # type: ignore[arg-type]


def test_a_compiled_block_drops_the_same_and_compiles_once() -> None:
    torch.manual_seed(0)
    block = Blocks()
    graphs = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(block, fullgraph=True, backend=count)
    x = torch.randn(4, 5, 6, dtype=torch.float64)
    for step in (1, 2, 3):
        drops = Drops.at(0, step, torch.arange(4), torch.arange(5))
        assert torch.equal(compiled(x, drops), block(x, drops))
    assert len(graphs) == 1


def test_mistakes_with_dropout_are_named() -> None:
    samples, positions = torch.arange(2), torch.arange(3)
    drops = Drops.at(0, 1, samples, positions)
    with pytest.raises(TrainingError, match=r"p = 1\.0\n  expected: 0 <= p < 1"):
        Dropout(1.0, "0.attn")
    with pytest.raises(TrainingError, match=r"dropout 0\.attn does not know which samples"):
        Dropout(0.5, "0.attn")(torch.zeros(2, 3, 4))
    with pytest.raises(ShapeError, match=r"x of shape \(2, 4, 4\); 2 samples, 3 positions"):
        Dropout(0.5, "0.attn")(torch.zeros(2, 4, 4), drops)
    with pytest.raises(ShapeError, match=r"samples of shape \(2,\), torch\.float32"):
        Drops.at(0, 1, samples.float(), positions)
    with pytest.raises(ShapeError, match=r"positions of shape \(1, 3\), torch\.int64"):
        Drops.at(0, 1, samples, positions[None])
