"""A rank is lost at any operation of a transfer of weights: each copy has a whole version, or refuses to be read."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest

import meshcomm
from meshcomm.errors import PeerLost, RankFailed
from meshcomm.mesh import Mesh
from meshcomm.mesh.runtime import WORLD
from meshcomm.transfer.agree import Staging
from meshcomm.transfer.run import Run
from tests.transfer.deaths import (
    COPIES,
    TARGET,
    VERSIONS,
    Said,
    complaints,
    equal,
    model_of,
    opened,
    transfers,
    wanted,
)

STAGINGS: tuple[Staging, ...] = ("whole", "buckets")
_POLLS = 20_000


def simulated(
    staging: Staging, lose: dict[int, int], seed: int = 0
) -> tuple[dict[int, Said], dict[int, tuple[int, int]]]:
    """Return what each rank says, and the first and the last operation of its transfers."""
    said: dict[int, Said] = {}
    spans: dict[int, tuple[int, int]] = {}
    survivors = {*range(8)} - {*lose}

    def program(mesh: Mesh) -> None:
        world: Any = WORLD.get()
        source, target, link = opened(mesh.plan.defaults.timeout_s)
        model = model_of(source, target)
        weights = link.weights(model, staging=staging)
        mesh.barrier("all")
        begin = world._actor.operations
        outcome = transfers(source, weights, model)
        spans[mesh.rank] = begin + 1, world._actor.operations
        said[mesh.rank] = outcome
        # A rank that ends makes the simulator end the others.
        for _ in range(_POLLS):
            if survivors <= said.keys():
                break
            time.sleep(1e-6)
        else:
            raise AssertionError(f"ranks {survivors - said.keys()} hang")

    try:
        meshcomm.simulate(program, dims={"all": 8}, lose=lose or None, schedule_seed=seed)
    except RankFailed as error:
        if "cannot be replaced" not in str(error):
            raise
    return said, spans


@pytest.fixture(scope="module")
def spans() -> dict[Staging, dict[int, tuple[int, int]]]:
    """The operations of each rank's transfers, by staging. The same schedule has the same operations until a rank is lost."""
    return {staging: simulated(staging, {})[1] for staging in STAGINGS}


@pytest.mark.parametrize("staging", STAGINGS)
def test_without_a_death_all_have_the_last_version(staging: Staging) -> None:
    """The comparison itself, without a death: nothing is wrong, and all ranks have the last version."""
    said, _ = simulated(staging, {})
    assert {rank: one.version for rank, one in said.items()} == dict.fromkeys(range(8), VERSIONS[-1])
    assert all(equal(said[rank].values, wanted(rank, VERSIONS[-1])) for rank in TARGET)


def _check(lost: int, staging: Staging, operations: range, seed: int = 0) -> Counter[str]:
    """Lose a rank at each of some operations; return how often the copies ended in which versions."""
    outcomes: Counter[str] = Counter()
    for operation in operations:
        said, _ = simulated(staging, {lost: operation}, seed)
        wrong = complaints(said, lost, staging)
        assert not wrong, f"rank {lost} was lost at operation {operation}, seed {seed}: " + "\n".join(wrong)
        for copy in COPIES:
            outcomes[str([said[rank].version if rank in said else "lost" for rank in copy])] += 1
    return outcomes


# A rank of the source, and one of each copy of the target. The other ranks have the same part in the transfer.
@pytest.mark.parametrize("lost", range(8))
@pytest.mark.deep_cases(r"\[[12357]\]")
def test_some_deaths(lost: int, spans: dict[Staging, dict[int, tuple[int, int]]]) -> None:
    """Each rank is lost at a few operations, with both stagings."""
    for number, staging in enumerate(STAGINGS):
        begin, end = spans[staging][lost]
        _check(lost, staging, range(begin + (lost + number) % 7, end + 1, 13))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("staging", STAGINGS)
def test_one_rank_fails_when_all_others_have_every_byte(staging: Staging, seed: int) -> None:
    """Its copy keeps the old version, or refuses; the other copy may have the new one. Every rank names it."""
    said: dict[int, Said] = {}

    def program(mesh: Mesh) -> None:
        source, target, link = opened(mesh.plan.defaults.timeout_s)
        weights = link.weights(model := model_of(source, target), staging=staging)
        confirm = weights._unchanged

        def fail(version: int, *hashes: Any) -> None:
            confirm(version, *hashes)
            if mesh.rank == 5 and version == 2:
                raise PeerLost("lost a peer", missing=(5,))

        weights._unchanged = fail
        said[mesh.rank] = transfers(source, weights, model)

    meshcomm.simulate(program, dims={"all": 8}, schedule_seed=seed)
    wrong = complaints({rank: one for rank, one in said.items() if rank != 5}, 5, staging)
    assert not wrong, "\n".join(wrong)
    assert {said[4].version, said[5].version} == {1 if staging == "whole" else None}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("staging", STAGINGS)
def test_one_rank_fails_before_others_write(staging: Staging, seed: int, monkeypatch: Any) -> None:
    """Ranks of a copy either all refuse to be read, or none has begun to write. All others fail among the messages."""
    said: dict[int, Said] = {}
    versions: dict[int, int] = {}
    carry = Run.__call__

    def fail(run: Run, checks: bool = False) -> dict[int, int]:
        if versions[run._mesh.coord("link")] == 2:
            raise PeerLost("lost a peer", missing=(5,))
        return carry(run, checks)

    monkeypatch.setattr(Run, "__call__", fail)

    def program(mesh: Mesh) -> None:
        source, target, link = opened(mesh.plan.defaults.timeout_s)
        weights = link.weights(model := model_of(source, target), staging=staging)
        if mesh.rank == 5:
            agree = weights._agreed

            def fail_early(push: Any) -> int:
                if agree(push) == 2:
                    raise PeerLost("lost a peer", missing=(5,))
                return 1

            weights._agreed = fail_early
        said[mesh.rank] = transfers(
            source, weights, model, lambda version: versions.update({mesh.rank: version})
        )

    meshcomm.simulate(program, dims={"all": 8}, schedule_seed=seed)
    wrong = complaints({rank: one for rank, one in said.items() if rank != 5}, 5, staging)
    assert not wrong, "\n".join(wrong)
    assert said[4].version == said[5].version
    assert said[4].version == 1 or staging == "buckets"


@pytest.mark.faults
@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("lost", range(8))
@pytest.mark.parametrize("seed", range(2))
def test_every_death(lost: int, staging: Staging, seed: int, record_property: Any) -> None:
    """Each rank is lost at each operation."""
    begin, end = simulated(staging, {}, seed)[1][lost]
    outcomes = _check(lost, staging, range(begin, end + 1), seed)
    record_property("measured", f"rank {lost}, {staging}, {end + 1 - begin} deaths: {dict(outcomes)}")
