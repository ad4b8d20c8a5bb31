"""Processes on Gloo are killed or stopped at random messages of a transfer, in one job."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from meshcomm.mesh import Mesh
from meshcomm.testing.pool import Held, Limits, Pool
from meshcomm.transfer.link import Link
from meshcomm.transfer.weights import Staging
from tests.transfer.deaths import Said, complaints, model_of, opened, transfers

_TIMEOUT_S = 5.0
# What the ranks may take after a timeout on a busy machine: questions to ranks that do not answer, and the next call.
_BUSY_S = 25.0


class Case(NamedTuple):
    """A death: of which rank, before which message or call on the store, by which signal."""

    rank: int
    message: int
    how: str
    staging: Staging


class Survived(NamedTuple):
    """What a survivor says. own: the dims of its own mesh that have failed since. pushes: threads that are left."""

    said: Said
    own: list[str]
    pushes: int
    seconds: float


def _arm(case: Case, link: Link, target: Mesh) -> None:
    """From now on, count this rank's messages along the link and its calls on the store, and end it at one of them."""
    left = [case.message]

    def counted(call: Any, *args: Any, **keys: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), getattr(signal, case.how))
        return call(*args, **keys)

    transport: Any = link.mesh._state.transports["link"]
    stores: list[Any] = [link.mesh.store, target.store]
    for object_, name in ((transport, "start"), (transport, "start_p2p"), *((s, "_guarded") for s in stores)):
        setattr(object_, name, partial(counted, getattr(object_, name)))


def _live(case: Case) -> Held:
    source, target, link = opened(_TIMEOUT_S)
    mesh = source if source.is_member else target
    model = model_of(source, target)
    weights = link.weights(model, staging=case.staging)
    for dim in mesh.dims:
        mesh.barrier(dim)
    link.mesh.barrier("link")
    if mesh.rank == case.rank:
        _arm(case, link, target)
    began = time.monotonic()
    said = transfers(source, weights, model)
    if mesh.rank == case.rank:
        os.kill(os.getpid(), getattr(signal, case.how))
    seconds = time.monotonic() - began
    own = []
    for dim in mesh.dims:
        if case.rank not in mesh.ranks(dim):
            total = mesh.all_reduce(dim, torch.ones(3))
            if total.tolist() != [mesh.size(dim)] * 3:
                own.append(dim)
    pushes = sum(thread.name == "meshcomm-push" for thread in threading.enumerate())
    return Held(Survived(said, own, pushes, seconds), (source, target, link), reusable=False)


def _check(pool: Pool, case: Case) -> tuple[Counter[str], float]:
    """Return how often copies ended with which versions, and after how many seconds the last survivor had its error."""
    limits = Limits(_TIMEOUT_S + 60.0, _TIMEOUT_S + _BUSY_S)
    ended = pool.call(partial(_live, case), ranks=8, limits=limits, failed=lambda value: True)
    lives: dict[int, Survived] = {r: end.value for r, end in enumerate(ended) if end.state == "returned"}
    others = {r: (end.state, end.text) for r, end in enumerate(ended) if r not in lives and r != case.rank}
    assert not others, f"{case}: {others}"
    assert ended[case.rank].state == ("died" if case.how == "SIGKILL" else "late"), case
    wrong = complaints({rank: life.said for rank, life in lives.items()}, case.rank, case.staging)
    wrong += [f"rank {r}: its own {life.own} failed" for r, life in lives.items() if life.own]
    wrong += [f"rank {r}: {life.pushes} threads are left" for r, life in lives.items() if life.pushes]
    assert not wrong, f"{case}: " + "\n".join(wrong)
    outcomes: Counter[str] = Counter()
    for copy in ((4, 5), (6, 7)):
        outcomes[str([lives[rank].said.version if rank in lives else "lost" for rank in copy])] += 1
    return outcomes, max(life.seconds for life in lives.values())


def _cases(count: int, seed: int) -> Iterator[Case]:
    draw = random.Random(seed)
    for number in range(count):
        rank = number % 8
        message = draw.randint(1, 18 if rank < 4 else 40)
        staging: Staging = "whole" if draw.random() < 0.5 else "buckets"
        yield Case(rank, message, "SIGSTOP" if number % 6 == 5 else "SIGKILL", staging)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    ranks = Pool(("torch", "torch.distributed", "torch.distributed.tensor", "meshcomm.mesh"))
    yield ranks
    ranks.close()


@pytest.mark.parametrize(
    "case",
    [Case(2, 9, "SIGKILL", "whole"), Case(5, 17, "SIGKILL", "buckets"), Case(6, 12, "SIGSTOP", "whole")],
    ids=str,
)
def test_three_deaths(pool: Pool, case: Case) -> None:
    """A source is killed, a target is killed, a target is stopped."""
    _check(pool, case)


@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(6))
def test_deaths_at_random_messages(pool: Pool, block: int, record_property: Any) -> None:
    """Eight deaths, one of each rank."""
    outcomes: Counter[str] = Counter()
    slowest = 0.0
    for case in list(_cases(48, 2026))[8 * block : 8 * block + 8]:
        ended, seconds = _check(pool, case)
        outcomes += ended
        slowest = max(slowest, seconds)
    record_property("measured", f"{dict(outcomes)}, slowest {slowest:.1f} s")
