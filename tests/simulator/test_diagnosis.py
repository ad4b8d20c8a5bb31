"""Exact verdicts of planted bugs, and the same programs without the bug."""

from __future__ import annotations

import re
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
    assert re.search(r"ranks 2 3 at .*test_diagnosis.py:\d+:\n +ValueError: common", text), text
    assert "rank 0 waited for others when no rank could continue" in text


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


def test_a_receive_from_anyone_that_nobody_serves() -> None:
    def program(mesh: Mesh) -> None:
        if mesh.coord("all") == 2:
            mesh.recv_any("all", torch.zeros(1))

    error = verdict_of(program)
    assert isinstance(error, UnmatchedMessage)
    assert "rank 2 (dp=1 tp=0) waits in recv_any (receive from any rank, on all)" in str(error)
