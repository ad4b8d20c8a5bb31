"""Exact verdicts of planted bugs, the same programs without the bug, and how verdicts are found."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import meshcomm
from meshcomm.errors import (
    CallMismatchError,
    DeadlockError,
    HandleNotWaited,
    MeshcommError,
    RankFailed,
    UnmatchedMessage,
    UnsupportedOp,
)
from meshcomm.mesh import Mesh
from meshcomm.simulator import scheduler
from meshcomm.watching.waits import find_circle
from tests.simulator import planted_bugs
from tests.simulator.planted_bugs import DIMS, MERGE, PROGRAMS, one

FILE = Path(planted_bugs.__file__)
LINES = FILE.read_text().splitlines()


def marked(text: str) -> str:
    """`text` with each line number of planted_bugs.py replaced by the mark at the end of the line."""

    def mark(match: re.Match[str]) -> str:
        line = LINES[int(match[1]) - 1]
        assert "  # " in line, f"a verdict names line {match[1]}, which has no mark: {line}"
        return "@" + line.rpartition("# ")[2]

    return re.sub(re.escape(str(FILE)) + r":(\d+)", mark, text)


def expected() -> dict[str, str]:
    sections = (Path(__file__).parent / "planted_verdicts.txt").read_text().split("== ")[1:]
    found = {}
    for section in sections:
        name, _, text = section.partition("\n")
        found[name] = text.rstrip("\n")
    return found


VERDICTS = expected()


def verdict_of(fn: Callable[..., Any], *args: Any, **options: Any) -> MeshcommError:
    options = {"dims": DIMS, "merge": MERGE, **options}
    with pytest.raises(MeshcommError) as caught:
        meshcomm.simulate(fn, args=args, **options)
    return caught.value


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_planted_bug_gets_its_verdict_and_the_corrected_program_passes(program: Any) -> None:
    before = threading.active_count()
    error = verdict_of(program, True)
    text = f"{type(error).__name__}: {error}".replace("schedule seed 0 reproduces it", "SEED")
    assert marked(text) == VERDICTS[program.__name__]
    assert threading.active_count() <= before, "threads of ranks are left"
    assert len(meshcomm.simulate(program, dims=DIMS, merge=MERGE, args=(False,))) == 4


def test_every_planted_bug_has_a_verdict_and_every_verdict_a_bug() -> None:
    assert len(PROGRAMS) >= 20
    assert sorted(program.__name__ for program in PROGRAMS) == sorted(VERDICTS)


def test_a_bug_that_any_schedule_has_is_found_by_every_schedule() -> None:
    for seed, program in enumerate(PROGRAMS, start=1):
        error = verdict_of(program, True, schedule_seed=seed)
        kind = VERDICTS[program.__name__].partition(":")[0]
        assert type(error).__name__ == kind, program.__name__
        assert f"schedule seed {seed} reproduces it" in str(error)


def test_what_a_verdict_carries_for_programs() -> None:
    crossed = verdict_of(planted_bugs.crossed_order_on_two_dims, True)
    assert isinstance(crossed, DeadlockError)
    assert crossed.circle == (0, 2, 3, 1) and crossed.waiting == (0, 1, 2, 3)
    dtype = verdict_of(planted_bugs.other_dtype, True)
    assert isinstance(dtype, CallMismatchError) and dtype.mismatched_ranks == (0, 2)
    unsent = verdict_of(planted_bugs.missing_send, True)
    assert isinstance(unsent, UnmatchedMessage) and unsent.waiting == (2, 3)
    dropped = verdict_of(planted_bugs.dropped_handle, True)
    assert isinstance(dropped, HandleNotWaited) and dropped.mismatched_ranks == (0, 1, 2, 3)
    raised = verdict_of(planted_bugs.exception_on_one_rank, True)
    assert isinstance(raised, RankFailed)
    assert list(raised.by_rank) == [2] and raised.__cause__ is raised.by_rank[2]
    assert isinstance(raised.__cause__, ValueError)


def test_a_deadlock_of_64_ranks_is_proved() -> None:
    def ring(mesh: Mesh) -> None:
        mesh.send("ring", one(), dst=(mesh.coord("ring") + 1) % 64)

    error = verdict_of(ring, dims={"ring": 64}, merge=None)
    assert isinstance(error, DeadlockError) and error.circle == tuple(range(64))
    assert "and 48 more" in str(error)


def test_a_mismatch_is_told_when_some_never_come() -> None:
    def program(mesh: Mesh) -> None:
        if mesh.rank == 0:
            mesh.all_reduce("all", one())
        elif mesh.rank == 1:
            mesh.all_gather("all", one())

    text = str(verdict_of(program))
    assert re.search(
        r'ranks differ in call 1 along "all": ranks 0 1 do not agree; nothing was sent\n'
        r"  given:    rank 0: all_reduce\(.*\) at .*\n"
        r"            rank 1: all_gather\(.*\) at .*\n"
        r"            ranks 2 3: did not arrive\n"
        r"  expected: the same calls on every rank of the group\n",
        text,
    ), text


def test_one_seed_is_one_schedule() -> None:
    def first_come(mesh: Mesh) -> Any:
        # Wrong: a rank does not know which ranks reached the store first.
        root = 0 if mesh.store.add("come", 1) <= 2 else 1
        return mesh.broadcast("tp", one(mesh.rank), src=root)

    def verdict(seed: int) -> str:
        try:
            meshcomm.simulate(first_come, dims=DIMS, schedule_seed=seed)
        except CallMismatchError as error:
            return str(error)
        return ""

    failed = {seed: text for seed in range(20) if (text := verdict(seed))}
    assert failed
    for seed, text in failed.items():
        assert f"schedule seed {seed} reproduces it" in text and verdict(seed) == text


def test_ranks_are_unwound_through_their_finally_blocks_and_broad_excepts() -> None:
    cleaned: list[int] = []

    def program(mesh: Mesh) -> None:
        try:
            try:
                mesh.all_reduce("tp" if mesh.rank in (1, 2) else "dp", one())
            except Exception:
                raise AssertionError("a verdict is not for the program to catch") from None
        finally:
            cleaned.append(mesh.rank)
            # A call that waits while its rank is unwound ends the rank again.
            mesh.barrier("tp")

    assert isinstance(verdict_of(program), DeadlockError)
    assert sorted(cleaned) == [0, 1, 2, 3]


def test_errors_of_several_ranks_are_folded_and_followers_are_named() -> None:
    def program(mesh: Mesh) -> None:
        if mesh.rank == 1:
            raise KeyError("own")
        if mesh.rank in (2, 3):
            raise ValueError("common")
        mesh.barrier("all")

    error = verdict_of(program)
    assert isinstance(error, RankFailed) and sorted(error.by_rank) == [1, 2, 3]
    text = str(error)
    assert re.search(r"ranks 2 3 at .*test_simulator_verdicts.py:\d+:\n +ValueError: common", text), text
    assert "rank 0 waited for others when no rank could continue" in text


def test_an_interrupt_ends_all_ranks() -> None:
    def raises(mesh: Mesh) -> None:
        if mesh.rank == 1:
            raise KeyboardInterrupt
        mesh.barrier("all")

    def goes_on(mesh: Mesh) -> None:
        if mesh.rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
        while True:
            mesh.barrier("all")

    before = threading.active_count()
    error = verdict_of(raises)
    assert isinstance(error, RankFailed) and isinstance(error.by_rank[1], KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        meshcomm.simulate(goes_on, dims=DIMS, merge=MERGE)
    assert threading.active_count() == before


def test_an_interrupt_does_not_wait_for_a_rank_that_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_PATIENCE_S", 0.1)
    over = threading.Event()

    def sleeps(mesh: Mesh) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        over.wait(30)

    with pytest.raises(KeyboardInterrupt):
        meshcomm.simulate(sleeps, dims={"x": 1})
    (rank,) = [each for each in threading.enumerate() if each.name == "meshcomm-rank-0"]
    over.set()
    rank.join(30)


def test_a_simulation_inside_a_rank_is_one_of_its_own() -> None:
    def inner(mesh: Mesh) -> int:
        return int(mesh.all_reduce("x", torch.tensor(mesh.rank)).item())

    def outer(mesh: Mesh) -> tuple[list[int], int]:
        found = meshcomm.simulate(inner, dims={"x": 3})
        return found, int(mesh.all_reduce("all", torch.tensor(mesh.rank)).item())

    assert meshcomm.simulate(outer, dims=DIMS, merge=MERGE) == [([3, 3, 3], 6)] * 4


def test_a_rank_communicates_in_its_own_thread_only() -> None:
    def program(mesh: Mesh) -> None:
        failed: list[BaseException] = []

        def other() -> None:
            try:
                mesh.all_reduce("tp", one())
            except MeshcommError as error:
                failed.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        raise failed[0]

    error = verdict_of(program)
    assert isinstance(error, RankFailed) and isinstance(error.__cause__, UnsupportedOp)
    assert "communicates from a thread that is not its own" in str(error)


def test_a_module_must_not_wait_for_ranks_that_share_its_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "waits_while_imported.py").write_text(
        "import meshcomm\nmesh = meshcomm.init(dims={'all': -1})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def program(mesh: Mesh) -> None:
        import waits_while_imported  # type: ignore[import-not-found]  # noqa: F401

    error = verdict_of(program)
    assert "while it imports waits_while_imported, which all ranks share" in str(error)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("level", ["jvp", "jacfwd", "dual_level", "jvp of grad"])
def test_forward_mode_around_a_call_is_refused_and_works_without_one(level: str, seed: int) -> None:
    """torch has one level of forward-mode AD per process, and simulated ranks are threads."""

    def tangent(f: Callable[[Tensor], Tensor], x: Tensor, t: Tensor) -> Any:
        if level == "jacfwd":
            return torch.func.jacfwd(f)(x) @ t
        if level == "dual_level":
            with forward_ad.dual_level():
                return forward_ad.unpack_dual(f(forward_ad.make_dual(x, t))).tangent
        g = f if level == "jvp" else torch.func.grad(lambda x: f(x).sum())
        return torch.func.jvp(g, (x,), (t,))[1]

    def program(mesh: Mesh, calls: bool) -> Any:
        x, t, scale = torch.arange(3.0), torch.full((3,), mesh.rank + 1.0), torch.ones(())
        for _ in range(3):
            scale = mesh.all_reduce("dp", scale.clone(), "max")
            found = tangent(
                lambda x: (
                    mesh.functional.all_reduce("dp", x, grad="sum") if calls else x.sin() * (1 + mesh.rank)
                ),
                x,
                t,
            )
        return found

    x = torch.arange(3.0)
    for rank, found in enumerate(
        meshcomm.simulate(program, args=(False,), dims={"dp": 2}, schedule_seed=seed)
    ):
        slope = -x.sin() if level == "jvp of grad" else x.cos()
        torch.testing.assert_close(found, slope * (1 + rank) ** 2)
    with pytest.raises(MeshcommError, match="waits for other ranks inside forward-mode AD"):
        meshcomm.simulate(program, args=(True,), dims={"dp": 2}, schedule_seed=seed)


def test_circles_against_walking_every_path() -> None:
    for seed in range(300):
        chance = random.Random(seed)
        n = chance.randint(1, 7)
        waits = {
            rank: sorted(set(chance.choices([r for r in range(n + 2) if r != rank], k=chance.randint(0, 2))))
            for rank in range(n)
        }
        circle = find_circle(waits)
        for rank, following in zip(circle, [*circle[1:], *circle[:1]], strict=True):
            assert following in waits[rank]
        assert len(set(circle)) == len(circle)
        assert bool(circle) == any(_returns(waits, rank, rank, set()) for rank in waits), waits


def _returns(waits: dict[int, list[int]], rank: int, home: int, seen: set[int]) -> bool:
    for other in waits.get(rank, ()):
        if other == home:
            return True
        if other not in seen:
            seen.add(other)
            if _returns(waits, other, home, seen):
                return True
    return False


def test_a_receive_from_anyone_that_nobody_serves() -> None:
    def program(mesh: Mesh) -> None:
        if mesh.coord("all") == 2:
            mesh.recv_any("all", torch.zeros(1))

    error = verdict_of(program)
    assert isinstance(error, UnmatchedMessage)
    assert "rank 2 (dp=1 tp=0) waits in recv_any (receive from any rank, on all)" in str(error)


@pytest.mark.deep
def test_stacks_are_taken_without_a_collection_that_would_hang() -> None:
    # Python 3.11 holds a lock while it lists the stacks, and the end of a threading.local asks for the same lock.
    program = """
import gc, threading
from meshcomm.watching.callsite import thread_frames
class Ring: pass
done = threading.Event()
for more in range(8):
    for _ in range(4):
        threading.Thread(target=done.wait, daemon=True).start()
    gc.collect(), gc.disable()
    ring = Ring()
    ring.me, ring.local = ring, threading.local()
    ring.local.x, ring = 1, None
    gc.set_threshold(gc.get_count()[0] + more), gc.enable()
    assert thread_frames()[threading.get_ident()].f_code.co_name == "<module>"
assert gc.isenabled()
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=200).returncode == 0
