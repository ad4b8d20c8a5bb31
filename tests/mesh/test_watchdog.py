"""The error of a call that cannot end names the missing ranks and where they are instead."""

from __future__ import annotations

import gc
import json
import re
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import meshcomm
from meshcomm.errors import CollectiveTimeout
from meshcomm.mesh.watchdog import Watchdog, WatchOptions
from meshcomm.testing import Pool
from meshcomm.transport import SoloTransport
from meshcomm.watching.counters import counter_of
from tests.commands.shown import combined
from tests.forked_jobs import Job
from tests.group_hooks import HAS_HOOKS, needs_group_hooks
from tests.watching.test_timer import _Work

pytestmark = pytest.mark.long

TIMEOUT = 2.0

# The kind, the text and the ranks of one rank's error, and how long its program took.
Outcome = tuple[str, str, tuple[int, ...], float]


def outcome(
    program: Any, reports: str, timeout_s: float = TIMEOUT, stay: bool = True, dp_s: float = 0.0, **more: Any
) -> Outcome:
    """Run a program as this rank. Errors from leaving the mesh count, too.

    stay: keep the mesh, and so the thread that answers, until every rank has ended its program.
    dp_s: the timeout along dp, if it differs.
    """
    seconds = {"pp": timeout_s, "dp": dp_s or timeout_s, "tp": timeout_s}
    config = {
        "mesh": {
            "dims": {"pp": 2, "dp": 2, "tp": 2},
            "device": "cpu",
            "timeout_s": 60.0,  # for the rendezvous; the groups' own timeout is short
            "options": {dim: {"timeout_s": each} for dim, each in seconds.items()},
            "reports": reports,
            "validate_calls": 0,
            **more,
        }
    }
    own: BaseException | None = None
    try:
        with meshcomm.init(config) as mesh:
            mesh.warm_up()
            began = time.monotonic()
            try:
                program(mesh)
            except (RuntimeError, ValueError, meshcomm.MeshcommError) as error:  # leaves the mesh by it
                own = error
            finally:
                took = time.monotonic() - began
                mesh.store.set(f"over/{mesh.rank}", b"")
            if stay:
                until(mesh, *range(8))
            if own is not None:
                raise own
    except CollectiveTimeout as error:
        if error is not own and error.__cause__ is not own:
            raise
        return type(error).__name__, str(error), error.missing, took
    except ValueError as error:
        return "ValueError", str(error), (), took
    return "none", "", (), took


def until(mesh: Any, *ranks: int) -> None:
    """Wait where other ranks can see it, until these ranks have ended their programs."""
    while not mesh.store.check([f"over/{rank}" for rank in ranks]):
        time.sleep(0.02)


def skipped(mesh: Any) -> None:
    if mesh.rank == 6:
        while not mesh.store.check(["over/7"]):  # it skips the call and does something else
            time.sleep(0.02)
        return
    mesh.all_reduce("tp", torch.ones(4))


def crossed(mesh: Any) -> None:
    x = torch.ones(4)
    first, second = ("dp", "tp") if mesh.rank in (1, 2) else ("tp", "dp")
    mesh.all_reduce(first, x)
    mesh.all_reduce(second, x)


def never_sent(mesh: Any) -> None:
    x = torch.ones(4)
    if mesh.coord("pp") == 0:
        mesh.send("pp", x, dst=1)
        until(mesh, 6)
    else:
        mesh.recv("pp", x, src=0)
        if mesh.rank == 6:
            mesh.recv("pp", x, src=0)
        mesh.all_reduce("dp", x)


def left(mesh: Any) -> None:
    mesh.all_reduce("tp", torch.ones(1))
    if mesh.rank == 7:
        raise ValueError("no batch\nin the file")
    if mesh.rank != 3:
        mesh.all_reduce("tp", torch.ones(1))


def past(mesh: Any) -> None:
    """Ranks 3, 6 and 7 omit the calls that their neighbours along dp make outside the mesh."""
    group, x = mesh.group("dp"), torch.ones(4)
    dist.all_reduce(x, group=group)
    if mesh.rank in (3, 6, 7):
        until(mesh, mesh.rank - 2)
    elif mesh.rank == 4:
        dist.recv(x, 6, group=group)
    elif mesh.rank == 5:
        work = dist.all_reduce(x, group=group, async_op=True)
        time.sleep(TIMEOUT + 2)  # elsewhere, while the backend gives up
        work.wait()
    else:
        dist.all_reduce(x, group=group)


def by_hand(mesh: Any) -> None:
    if mesh.rank == 6:
        dist.all_reduce(torch.ones(1), group=mesh.group("dp"))
    elif mesh.rank == 7:
        mesh.all_reduce("tp", torch.ones(4))
    elif mesh.rank == 4:
        until(mesh, 7)  # meanwhile, it keeps rank 6 waiting along dp
        dist.all_reduce(torch.ones(1), group=mesh.group("dp"))


class Story(NamedTuple):
    """A program, and for each rank that raises: the error, the ranks it names, and words of its text.

    report: patterns for the output of `meshcomm report`. alone: no other rank raises. more: for `outcome`.
    """

    program: Any
    told: dict[int, tuple[str, tuple[int, ...], list[str]]]
    report: list[str] = []  # noqa: RUF012 (read only)
    alone: bool = True
    more: dict[str, Any] = {}  # noqa: RUF012


LATE, LOST = "CollectiveTimeout", "PeerLost"
SKIPPED = (
    LATE,
    (6,),
    [
        'all_reduce along "tp" on rank 7 (pp=1 dp=1 tp=1) did not end in time\n  given:    call 2 on tp[pp=1 dp=1], '
        "ranks [6, 7], at ",
        f"{__file__}:",
        "rank 6 (pp=1 dp=1 tp=0) has not arrived: it is at ",
        " in skipped, after barrier, call 1",
    ],
)
BY_HAND = (
    'it is in all_reduce along "dp", call 2, at '
    if HAS_HOOKS
    else ", in gloo:all_reduce, call 2 on torch's group meshcomm"  # torch's flight recorder has it
)


def made_past(rank: int, call: str, does: str) -> tuple[str, tuple[int, ...], list[str]]:
    pp, tp = rank // 4, rank % 2
    first = (
        f'{call} made outside the mesh along "dp" on rank {rank} (pp={pp} dp=0 tp={tp}) did not end in time'
    )
    return LATE, (rank + 2,), [first, f"rank {rank + 2} (pp={pp} dp=1 tp={tp}) {does}"]


STORIES = {
    "a skipped call": Story(
        skipped,
        {7: SKIPPED},
        [
            r"rank 6 \(pp=1 dp=1 tp=0\) is at .*; rank 7 waits for it in all_reduce along \"tp\", call 2",
            "2 report",
        ],
        more={"validate_calls": 64},
    ),
    # Rank 0 waits along tp for 1, which waits along dp for 3, which waits along tp for 2, which waits along dp for 0.
    "a circle across dims": Story(
        crossed,
        {
            0: (
                LATE,
                (1,),
                ['rank 1 (pp=0 dp=0 tp=1) has not arrived: it is in all_reduce along "dp", call 2, at '],
            ),
            **{rank: (LATE, (other,), []) for rank, other in ((1, 3), (2, 0), (3, 2))},
        },
        [
            r"circular wait:\n  rank 0 .* rank 1\n  rank 1 .* rank 3\n  rank 3 .* rank 2\n  rank 2 .* rank 0\n?"
        ],
    ),
    "a message that is never sent": Story(
        never_sent,
        {
            6: (
                LATE,
                (2,),
                [
                    'recv from 0 along "pp" on rank 6 (pp=1 dp=1 tp=0) did not end in time\n'
                    "  given:    recv from rank 2, message 2 with tag 0 on pp[dp=1 tp=0], ranks [2, 6], at ",
                    "rank 2 (pp=0 dp=1 tp=0) has sent 1 of 2 with tag 0; it is at ",
                ],
            ),
            # Rank 4 waits for rank 6 in a collective; rank 6 is reported to wait for a message.
            4: (LATE, (6,), ['has not arrived: it is in recv from rank 2, message 2 with tag 0 along "pp"']),
        },
        [r"rank 2 \(pp=0 dp=1 tp=0\) is at .*rank 6 waits for it in recv from rank 2, message 2 with tag 0"],
        alone=False,
    ),
    "ranks that left": Story(
        left,
        {
            2: (LOST, (3,), ["has not arrived: it has closed the mesh, after all_reduce, call 2"]),
            6: (LOST, (7,), ["after all_reduce, call 2, when it raised ValueError: no batch\n"]),
            7: ("ValueError", (), []),
        },
        more={"timeout_s": 40.0, "stay": False},
    ),
    "calls outside the mesh": Story(
        past,
        {
            1: made_past(1, "all_reduce", "has not arrived: it "),
            4: made_past(4, "recv", "has sent 0 of 1 with tag 0"),
            5: made_past(5, "all_reduce", "has not arrived: it "),
        },
    ),
    "a rank in a call outside the mesh": Story(
        by_hand,
        {7: (LATE, (6,), ["rank 6 (pp=1 dp=1 tp=0) has not arrived: it is ", BY_HAND])},
        alone=False,
        more={"dp_s": 60.0},
    ),
}


def run_story(name: str, folder: str) -> Outcome:
    return outcome(STORIES[name].program, folder, **STORIES[name].more)


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[needs_group_hooks] if "past" in each else []) for each in STORIES],
)
def test_who_has_not_come_and_what_it_does_instead(pool: Pool, tmp_path: Path, name: str) -> None:
    story = STORIES[name]
    found = pool.run(run_story, name, str(tmp_path))
    if story.alone:
        assert [rank for rank in range(8) if found[rank][0] != "none"] == sorted(story.told)
    for rank, (kinds, named, words) in story.told.items():
        kind, text, missing, took = found[rank]
        assert kind == kinds and missing == named, text
        # The rank is in that call, or was until its time ran out a moment before.
        text = text.replace("it was in", "it is in")
        assert all(word in text for word in words), text
        assert took < 30  # on a busy machine; the group's own timeout may be longer
    said = combined(tmp_path) if story.report else ""
    assert all(re.search(pattern, said) for pattern in story.report), said


@pytest.mark.mesh(
    dp=3,
    options={"dp": {"timeout_s": 3.0}},
    validate_calls=0,
    via="gloo",
    not_via={"emulated_nccl": "a call returns when it is queued"},
)
@pytest.mark.faults
def test_a_diagnosis_from_before_this_rank_came_is_not_its_own(mesh: Any) -> None:
    """Rank 0 gives up before the others arrive. Then rank 1 arrives, but rank 2 does not."""
    mesh.warm_up()
    if mesh.rank == 0:
        handle = mesh.all_reduce("dp", torch.ones(4), async_op=True)
        with pytest.raises(CollectiveTimeout) as caught:
            handle.wait(timeout_s=0.3)
        assert caught.value.missing == (1, 2)
        mesh.store.set("gave up", "")
    elif mesh.rank == 1:
        mesh.store.get("gave up", timeout_s=30)
        with pytest.raises(CollectiveTimeout) as caught:
            mesh.all_reduce("dp", torch.ones(4))
        assert caught.value.missing == (2,)
        mesh.store.set("over", "")
    mesh.store.get("over", timeout_s=30)


STUCK = """
import ctypes, torch, meshcomm
from meshcomm.transport import ProcessGroupTransport
from meshcomm.watching import timer

timer.GRACE_S = 0.5
mesh = meshcomm.init()
# A backend that never gives up: it sleeps in C, which no signal handler of Python interrupts.
ProcessGroupTransport.start = eval(compile("lambda *_: ctypes.CDLL(None).sleep(1000)", torch.__file__, "eval"))
mesh.broadcast("dp", torch.ones(3), src=0)
mesh.close()
"""


@pytest.mark.faults
def test_a_rank_that_the_backend_holds_reports_and_ends(pool: Pool, tmp_path: Path) -> None:
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    config = tmp_path / "mesh.toml"
    reports = tmp_path / "reports"
    config.write_text(
        f"[mesh]\ndims = {{ dp = 2 }}\ntimeout_s = 60\nvalidate_calls = 0\n"
        f'reports = "{reports}"\n[mesh.options.dp]\ntimeout_s = 1\n'
    )
    code, _, err = Job(pool, tmp_path, "-m", "meshcomm", "run", str(config), str(script)).finish()
    assert code == 1
    assert "the backend is past its timeout and does not return" in err
    assert f"{script}:10" in err
    assert (
        json.loads(next(reports.glob("*/rank1.json")).read_text())["failed"]["call"]
        == 'broadcast along "dp", call 1'
    )


def left_out(folder: str, skip_at: int) -> tuple[str, str, Any]:
    """Rank 3 omits one of 75 equal calls, of which the first 64 are compared. Then all ranks enter a barrier."""
    config = {"dims": {"dp": 4}, "device": "cpu", "timeout_s": 3.0, "reports": folder}
    with meshcomm.init({"mesh": config}) as mesh:
        error: Any = None
        try:
            for number in range(1, 76):
                if (mesh.rank, number) != (3, skip_at):
                    mesh.all_reduce("dp", torch.ones(2))
            mesh.barrier("dp")
        except meshcomm.MeshcommError as raised:
            error = raised
        mesh.store.set(f"over/{mesh.rank}", b"")
        until(mesh, *range(4))
    return type(error).__name__, str(error), getattr(error, "mismatched_ranks", None)


@pytest.mark.faults
def test_a_rank_that_left_out_one_of_many_equal_calls_is_named(pool: Pool, tmp_path: Path) -> None:
    """Sequence numbers show the mismatch, although it comes after the calls that are compared before they are sent."""
    found = pool.run(left_out, str(tmp_path), 70, ranks=4)
    for kind, text, odd in found:
        assert (kind, odd) == ("CallMismatchError", (3,)), text
        assert "rank 3 is mismatched" in text.splitlines()[0]
        assert f"rank 3 (dp=3) made barrier, at {__file__}:" in text
        assert f"ranks 0 1 2 made all_reduce, at {__file__}:" in text
        assert "as call 75" in text
        assert "mesh.step()" in text
        assert "every rank of the group has arrived" not in text
    lines = combined(tmp_path).splitlines()
    assert lines[1] == "the ranks of dp made different calls with the sequence number 75:"
    assert lines[2].startswith(f"  rank 3 (dp=3) made barrier, at {__file__}:")
    assert lines[3].startswith(f"  ranks 0 1 2 made all_reduce, at {__file__}:")


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits of a watchdog."""
    monkeypatch.setattr("meshcomm.watching.timer.GRACE_S", 0.1)
    monkeypatch.setattr("meshcomm.mesh.rank_record._ANSWER_S", 0.2)


def watchdog_of(store: Any, ended: list[Any], timeout_s: float = 0.1) -> Watchdog:
    """A watchdog in this process for one rank of two; the other rank does not exist."""
    return Watchdog(store, 0, {"dp": 0}, 2, WatchOptions(timeout_s, ended.append))


@pytest.mark.usefixtures("soon")
def test_a_process_that_is_not_inside_its_call_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record looks like this if a signal handler's exception leaves a call and the record is not cleared."""
    ended: list[Any] = []
    watchdog = watchdog_of(dist.HashStore(), ended)
    try:
        left = watchdog.record("dp", [0, 1], SoloTransport(torch.device("cpu"), "gloo"))
        left.under_way = True
        time.sleep(1.5)  # "saving"
        assert ended == []
        # A blocked process is still ended.
        monkeypatch.setattr("meshcomm.mesh.watchdog._COMM", __file__)
        held = watchdog.record("tp", [0, 1], SoloTransport(torch.device("cpu"), "gloo"))
        held.under_way = True
        deadline = time.monotonic() + 30
        while not ended and time.monotonic() < deadline:
            time.sleep(0.05)
        assert "the backend is past its timeout and does not return" in str(ended[0])
    finally:
        watchdog.close()


@pytest.mark.usefixtures("soon")
def test_a_work_past_the_mesh_that_does_not_end_is_told_once(capfd: pytest.CaptureFixture[str]) -> None:
    """The report does not end the program, which is elsewhere."""
    ended: list[Any] = []
    watchdog = watchdog_of(dist.HashStore(), ended)
    recorder = watchdog.record("dp", [0, 1], SoloTransport(torch.device("cpu"), "gloo"))
    recorder.plan = ", plan of a mesh"
    counter = counter_of(recorder.counters, "dp", "all_gather")
    with recorder.call(recorder, counter, 8, None, sys._getframe()):  # type: ignore[arg-type]
        recorder.work = _Work(False)
    time.sleep(1.5)
    watchdog.close()
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1 and ended == []
    assert said[0].startswith('meshcomm: all_gather made outside the mesh along "dp" on rank 0 (dp=0)')
    assert "rank 1 does not answer" in said[0]


def test_no_backend_is_asked_while_a_cuda_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    watchdog = watchdog_of(dist.HashStore(), [], timeout_s=60)
    recorder = watchdog.record("dp", [0, 1], SoloTransport(torch.device("cpu"), "gloo"))
    counter = counter_of(recorder.counters, "dp", "all_gather")
    with recorder.call(recorder, counter, 8, None, sys._getframe()):  # type: ignore[arg-type]
        recorder.work = work = _Work(False)
    sent = recorder.messages.past("dp", "send", 1, 0, [torch.ones(1)], sys._getframe())
    recorder.messages.posted(sent, work, True)

    def ask() -> int:
        watchdog.status()
        watchdog.explain(RuntimeError("timed out"))
        recorder.messages.posted(sent, work, True)
        return work.asked

    try:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert ask() == 0
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        assert ask() > 0
    finally:
        watchdog.close()


def test_an_exception_that_does_not_end_the_program_is_told_once(capfd: pytest.CaptureFixture[str]) -> None:
    watchdog = watchdog_of(dist.HashStore(), [], timeout_s=60)
    watchdog._stop.set()
    for thread in watchdog._threads:
        thread.join(20)
    recorder = watchdog.record("dp", [0, 1], SoloTransport(torch.device("cpu"), "gloo"))
    counter = counter_of(recorder.counters, "dp", "all_gather")

    def looks(*seconds: float) -> list[str]:
        for now in seconds:
            watchdog._tell_raised(now)
        return capfd.readouterr().err.splitlines()

    try:
        raise KeyError("no shard")
    except KeyError:
        assert looks(100.0, 109.0) == []
        assert watchdog.status()["raised"].startswith("it raised KeyError: 'no shard', at ")
        (said,) = looks(111.0, 112.0)
        assert said.startswith("meshcomm: rank 0 (dp=0): it raised KeyError: 'no shard', at ")
        assert f"{__file__}:" in said and " 10 s ago and has not ended; it is at " in said
    try:
        raise KeyError("read it again")
    except KeyError:
        assert looks(200.0) == []
        # The program has handled that error and trains.
        with recorder.call(recorder, counter, 8, None, sys._getframe()):  # type: ignore[arg-type]
            pass
        assert looks(220.0, 240.0) == [] and watchdog.status()["raised"] == ""
    assert looks(300.0, 320.0) == []


class _GoneStore(dist.Store):
    """A store whose server is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        raise RuntimeError("Broken pipe\n" + "frame\n" * 30)

    def set(self, key: str, value: str) -> None:
        raise RuntimeError("Broken pipe")


def test_a_rank_without_a_store_stops_to_ask(capfd: pytest.CaptureFixture[str]) -> None:
    store = _GoneStore()
    watchdog = watchdog_of(store, [])
    watchdog._threads[0].join(20)
    assert not watchdog._threads[0].is_alive()
    assert store.asked == 2
    watchdog.close()
    said = capfd.readouterr().err.splitlines()
    assert said == ["meshcomm: rank 0 (dp=0) has lost the job's store; it no longer answers others"]


def test_the_threads_of_a_mesh_that_is_dropped_end() -> None:
    watchdog = watchdog_of(dist.HashStore(), [])
    kept = watchdog.record("dp", [0, 1], SoloTransport(torch.device("cpu"), "gloo"))  # as by a group of torch
    threads = watchdog._threads
    del watchdog
    gc.collect()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert str(kept.inquire(kept, "all_reduce", RuntimeError("timed out"))).startswith("all_reduce failed")
