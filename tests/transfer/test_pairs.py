"""`link.transfer` between random pairs of layouts, bit for bit what torch.chunk of the whole tensor gives."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import meshcomm
from meshcomm.testing import Pool
from meshcomm.transfer import plan
from tests.transfer.oracle import Case, Grid, Sectioned
from tests.transfer.pairs import check_pair, check_pairs_on_process, poisoned, random_whole, same_bits


@pytest.mark.parametrize("least_striped_bytes", [0, 64 << 10])
@pytest.mark.parametrize("block", range(13), ids="block{}".format)
@pytest.mark.deep_cases("block[1-9]")
def test_pairs_in_the_simulator(
    monkeypatch: pytest.MonkeyPatch, block: int, least_striped_bytes: int
) -> None:
    monkeypatch.setattr(plan, "_LEAST_STRIPED_BYTES", least_striped_bytes)
    for seed in range(block * 20, block * 20 + 20):
        meshcomm.simulate(lambda mesh: check_pair(seed, 8, mesh.rank), dims={"all": 8}, schedule_seed=seed)


def test_pairs_on_processes(pool: Pool) -> None:
    pool.run(check_pairs_on_process, range(1000, 1012), 0, ranks=6)


@pytest.mark.parity
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [4, 6, 8])
def test_many_pairs_on_processes(pool: Pool, ranks: int) -> None:
    """300 pairs, each set on ranks that are forked once."""
    seeds = range(ranks * 10_000, ranks * 10_000 + 100)
    pool.run(check_pairs_on_process, seeds, 0 if ranks == 8 else 64 << 10, ranks=ranks, timeout_s=1000)


def _case(dims: dict[str, int], order: list[int], n: list[str], k: list[str]) -> Case:
    """Return a tensor of shape (11, 4), whose axes are split along some dims."""
    rows, columns = ([(dim, dims[dim]) for dim in split] for split in (n, k))
    return Case(Grid(dims, order), [[Sectioned("n", 11, rows)], [Sectioned("k", 4, columns)]], {})


CIRCLE = [
    _case({"tp": 2, "fsdp": 2}, [2, 0, 3, 1], ["tp", "fsdp"], []),
    _case({"copy": 2, "ep": 3}, [2, 3, 4, 5, 6, 7], [], ["ep"]),
    _case({"tp": 5}, [7, 6, 5, 1, 0], ["tp"], []),
]


def test_three_links_at_once_and_back() -> None:
    """A -> B -> C -> A returns what A had, in poisoned memory; the same meshes have a link each way."""

    def program(mesh: meshcomm.Mesh) -> None:
        meshes = [
            meshcomm.init(dims=dims, ranks=sorted(order), rank_order=order, device="cpu")
            for dims, order in (case.grid for case in CIRCLE)
        ]
        ways = [(0, 1), (1, 2), (2, 0), (1, 0)]
        links = [meshcomm.link(meshes[at], meshes[to], bucket_bytes=20) for at, to in ways]
        draw = random.Random(mesh.rank)
        for turn in range(3):
            whole = random_whole([11, 4], torch.bfloat16, turn)
            parts = [
                case.part(whole, case.grid.order.index(mesh.rank)) if mesh.rank in case.grid.order else None
                for case in CIRCLE
            ]
            held = [*parts]
            for link, (at, to) in zip(links, ways, strict=True):
                if link.is_member:
                    wanted = parts[to]
                    out = None if wanted is None else poisoned(wanted, draw)
                    held[to] = link.transfer(held[at], out, f"{CIRCLE[at].text} -> {CIRCLE[to].text}")
                    assert wanted is None or (out is not None and same_bits(out, wanted))
        for each in (*links, *meshes):
            each.close()

    meshcomm.simulate(program, dims={"all": 8})


@pytest.mark.parametrize("bucket_bytes", [60, 200, 1 << 20])
def test_stripes(monkeypatch: pytest.MonkeyPatch, bucket_bytes: int) -> None:
    """Copies along dims of any kind gather stripes, also of a tensor that is larger than a bucket, or that comes alone or last."""
    monkeypatch.setattr(plan, "_LEAST_STRIPED_BYTES", 0)

    def program(mesh: meshcomm.Mesh) -> None:
        source = meshcomm.init(dims={"tp": 3}, ranks=range(3), device="cpu")
        keys: dict[str, Any] = {
            "dims": {"a": 2, "b": 2},
            "merge": {"ab": ["a", "b"]},
            "views": {"v": {"all": 4}},
        }
        target = meshcomm.init(**keys, ranks=range(4, 8), device="cpu")
        whole = torch.arange(42 * 7.0).view(42, 7)
        for stripes in (["a", "b"], ["ab"], ["all"]):
            with meshcomm.link(source, target, stripes=stripes, bucket_bytes=bucket_bytes) as link:
                for side in ("n k", "n/a k", "n k/ab", "n/all k", "n/b k/a"):
                    x = out = wanted = None
                    if source.is_member:
                        x = whole.chunk(3)[mesh.rank].clone()
                    elif target.is_member:
                        wanted = whole
                        for axis, split in enumerate(side.split()):
                            for dim in split.split("/")[1:]:
                                wanted = wanted.chunk(target.size(dim), axis)[target.coord(dim)]
                        out = torch.full_like(wanted, torch.nan, memory_format=torch.contiguous_format)
                    if link.is_member:
                        link.transfer(x, out, f"n/tp k -> {side}")
                    assert wanted is None or (out is not None and same_bits(out, wanted)), (stripes, side)

    meshcomm.simulate(program, dims={"all": 8})


def test_values_that_memory_does_not_hold() -> None:
    """torch keeps that a tensor is a conjugate, or negated, as a flag; a cast changes what is sent; torch writes tensors of inference mode only in this mode."""

    def program(mesh: meshcomm.Mesh) -> None:
        whole = torch.view_as_complex(torch.arange(8.0).view(4, 2))
        source = meshcomm.init(dims={"one": 1}, ranks=[0], device="cpu")
        target = meshcomm.init(dims={"one": 1}, ranks=[1], device="cpu")
        plain: Callable[[Tensor], Tensor] = torch.clone
        imaginary: Callable[[Tensor], Tensor] = lambda x: x.conj().imag  # noqa: E731
        with source, target, meshcomm.link(source, target) as link:
            for at, to in (
                (torch.conj, plain),
                (plain, torch.conj),
                (torch.conj, torch.conj),
                (imaginary, imaginary),
            ):
                out = to(torch.zeros(4, dtype=whole.dtype))
                link.transfer(
                    at(whole) if source.is_member else None, out if target.is_member else None, "n -> n"
                )
                assert source.is_member or torch.equal(out, at(whole))
            with torch.inference_mode():
                x, out = whole.clone(), torch.zeros_like(whole)
            link.transfer(x if source.is_member else None, out if target.is_member else None, "n -> n")
            assert source.is_member or torch.equal(out, whole)
            model = {"w": torch.arange(4.0) if source.is_member else torch.zeros(4, dtype=torch.bfloat16)}
            weights = link.weights(model, cast=torch.bfloat16 if source.is_member else None)
            if source.is_member:
                weights.push(version=1).wait()
            else:
                weights.pull()
                assert torch.equal(model["w"], torch.arange(4.0).bfloat16())

    meshcomm.simulate(program, dims={"all": 2})
