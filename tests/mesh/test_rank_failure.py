"""Programs that open a mesh without `with`: whatever error ends them, and whichever hook reports it, the error is explained."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import TracebackType

import pytest
import torch
import torch.distributed as dist

from meshcomm.errors import CallMismatchError, CollectiveTimeout, LayoutError, MeshcommError, PeerLost
from meshcomm.mesh.rank_failure import ExceptHooks, await_cause, collect, leave
from meshcomm.testing import Pool
from meshcomm.watching.ending import failure_of
from tests.commands.test_run import written
from tests.forked_jobs import Job
from tests.group_hooks import needs_group_hooks
from tests.watching.test_ending import LAYOUT, failure, raised

pytestmark = pytest.mark.long

EXPLAINED = CollectiveTimeout("all_reduce did not end in time")
Shown = list[BaseException]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    """The errors that reach the previous hooks."""
    found: Shown = []

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        assert kind is type(error)
        found.append(error)

    monkeypatch.setattr(sys, "excepthook", show)
    monkeypatch.setattr(threading, "excepthook", lambda given: found.append(given.exc_value))
    return found


def uncaught(error: BaseException) -> None:
    sys.excepthook(type(error), error, None)


def explain(error: BaseException, thread: str) -> MeshcommError | None:
    return EXPLAINED if isinstance(error, RuntimeError) else None


def test_the_hooks_before_get_the_explanation_with_its_cause(shown: Shown) -> None:
    before, lost, other = sys.excepthook, RuntimeError("timed out"), ValueError("mine")
    hooks = ExceptHooks(explain)
    uncaught(lost)
    uncaught(other)
    assert shown == [EXPLAINED, other] and EXPLAINED.__cause__ is lost

    def fails() -> None:
        raise RuntimeError("timed out")

    thread = threading.Thread(target=fails)
    thread.start()
    thread.join()
    assert shown[2:] == [EXPLAINED]
    hooks.close()
    assert sys.excepthook is before


def test_a_hook_that_was_set_later_stays_and_ours_under_it_explains_nothing(shown: Shown) -> None:
    first = ExceptHooks(explain)
    ours = sys.excepthook
    seen: Shown = []

    def of_the_user(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        seen.append(error)
        ours(kind, error, trace)

    sys.excepthook = of_the_user
    second, of_second = ExceptHooks(explain), sys.excepthook
    uncaught(lost := RuntimeError("timed out"))
    # An error is explained only once: an explanation is not an error of a backend.
    assert seen == [EXPLAINED] and shown == [EXPLAINED]
    first.close()
    assert sys.excepthook == of_second
    second.close()
    assert sys.excepthook is of_the_user
    uncaught(lost)
    assert shown[-1] is lost


def test_an_explanation_that_fails_hides_nothing(shown: Shown) -> None:
    def broken(error: BaseException, thread: str) -> None:
        raise ZeroDivisionError

    hooks = ExceptHooks(broken)
    uncaught(lost := RuntimeError("timed out"))
    hooks.close()
    assert shown == [lost]


# One rank leaves its loop to sleep or to exit while the others are in a call.
PROGRAM = """
import threading
from torch import nn, distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
mesh = meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=4)
last = mesh.rank == 1
def default():
    dist.all_reduce(torch.ones(2))
net = DDP(nn.Linear(2, 2), process_group=mesh.group("dp"))
def ddp():
    net(torch.ones(2, 2)).sum().backward()
def trains(step, then):
    for _ in range(70):
        step()
    then() if last else step()
"""
SLEEPS = "lambda: time.sleep(60)"


def ended(pool: Pool, folder: Path, script: str, launcher: tuple[str, ...] = ()) -> tuple[int, str]:
    written(folder, PROGRAM + script, "")
    command = launcher or ("-m", "meshcomm", "run", "--world-size", "2")
    code, _, err = Job(pool, folder, *command, "script.py").finish()
    return code, err


@needs_group_hooks
@pytest.mark.faults
@pytest.mark.parametrize("step", ["ddp", "default"])
def test_the_launcher_names_the_rank_that_has_not_come(pool: Pool, tmp_path: Path, step: str) -> None:
    code, err = ended(pool, tmp_path, f"trains({step}, {SLEEPS})")
    lines = err.splitlines()
    assert code == 1 and "  given:    call 7" in err
    assert "            rank 1 (dp=1) has not arrived: it is at " in err
    assert lines[-2].startswith("meshcomm: rank 1 (dp=1) is at ") and lines[-2].endswith(
        "and rank 0 waited for it"
    )
    assert lines[-1].startswith("meshcomm: rank 0 (dp=0) failed: CollectiveTimeout: all_reduce ")
    assert lines[-1].endswith(": it waited for rank 1")


@needs_group_hooks
@pytest.mark.parametrize("step", ["ddp", pytest.param("default", marks=pytest.mark.faults)])
@pytest.mark.deep_cases(r"\[ddp\]")
def test_the_launcher_names_a_rank_that_ended_well_too_early(pool: Pool, tmp_path: Path, step: str) -> None:
    code, err = ended(pool, tmp_path, f"trains({step}, lambda: os._exit(0))")
    assert code == 1 and "rank 1 does not answer: its process has ended" in err
    assert err.splitlines()[-2] == "meshcomm: rank 1 (dp=1) ended with exit code 0 while rank 0 waited for it"
    assert err.splitlines()[-1].startswith("meshcomm: rank 0 (dp=0) failed: PeerLost: ")


@needs_group_hooks
@pytest.mark.faults
def test_an_error_that_the_program_turns_into_its_exit_code(pool: Pool, tmp_path: Path) -> None:
    script = f"""
try:
    trains(ddp, {SLEEPS})
except Exception:
    sys.exit(3)
"""
    code, err = ended(pool, tmp_path, script)
    assert code == 3 and err.splitlines()[-1].endswith(": it waited for rank 1")


@needs_group_hooks
@pytest.mark.faults
def test_other_launchers_show_it_on_the_ranks_stderr_once(pool: Pool, tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    code, err = ended(pool, tmp_path, f"trains(ddp, {SLEEPS})", torchrun)
    assert code == 1 and err.count("made outside the mesh along") == 1
    assert (
        'CollectiveTimeout: all_reduce made outside the mesh along "dp" on rank 0 (dp=0) did not end' in err
    )


@pytest.mark.faults
@needs_group_hooks
@pytest.mark.parametrize("step", ["ddp", "default"])
@pytest.mark.parametrize("end", ["", "mesh.close()"])
def test_an_error_that_the_program_caught_is_reported_in_one_line(
    pool: Pool, tmp_path: Path, step: str, end: str
) -> None:
    script = f"""
try:
    trains({step}, lambda: time.sleep(12))
except Exception:
    print("caught")
    time.sleep(5)
{end}
"""
    _, err = ended(pool, tmp_path, script)
    said = [line for line in err.splitlines() if "rank 1 (dp=1) has not arrived" in line]
    where = "made outside the mesh along" if step == "ddp" else 'along "default group"'
    assert len(said) == 1 and said[0].startswith(f"meshcomm: all_reduce {where}")


@pytest.mark.faults
def test_a_monitored_barrier_without_a_timeout_ends_at_that_of_its_group(pool: Pool, tmp_path: Path) -> None:
    script = 'dist.monitored_barrier(group=mesh.group("dp")) if mesh.rank == 0 else time.sleep(60)'
    code, err = ended(pool, tmp_path, script)
    assert (
        code == 1 and "CollectiveTimeout: monitored_barrier on dp on rank 0 (dp=0) did not end in time" in err
    )
    assert (
        "timed out after the group's 4 s, because it was given no timeout" in err
        and "rank 1 (dp=1) is at " in err
    )


@pytest.mark.faults
@pytest.mark.skipif(not hasattr(dist, "set_timeout"), reason=f"torch {torch.__version__} has no set_timeout")
def test_a_timeout_that_torch_has_been_told_since_is_obeyed(pool: Pool, tmp_path: Path) -> None:
    script = """
from datetime import timedelta
dist.set_timeout(timedelta(seconds=40), mesh.group("dp"))
if mesh.rank:
    time.sleep(4 + 7)
mesh.all_reduce("dp", torch.ones(2))
"""
    assert ended(pool, tmp_path, script) == (0, "")


@pytest.mark.deep
def test_a_slice_of_a_device_mesh_is_refused_by_name(pool: Pool, tmp_path: Path) -> None:
    script = """
from torch.distributed.device_mesh import init_device_mesh
mesh.close()
whole = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
meshcomm.init(whole["tp"])
"""
    code, err = ended(pool, tmp_path, script)
    assert code == 2 and "LayoutError: the DeviceMesh is a slice" in err
    assert "try:      mesh = meshcomm.init(device_mesh), without [...]" in err


def test_what_a_rank_leaves_is_what_the_launcher_reads(tmp_path: Path) -> None:
    odd = CallMismatchError("calls differ", given="a")
    odd.mismatched_ranks = (3,)
    lost = PeerLost("all_reduce lost a peer\nmore")
    lost.missing = (5, 6)
    lost.call = {"label": "tp", "number": 3, "call": "barrier", "callsite": "train.py:88"}
    left = [
        failure_of(raised(ValueError("planted\nsecond line")), 0, LAYOUT[0]),
        failure_of(raised(odd), 3, LAYOUT[3]),
        failure_of(raised(lost), 4, LAYOUT[4]),
        failure_of(raised(LayoutError("")), 5, LAYOUT[5]),
        failure_of(raised(KeyboardInterrupt()), 7, LAYOUT[7]),
    ]
    assert all(leave(each, tmp_path, 1) for each in left)
    assert leave(left[0], tmp_path, 0)
    (tmp_path / "1-cause-6.json").write_text("{half")
    assert collect(tmp_path, 1) == left
    assert [(f.what, f.code, f.follows, f.mismatched, f.missing) for f in left] == [
        ("ValueError: planted", 1, False, False, []),
        ("CallMismatchError: calls differ", 2, False, True, []),
        ("PeerLost: all_reduce lost a peer", 1, True, False, [5, 6]),
        ("LayoutError", 2, False, False, []),
        ("KeyboardInterrupt", 130, False, False, []),
    ]
    # Foreign errors may use these attributes for something else.
    foreign = KeyError("planted")
    foreign.missing, foreign.call, foreign.mismatched_ranks = 3, print, {"all": 1}  # type: ignore[attr-defined]
    assert leave(failure_of(foreign, 0, LAYOUT[0]), tmp_path, 2) and collect(tmp_path, 2)[0].missing == []
    # The error of the mismatched rank has to come first.
    assert failure_of(odd, 2, LAYOUT[2]).follows
    assert all(
        f.frame.startswith(f"{raised.__code__.co_filename}:") and f.frame.endswith(" in raised") for f in left
    )
    assert left[0].text.startswith("rank 0 (pp=0 tp=0):\nTraceback (most recent call last):\n")
    assert left[2].text.startswith(
        "rank 4 (pp=1 tp=0): PeerLost: all_reduce lost a peer\nmore\ncalled from:\n  File "
    )
    assert left[1].text == "rank 3 (pp=0 tp=3): CallMismatchError: calls differ\n  given:    a"
    assert left[3].summary.startswith("rank 5 (pp=1 tp=1) failed: LayoutError, at ")
    assert not leave(left[0], tmp_path / "gone", 1)


def test_a_rank_whose_peer_broke_off_waits_for_the_cause(tmp_path: Path) -> None:
    began = time.monotonic()
    await_cause(tmp_path, 0, 0.2)
    assert time.monotonic() - began >= 0.2
    leave(failure(1, 1.0, follows=True), tmp_path, 0)
    leave(failure(2, 1.0), tmp_path, 1)
    await_cause(tmp_path, 0, 0.2)
    leave(failure(2, 1.0), tmp_path, 0)
    began = time.monotonic()
    await_cause(tmp_path, 0, 60.0)
    assert time.monotonic() - began < 30
