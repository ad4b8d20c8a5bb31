"""Processes on Gloo are killed or stopped at random messages of a transfer, in one job."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

from meshcomm.errors import MeshcommError, TransferFailed
from meshcomm.mesh import Mesh
from meshcomm.testing.pool import Held, Limits, Pool
from meshcomm.transfer.agree import Staging
from meshcomm.transfer.link import Link
from meshcomm.transfer.run import Run
from meshcomm.transport.torch_private import default_store
from tests.forked_jobs import Job
from tests.transfer.deaths import Said, complaints, model_of, opened, transfers

_TIMEOUT_S = 5.0
# What the ranks may take after a timeout on a busy machine: questions to ranks that do not answer, and the next call.
_BUSY_S = 25.0
# What it may take them to open their meshes there.
_STARTS_S = 90.0
_TRIES = 3


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
    try:
        source, target, link = opened(_TIMEOUT_S)
        mesh = source if source.is_member else target
        model = model_of(source, target)
        weights = link.weights(model, staging=case.staging)
        for dim in mesh.dims:
            mesh.barrier(dim)
        link.mesh.barrier("link")
    except MeshcommError:
        return Held(None, reusable=False)  # on a busy machine, before the death
    if mesh.rank == case.rank:
        default_store().set("process", str(os.getpid()))
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
    if default_store().add("survivors", 1) == 7:
        # The pool need not wait for a stopped process.
        with suppress(ProcessLookupError):
            os.kill(int(default_store().get("process")), signal.SIGKILL)
    return Held(Survived(said, own, pushes, seconds), (source, target, link), reusable=False)


def _check(pool: Pool, case: Case) -> tuple[Counter[str], float]:
    """Return how often copies ended with which versions, and after how many seconds the last survivor had its error."""
    limits = Limits(_STARTS_S + _TIMEOUT_S + _BUSY_S, _TIMEOUT_S + _BUSY_S)
    for _ in range(_TRIES):
        ended = pool.call(partial(_live, case), ranks=8, limits=limits, failed=lambda value: True)
        if not any(end.state == "returned" and end.value is None for end in ended):
            break
    lives: dict[int, Survived] = {r: end.value for r, end in enumerate(ended) if end.state == "returned"}
    others = {r: (end.state, end.text) for r, end in enumerate(ended) if r not in lives and r != case.rank}
    assert not others, f"{case}: {others}"
    assert ended[case.rank].state == "died", case
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


# test_deaths.py has the deaths of either side in the simulator.
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(2, 9, "SIGKILL", "whole"), marks=pytest.mark.deep),
        Case(5, 17, "SIGKILL", "buckets"),
        pytest.param(Case(6, 12, "SIGSTOP", "whole"), marks=pytest.mark.deep),
    ],
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


# -- ranks that live, and leave -----------------------------------------------------------------------------


def _interrupted(staging: Staging) -> Held:
    """Rank 5 gets a KeyboardInterrupt in the second round of version 2."""
    source, target, link = opened(_TIMEOUT_S)
    weights = link.weights(model := model_of(source, target), staging=staging)

    def now(version: int) -> None:
        if version == 2 and target.is_member and target.rank == 5:
            rounds = iter(range(1))
            patch.object(Run, "_start", partialmethod(_start_or_raise, rounds, Run._start)).start()

    try:
        said: Any = transfers(source, weights, model, now)
    except KeyboardInterrupt as error:
        began = time.monotonic()
        with pytest.raises(TransferFailed, match=r"KeyboardInterrupt[^$]*reopen"):
            weights.pull()
        said = type(error).__name__, weights.version, time.monotonic() - began
    finally:
        patch.stopall()
    return Held(said, (source, target, link), reusable=False)


def _forks() -> Held:
    """The source pushes, and a process that it forks waits for the push."""
    source, target, link = opened(_TIMEOUT_S)
    weights = link.weights(model_of(source, target))
    if target.is_member:
        default_store().wait(["forked"])
        return Held(str(weights.pull()), (source, target, link), reusable=False)
    push = weights.push(1)
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        try:
            push.wait()
            text = "waited"
        except BaseException as error:
            text = type(error).__name__
        os.write(writes, text.encode())
        os._exit(0)
    os.waitpid(child, 0)
    if default_store().add("forks", 1) == 4:
        default_store().set("forked", "")
    push.wait()
    return Held(os.read(reads, 100).decode(), (source, target, link), reusable=False)


def test_a_forked_process_cannot_wait_for_a_push(pool: Pool) -> None:
    assert pool.run(_forks, ranks=8, timeout_s=_STARTS_S) == ["MeshClosed"] * 4 + ["1"] * 4


def _start_or_raise(run: Run, rounds: Iterator[int], start: Any, *args: Any) -> Any:
    if next(rounds, None) is None:
        raise KeyboardInterrupt
    return start(run, *args)


# test_deaths.py has both ways of staging in the simulator.
@pytest.mark.parametrize("staging", ["whole", pytest.param("buckets", marks=pytest.mark.deep)])
def test_an_interrupt_in_a_pull_names_the_rank(pool: Pool, staging: Staging) -> None:
    """Its copy keeps the old version, or refuses; every other rank says who left, and why."""
    said = pool.run(partial(_interrupted, staging), ranks=8, timeout_s=_STARTS_S + _TIMEOUT_S + _BUSY_S)
    kept = 1 if staging == "whole" else None
    kind, version, seconds = said.pop(5)
    assert (kind, version) == ("KeyboardInterrupt", kept) and seconds < 1
    for survivor in said:
        assert survivor.error[0] == "TransferFailed" and ("target", 5) in survivor.error[2], survivor.error
        assert "rank 5 of the target (copy=0 tp=1)" in survivor.error[1]
        assert "reopen" in survivor.again[1]
    assert [survivor.version for survivor in said[4:]] == [kept] * 3


def _held_up() -> Held:
    """The target never pulls the second version."""
    source, target, link = opened(_TIMEOUT_S)
    weights = link.weights(model_of(source, target))
    store = default_store()
    said: Any = None
    if target.is_member:
        weights.pull()
        store.wait(["held up"], timedelta(seconds=_TIMEOUT_S + _BUSY_S))  # it generates
    else:
        weights.push(1)
        weights.push(2)
        with pytest.raises(TransferFailed) as raised:
            weights.push(3)
        said = str(raised.value), raised.value.missing
        if store.add("refused", 1) == 4:
            store.set("held up", "")
    pushes = sum(thread.name == "meshcomm-push" for thread in threading.enumerate())
    return Held((said, pushes), (source, target, link), reusable=False)


@pytest.mark.faults
def test_the_next_push_names_who_holds_it_up(pool: Pool) -> None:
    said = pool.run(_held_up, ranks=8, timeout_s=_STARTS_S + _TIMEOUT_S + _BUSY_S)
    for text, missing in (words for words, _ in said[:4]):
        assert missing == tuple(("target", rank) for rank in range(4, 8))
        assert "rank 6 of the target (copy=1 tp=0)" in text and "within 5 s" in text
    assert not any(pushes for _, pushes in said)


_EXITS = """
import os, sys, time, torch, meshcomm
how = sys.argv[1]
source = meshcomm.init(dims={"a": 1}, ranks=[0], timeout_s=20, device="cpu")
target = meshcomm.init(dims={"b": 1}, ranks=[1], timeout_s=20, device="cpu")
link = meshcomm.link(source, target, bucket_bytes=4096)
weights = link.weights({"x": torch.full((100_000,), float(source.is_member))})
if target.is_member:
    if how != "changed":
        time.sleep(1)
    try:
        print("pulled", weights.pull())
    except meshcomm.MeshcommError as error:
        print(type(error).__name__)
    sys.stdout.flush()
    os._exit(0)
else:
    weights.push(3)
    if how == "changed":
        weights._before["x"] = "other"
    if how == "raises":
        raise ValueError("the program's own")
"""


def _variables(count: int) -> dict[str, str]:
    """The variables of a job whose store is in rank 0."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


def _process(variables: dict[str, str], rank: int, script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _run(script: str, count: int, *arguments: str) -> list[Any]:
    """Run a script as a job. Return each rank's stdout and stderr, and the exit codes."""
    variables = _variables(count)
    ranks = [_process(variables, rank, script, *arguments) for rank in range(count)]
    try:
        texts: list[Any] = [rank.communicate(timeout=80) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [*texts, [rank.returncode for rank in ranks]]


@pytest.mark.parametrize("how", [pytest.param("returns", marks=pytest.mark.deep), "changed", "raises"])
def test_a_program_ends_while_a_push_is_under_way(how: str, pool: Pool, tmp_path: Path) -> None:
    """The push is carried out. An error that nobody has waited for is printed, and is the exit code. After an error of the program,
    nothing waits.
    """
    variables = _variables(2)
    target = Job(pool, tmp_path, "-c", _EXITS, how, env={**variables, "RANK": "1", "LOCAL_RANK": "1"})
    # The end of its interpreter is what is tested.
    with _process(variables, 0, _EXITS, how) as source:
        try:
            _, told = source.communicate(timeout=80)
        finally:
            source.kill()
    if how == "raises":
        target.kill()
        assert "the program's own" in told and source.returncode == 1, (source.returncode, told)
        return
    code, out, _ = target.finish()
    assert (source.returncode, code) == (int(how == "changed"), 0), (source.returncode, code, told)
    assert out.strip() == ("pulled 3" if how == "returns" else "SourceChanged")
    assert ("nobody waited for the push of version 3" in told) == (how == "changed"), told


_STORE = """
import os, sys, time, torch, meshcomm
from functools import partial
source = meshcomm.init(dims={"a": 2}, ranks=[0, 1], timeout_s=5, device="cpu")
target = meshcomm.init(dims={"b": 2}, ranks=[2, 3], timeout_s=5, device="cpu")
link = meshcomm.link(source, target, bucket_bytes=64)
x = torch.full((100,), 1.0 if source.is_member else -1.0)
weights = link.weights({"x": x}, staging=sys.argv[1])

def counted(call, left, *args, **keys):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), 9)
    return call(*args, **keys)

try:
    for version in (1, 2):
        if target.is_member:
            weights.pull()
            continue
        x.fill_(version)
        if version == 2 and source.rank == 0:
            transport, store, left = link.mesh._state.transports["link"], link.mesh.store, [int(sys.argv[2])]
            for owner, name in ((transport, "start"), (transport, "start_p2p"), (store, "_guarded")):
                setattr(owner, name, partial(counted, getattr(owner, name), left))
        weights.push(version).wait()
    print("no error")
except meshcomm.MeshcommError as error:
    print(type(error).__name__)
print(weights.version, x.unique().tolist())
os._exit(0)
"""


@pytest.mark.faults
@pytest.mark.parametrize("message", [1, 3, 6, 9])
@pytest.mark.parametrize("staging", ["whole", "buckets"])
def test_the_store_is_lost_with_a_rank(staging: Staging, message: int) -> None:
    """Nobody can be asked what was decided: every rank has an error, and a whole version or refuses to be read."""
    *texts, codes = _run(_STORE, 4, staging, str(message))
    assert codes == [-signal.SIGKILL, 0, 0, 0], texts
    for number, (out, told) in enumerate(texts[1:], start=1):
        kind, held = out.splitlines()
        assert kind == "TransferFailed", (number, out, told)
        allowed = ["1 [1.0]", "2 [2.0]", "None"] if number > 1 else ["1 [2.0]"]
        assert held.startswith(tuple(allowed)), (number, held)
