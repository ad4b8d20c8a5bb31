"""What does not fit together is an error on every rank of both sides, which says who differs in what; the link stays usable."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import pytest
import torch

import meshcomm
from meshcomm import Mesh
from meshcomm.errors import (
    LayoutError,
    MeshClosed,
    MeshcommError,
    MeshMismatchError,
    TransferFailed,
    TransferMismatch,
    UnknownDim,
)
from meshcomm.testing import Pool
from tests.transfer.mismatches import MISMATCHES, PATTERN, Rank, W, errors, errors_on_process, sides

ON_PROCESSES = [
    "a pattern",
    "a syntax error",
    "None",
    "a dtype",
    "weights on one rank",
    "versions",
    "a meta tensor",
]


def check(told: list[dict[str, tuple[str, str]]], name: str) -> None:
    """Compare the errors of all ranks with the table."""
    for of_rank in told:
        assert name in of_rank, "a rank raised nothing"
        kind, text = of_rank[name]
        assert kind == "TransferMismatch"
        for expected in MISMATCHES[name][1]:
            assert re.search(expected, text), text


@pytest.fixture(scope="module")
def told() -> list[dict[str, tuple[str, str]]]:
    return meshcomm.simulate(lambda mesh: errors(mesh.rank), dims={"all": 8})


@pytest.mark.parametrize("name", MISMATCHES)
def test_every_rank_learns_of_a_mismatch(told: list[dict[str, tuple[str, str]]], name: str) -> None:
    check(told, name)


def test_mismatches_on_processes(pool: Pool) -> None:
    told = pool.run(errors_on_process, ON_PROCESSES, ranks=8)
    for name in ON_PROCESSES:
        check(told, name)


@pytest.mark.parametrize("setting", ["bucket_bytes", "stripes"])
def test_a_setting_of_a_link_that_differs(setting: str) -> None:
    value = {"bucket_bytes": 7, "stripes": ["copy"]}[setting]

    def program(mesh: Mesh) -> None:
        with sides() as (source, target):
            settings = {setting: value} if mesh.rank == 5 else {}
            with meshcomm.link(source, target, **settings) as link:
                rank = Rank(mesh.rank, source, link)
                for call in (rank.transfer, lambda: rank.weights(W)):
                    with pytest.raises(
                        TransferMismatch, match=rf"{setting} differs: .* on rank 5 of the target"
                    ):
                        call()

    meshcomm.simulate(program, dims={"all": 8})


@pytest.mark.parametrize(
    "setting",
    [
        {"bucket_bytes": 0},
        {"bucket_bytes": 1.5},
        {"stripes": ["tp", "fsdp"]},
        {"stripes": "fsdp"},
        {"stripes": 5},
    ],
)
def test_a_setting_of_a_link_that_is_wrong(setting: dict[str, Any]) -> None:
    def program(mesh: Mesh) -> None:
        with (
            sides() as (source, target),
            pytest.raises((LayoutError, UnknownDim), match=r"bucket_bytes|fsdp|5"),
        ):
            meshcomm.link(source, target, **setting)

    meshcomm.simulate(program, dims={"all": 8})


def test_a_closed_link() -> None:
    def program(mesh: Mesh) -> None:
        with sides() as (source, target):
            link = meshcomm.link(source, target)
            rank = Rank(mesh.rank, source, link)
            weights = rank.weights(W)
            link.close()
            pulled = (lambda: weights.push(version=1).wait()) if rank.is_source else weights.pull
            for call in (rank.transfer, lambda: rank.weights(W), pulled):
                for _ in range(2):
                    with pytest.raises(MeshClosed, match="closed"):
                        call()
        with pytest.raises(MeshClosed, match="the source of a link is closed"):
            meshcomm.link(source, target)

    meshcomm.simulate(program, dims={"all": 8})


def test_other_meshes_on_some_ranks() -> None:
    def program(mesh: Mesh) -> None:
        with sides() as (source, target):
            swapped = mesh.rank == 2
            with pytest.raises(MeshMismatchError, match=r"-> Layout.* on rank 2\b") as caught:
                meshcomm.link(*((target, source) if swapped else (source, target)))
            assert caught.value.mismatched_ranks == (2,)
            meshcomm.link(source, target).close()

    meshcomm.simulate(program, dims={"all": 8})


@pytest.mark.parametrize("which", [0, 1])
def test_what_is_no_mesh(which: int) -> None:
    def program(mesh: Mesh) -> None:
        with sides() as both:
            for wrong in ("a", both[0].layout):
                given: list[Any] = [*both]
                given[which] = wrong
                with pytest.raises(LayoutError, match=f"the {('source', 'target')[which]} of a link is a"):
                    meshcomm.link(*given)

    meshcomm.simulate(program, dims={"all": 8})


def test_a_rank_of_both_sides_without_into() -> None:
    def program(mesh: Mesh) -> None:
        with (
            meshcomm.link(mesh, mesh) as link,
            pytest.raises(TransferMismatch, match=r"both sides: pass .* into="),
        ):
            link.weights(W)

    meshcomm.simulate(program, dims={"all": 2})


def test_the_hint_after_a_failure_works_within_one_job() -> None:
    """A link of one job cannot be reopened."""

    def program(mesh: Mesh) -> None:
        with sides() as (source, target):
            link = meshcomm.link(source, target)
            rank = Rank(mesh.rank, source, link)
            weights = rank.weights(W)
            if rank.number == 7:
                link.mesh._state.close(compare=False)
                return
            failed = (lambda: weights.push(version=2).wait()) if rank.is_source else weights.pull
            for _ in range(2):
                with pytest.raises(TransferFailed, match=r"meshcomm.link\(source, target\) again") as caught:
                    failed()
                assert "link.reopen" not in str(caught.value)
                assert caught.value.version == (2 if rank.is_source else None)

    with suppress(MeshcommError):
        meshcomm.simulate(program, dims={"all": 8})


def test_a_rank_that_skips_a_call() -> None:
    def program(mesh: Mesh) -> None:
        with sides() as (source, target), meshcomm.link(source, target) as link:
            if mesh.rank != 3:
                Rank(mesh.rank, source, link).transfer()

    with pytest.raises(MeshcommError, match="rank 3"):
        meshcomm.simulate(program, dims={"all": 8})


def test_a_link_that_only_some_ranks_make() -> None:
    def program(mesh: Mesh) -> None:
        with sides() as (source, target):
            if mesh.rank != 3:
                meshcomm.link(source, target).close()

    with pytest.raises(MeshcommError, match="rank 3"):
        meshcomm.simulate(program, dims={"all": 8})


def test_memory_of_both_sides() -> None:
    """x may be out where it is the same part; every other overlap is refused."""

    def program(mesh: Mesh) -> None:
        whole = torch.arange(8.0)
        one = meshcomm.init(dims={"tp": 4}, ranks=range(4), device="cpu")
        with one, meshcomm.link(one, one) as link:
            if one.is_member:
                memory = whole.clone()
                part = memory[2 * mesh.rank :][:2]
                version = part._version
                assert link.transfer(part, part, "n/tp -> n/tp") is part
                assert part.equal(whole[2 * mesh.rank :][:2]) and part._version == version
                overlaps = [(memory, part, "n -> n/tp"), (memory[0:2], memory[1:3], "n/tp -> n/tp")]
                for x, out, pattern in overlaps:
                    with pytest.raises(
                        TransferMismatch, match=r"ranks 1 2 3 of the source .*: x and out share"
                    ):
                        link.transfer(x if mesh.rank else x.clone(), out, pattern)
                # Every second element of the same memory shares no byte.
                between = torch.zeros(4)
                between[::2] = part
                link.transfer(between[::2], between[1::2], "n/tp -> n/tp")
                assert between[1::2].equal(part)

    meshcomm.simulate(program, dims={"all": 8})


def test_dims_that_do_not_go_together() -> None:
    """A merged dim and one of its own dims split no tensor together, nor do dims of a view and of the base."""

    def program(mesh: Mesh) -> None:
        one = meshcomm.init(
            dims={"xa": 2, "xb": 2}, merge={"x": ["xa", "xb"]}, views={"v": {"all": 4}}, device="cpu"
        )
        with one, meshcomm.link(one, one) as link:
            for pattern, text in (
                ("n/x k/xa -> n k", "dims that split the same tensor overlap"),
                ("n/xa k/all -> n k", "do not belong to one factorization"),
            ):
                with pytest.raises(TransferMismatch, match=f"source: .*{text}"):
                    link.transfer(torch.zeros(1, 2), torch.zeros(4, 4), pattern)

    meshcomm.simulate(program, dims={"all": 4})


def test_tensors_of_autograd() -> None:
    """Values are sent without their graph. A parameter is written without gradients, as by an optimizer."""

    def program(mesh: Mesh) -> None:
        with sides() as (source, target), meshcomm.link(source, target) as link:
            if source.is_member:
                x = torch.full((2, 4), 3.0, requires_grad=True) * 2
                link.transfer(x, None, PATTERN)
            else:
                parameter = torch.nn.Parameter(torch.zeros(8, 2))
                with torch.no_grad():
                    link.transfer(None, parameter, PATTERN)
                assert (parameter == 6).all() and parameter.grad_fn is None

    meshcomm.simulate(program, dims={"all": 8})
