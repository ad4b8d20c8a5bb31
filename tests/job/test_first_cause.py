"""The launcher's headline for jobs in which the first reported error is not the first cause."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from meshcomm.commands.report import facts_of
from meshcomm.testing import Pool
from tests.forked_jobs import Job
from tests.group_hooks import needs_group_hooks

BEGIN = """
import asyncio, os, subprocess, sys, threading, time
import torch, meshcomm
import torch.distributed as dist

class Wrapped(Exception):
    pass

def calls(mesh, dim, count, but=()):
    for number in range(count):
        if (mesh.rank, number) not in but:
            mesh.all_reduce(dim, torch.ones(1))
"""
FOUR = BEGIN + 'mesh = meshcomm.init(dims={"dp": 2, "tp": 2}, device="cpu", timeout_s=4)\n'


def job(pool: Pool, folder: Path, script: str, ranks: int = 4, launcher: tuple[str, ...] = ()) -> Job:
    (folder / "script.py").write_text(script)
    return Job(
        pool,
        folder,
        *launcher,
        "-m",
        "meshcomm",
        "run",
        *([] if launcher else ["--world-size", str(ranks)]),
        "script.py",
    )


def told(pool: Pool, folder: Path, script: str, ranks: int = 4) -> tuple[int, list[str], str]:
    """The exit code, the launcher's lines, and the whole stderr."""
    code, _, err = job(pool, folder, script, ranks).finish()
    return (
        code,
        [line.removeprefix("meshcomm: ") for line in err.splitlines() if line.startswith("meshcomm: ")],
        err,
    )


# -- chains ---------------------------------------------------------------------------------------------


@needs_group_hooks
@pytest.mark.faults
def test_a_call_left_out_long_before_a_barrier_of_all_ranks(pool: Pool, tmp_path: Path) -> None:
    code, lines, err = told(pool, tmp_path, FOUR + 'calls(mesh, "dp", 70, [(2, 66)])\ndist.barrier()\n')
    assert code == 1, err
    assert lines[0].startswith("ranks 0 2 waited for each other: rank 0 (dp=0 tp=0) "), err
    assert 'all_reduce along "dp", call 70, at script.py:' in lines[0]


@pytest.mark.faults
def test_a_chain_across_dims_ends_at_the_rank_that_sleeps(pool: Pool, tmp_path: Path) -> None:
    # Rank 1 waits for 0, which waits for 2, which waits for 3.
    script = (
        FOUR
        + """
mesh.warm_up()
if mesh.rank == 3:
    time.sleep(60)
mesh.all_reduce("dp" if mesh.rank == 0 else "tp", torch.ones(1))
mesh.all_reduce("tp" if mesh.rank == 0 else "dp", torch.ones(1))
"""
    )
    code, lines, err = told(pool, tmp_path, script)
    assert code == 1 and lines[0].startswith("rank 3 (dp=1 tp=1) is at script.py:17 in <module>"), err
    assert lines[0].endswith(", and ranks 0 1 2 waited for it")
    assert "it waited for rank 3" in lines[1]


# -- errors that are raised before they end a rank -----------------------------------------------------------

RAISES = """
def train(mesh):
    mesh.all_reduce("dp", torch.ones(1))
    try:
        if mesh.rank == 1:
            {}["the first cause"]
        mesh.all_reduce("dp", torch.ones(1))
    except meshcomm.MeshcommError as error:
        raise Wrapped("a step failed") from None
    finally:
        if mesh.rank == 1 and "inner" in WHERE:
            time.sleep(60)  # as a tracker that finishes
"""
OPENS = 'meshcomm.init(dims={"dp": 3}, device="cpu", timeout_s=3)'


@pytest.mark.faults
@pytest.mark.parametrize("where", ["inner, with", "inner", "outer, with"])
def test_an_error_counts_from_when_it_is_raised(pool: Pool, tmp_path: Path, where: str) -> None:
    body = f"    with {OPENS} as mesh:\n        train(mesh)\n" if "with" in where else f"    train({OPENS})\n"
    last = '    if "outer" in WHERE and os.environ["RANK"] == "1":\n        time.sleep(60)\n'
    script = f'{BEGIN}WHERE = "{where}"\n{RAISES}try:\n{body}finally:\n    pass\n{last}'
    code, lines, err = told(pool, tmp_path, script, 3)
    assert code == 1 and "KeyError: 'the first cause'" in err
    assert lines[0].startswith("rank 1 (dp=1) raised KeyError: 'the first cause', at script.py:"), err
    assert lines[0].endswith(" and had not ended") and len(lines) == 2


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["task", "thread"])
def test_an_error_of_a_task_or_a_thread_that_nobody_waits_for(pool: Pool, tmp_path: Path, kind: str) -> None:
    run = (
        "asyncio.run(main())"
        if kind == "task"
        else "threading.Thread(target=lost, name='feeder').start()\ntime.sleep(60)"
    )
    script = f"""{BEGIN}
mesh = meshcomm.init(dims={{"dp": 2}}, device="cpu", timeout_s=3)
def lost():
    raise KeyError("no shard")
async def feed():
    lost()
async def main():
    task = asyncio.create_task(feed())
    await asyncio.sleep(60)
mesh.all_reduce("dp", torch.ones(1))
if mesh.rank == 0:
    mesh.all_reduce("dp", torch.ones(1))
{run}
"""
    code, lines, err = told(pool, tmp_path, script, 2)
    assert code == 1 and "in lost\n    raise KeyError" in err
    headline = next(line for line in lines if "and had not ended" in line)
    assert (
        headline.startswith("rank 1 (dp=1)") and "raised KeyError: 'no shard', at script.py:" in headline
    ), err


HELD = """
mesh = meshcomm.init(dims={"dp": 3}, device="cpu", timeout_s=3)
mesh.barrier("dp")
def step():
    if mesh.rank == 0:
        raise ValueError("the true cause")
    mesh.recv("dp", torch.empty(4), src=0)
"""
PLAIN = """
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
def step():
    if dist.get_rank() == 0:
        raise ValueError("the true cause")
    dist.all_reduce(torch.ones(4))
"""
CALLS = {
    "a barrier in finally": HELD + 'try:\n    step()\nfinally:\n    mesh.barrier("dp")\n',
    "a call in except": HELD
    + 'try:\n    step()\nexcept ValueError:\n    mesh.all_reduce("dp", torch.ones(1))\n    raise\n',
    "a misuse in finally": HELD + 'try:\n    step()\nfinally:\n    mesh.barrier("tp")\n',
    "without a mesh": PLAIN + "try:\n    step()\nfinally:\n    dist.barrier()\n",
    "a call that does not return": HELD.replace("mesh.recv", "time.sleep(60) #")
    + "try:\n    step()\nfinally:\n    dist.barrier()\n",
}


@needs_group_hooks
@pytest.mark.faults
@pytest.mark.parametrize("name", CALLS)
def test_an_error_is_told_though_the_program_communicates_while_it_handles_it(
    pool: Pool, tmp_path: Path, name: str
) -> None:
    code, lines, err = told(pool, tmp_path, BEGIN + CALLS[name], 3)
    place = 1 + (BEGIN + CALLS[name]).split('raise ValueError("the true cause")')[0].count("\n")
    assert code != 0
    assert f"while handling ValueError: the true cause, at script.py:{place} in step" in "".join(lines[:2]), (
        err
    )
    assert 'raise ValueError("the true cause")\nValueError: the true cause' in err


@needs_group_hooks
@pytest.mark.faults
def test_an_error_that_a_program_has_handled_is_not_the_cause(pool: Pool, tmp_path: Path) -> None:
    script = f"""{BEGIN}
dist.init_process_group("gloo")
try:
    import no_such_module
except ImportError:
    for step in range(9):
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 1 and step == 4:
            os.kill(os.getpid(), 9)
"""
    code, lines, err = told(pool, tmp_path, script, 3)
    assert code == 137 and lines[0].startswith("rank 1 was ended by SIGKILL"), err
    assert "no_such_module" not in "".join(lines)


@pytest.mark.faults
def test_an_earlier_error_that_has_not_ended_is_told_beside_the_one_that_has(
    pool: Pool, tmp_path: Path
) -> None:
    script = f"""{BEGIN}
mesh = meshcomm.init(dims={{"dp": 3}}, device="cpu", timeout_s=20)
mesh.barrier("dp")
if mesh.rank == 0:
    try:
        raise ValueError("first")
    finally:
        time.sleep(30)
if mesh.rank == 2:
    time.sleep(1)
    raise KeyError("second")
mesh.barrier("dp")
"""
    code, lines, err = told(pool, tmp_path, script, 3)
    assert code == 1 and lines[0].startswith("rank 2 (dp=2) failed: KeyError: 'second'"), err
    assert lines[1] == "rank 0 (dp=0) raised ValueError: first, at script.py:18 in <module> and had not ended"


@pytest.mark.faults
def test_the_error_of_a_thread_whose_rank_then_ends_well(pool: Pool, tmp_path: Path) -> None:
    script = f"""{BEGIN}
mesh = meshcomm.init(dims={{"dp": 3}}, device="cpu", timeout_s=20)
mesh.barrier("dp")
def lost():
    raise KeyError("no shard")
if mesh.rank == 0:
    feeder = threading.Thread(target=lost, name="feeder")
    feeder.start()
    feeder.join()
    sys.exit(0)
mesh.barrier("dp")
"""
    code, lines, err = told(pool, tmp_path, script, 3)
    assert code == 1
    # Only one of the other ranks may have reported by then.
    said = "rank 0 (dp=0), thread feeder raised KeyError: 'no shard', at script.py:17 in lost, "
    assert lines[0].startswith(f"{said}then it ended with exit code 0 while rank"), err


@pytest.mark.faults
def test_a_rank_that_ends_well_before_the_ranks_meet(pool: Pool, tmp_path: Path) -> None:
    script = f"""{BEGIN}
if os.environ["RANK"] == "0":
    sys.exit(0)
meshcomm.init(dims={{"dp": 3}}, device="cpu", timeout_s=2)
"""
    code, lines, err = told(pool, tmp_path, script, 3)
    assert code == 2 and lines[0].startswith("rank 0 ended with exit code 0 while rank"), err
    assert "MeshMismatchError: rank 0 of 3 never arrived" in lines[1]


# -- the program's own hook ---------------------------------------------------------------------------------


@pytest.mark.parametrize("then", ["before(*given)", "sys.__excepthook__(*given)", "1 / 0", "os._exit(7)"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_programs_own_hook_is_called(pool: Pool, tmp_path: Path, then: str, when: str) -> None:
    opens = 'mesh = meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=20)\n'
    script = f"""{BEGIN}
{opens if when == "after" else ""}
before = sys.excepthook
def hook(*given):
    print("hook of", given[0].__name__, given[1], flush=True)
    {then}
sys.excepthook = hook
{opens if when == "before" else ""}
if mesh.rank == 1:
    raise ValueError("planted")
time.sleep(60)
"""
    code, out, err = job(pool, tmp_path, script, 2).finish()
    assert (code, out) == (1, "hook of ValueError planted\n"), err
    assert err.count('raise ValueError("planted")') == 1, err
    assert "meshcomm: rank 1 (dp=1) failed: ValueError: planted, at script.py:" in err


# -- helpers --------------------------------------------------------------------------------------------

HELPS = """
mesh = meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=20)
mesh.all_reduce("dp", torch.ones(1))
if mesh.rank == 0:
    helper = os.fork()
    if helper == 0:
        raise ValueError("of a helper")
    print("helper", os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1]), flush=True)
    mesh.all_reduce("dp", torch.ones(1))
    mesh.all_reduce("dp", torch.ones(1))
mesh.all_reduce("dp", torch.ones(1))
raise KeyError("of the rank")
"""


@pytest.mark.faults
@pytest.mark.parametrize("launcher", ["meshcomm", "torchrun"])
def test_a_fork_does_not_speak_for_its_rank(pool: Pool, tmp_path: Path, launcher: str) -> None:
    agent = ("-m", "torch.distributed.run", "--nproc-per-node", "2") if launcher == "torchrun" else ()
    code, out, err = job(pool, tmp_path, BEGIN + HELPS, 2, agent).finish()
    assert (code, out) == (1, "helper 1\n")
    assert "ValueError: of a helper" in err and err.count("rank 1 (dp=1):\nTraceback") == 1, err
    if launcher == "meshcomm":
        headline = next(line for line in err.splitlines() if line.startswith("meshcomm: "))
        assert headline.startswith("meshcomm: rank 1 (dp=1) failed: KeyError: 'of the rank'")


def test_a_job_that_a_rank_starts_is_a_job_of_its_own(pool: Pool, tmp_path: Path) -> None:
    script = f"""{BEGIN}
if sys.argv[1:]:
    with meshcomm.init(dims={{"dp": 1}}, device="cpu") as mesh:
        print("inner", mesh.rank, mesh.layout.world_size)
    sys.exit(3)
with meshcomm.init(dims={{"dp": 2}}, device="cpu", timeout_s=60) as mesh:
    if mesh.rank == 1:
        inner = [sys.executable, "-m", "meshcomm", "run", "--world-size", "1", __file__, "inner"]
        done = subprocess.run(inner, capture_output=True, text=True)
        print(done.returncode, done.stdout.strip(), flush=True)
        assert "ended with exit code 3" in done.stderr or "SystemExit" in done.stderr, done.stderr
    mesh.all_reduce("dp", torch.ones(1))
"""
    assert job(pool, tmp_path, script, 2).finish() == (0, "3 inner 0 1\n", "")


# -- barriers and signals ---------------------------------------------------------------------------------


@pytest.mark.faults
@pytest.mark.parametrize("asleep", [0, 1])
@pytest.mark.parametrize("given", ["", ", timeout=datetime.timedelta(seconds=2)"])
@pytest.mark.parametrize("before", ["dist.all_reduce(torch.ones(1))", "pass"])
def test_a_monitored_barrier_names_the_rank_that_sleeps(
    pool: Pool, tmp_path: Path, asleep: int, given: str, before: str
) -> None:
    script = f"""{BEGIN}
import datetime
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=2))
{before}
if dist.get_rank() == {asleep}:
    time.sleep(60)
dist.monitored_barrier(wait_all_ranks=True{given})
"""
    code, lines, err = told(pool, tmp_path, script, 3)
    assert code == 1 and lines[0].startswith(f"rank {asleep} is at script.py:18 in <module>"), err
    assert "waited for it" in lines[0] and f"it waited for rank {asleep}" in lines[1]


@pytest.mark.faults
def test_a_signal_of_the_programs_own_names_its_line_and_no_sizes(pool: Pool, tmp_path: Path) -> None:
    script = FOUR + 'calls(mesh, "dp", 66)\nif mesh.rank == 2:\n    os.abort()\ncalls(mesh, "dp", 66)\n'
    code, lines, err = told(pool, tmp_path, script)
    assert (
        code == 134 and lines[0] == "rank 2 (dp=1 tp=0) was ended by SIGABRT, at script.py:16 in <module>"
    ), err
    assert "compare the sizes" not in err


# -- Ctrl-C ----------------------------------------------------------------------------------------------

HANGS = (
    FOUR
    + """
mesh.barrier("dp")
if mesh.rank == 0:
    print("up", flush=True)
if mesh.rank == 1:
    time.sleep(600)
mesh.barrier("tp")
time.sleep(600)
"""
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_on_a_hang_first_says_where_each_rank_is(pool: Pool, tmp_path: Path, number: int) -> None:
    started = job(pool, tmp_path, HANGS.replace("timeout_s=4", "timeout_s=300"))
    started.until_printed("up")
    time.sleep(0.5)
    os.kill(started.pid, number)
    code, _, err = started.finish()
    lines = err.splitlines()
    assert code == 128 + number
    assert lines[0] == f"meshcomm: {signal.Signals(number).name}: where each rank was before it was ended"
    assert lines[1].startswith("meshcomm: rank 1 (dp=0 tp=1) is at script.py:19 in <module>"), err
    assert '; rank 0 waits for it in barrier along "tp"' in lines[1]
    assert sum("ranks 2 3: each is at script.py:21" in line for line in lines) == 1, err


def test_a_second_ctrl_c_ends_the_job_at_once(pool: Pool, tmp_path: Path) -> None:
    # A stopped rank does not answer the first Ctrl-C.
    script = HANGS.replace("time.sleep(600)", "os.kill(os.getpid(), 19)", 1)
    started = job(pool, tmp_path, script.replace("timeout_s=4", "timeout_s=300"))
    started.until_printed("up")
    os.kill(started.pid, signal.SIGINT)
    time.sleep(0.3)
    os.kill(started.pid, signal.SIGINT)
    began = time.monotonic()
    assert started.finish()[0] == 130
    assert time.monotonic() - began < 20


# -- the report ------------------------------------------------------------------------------------------


@needs_group_hooks
@pytest.mark.parametrize("what", ["differs", "killed"])
def test_the_report_repeats_what_the_launcher_told(pool: Pool, tmp_path: Path, what: str) -> None:
    """Ranks that the launcher ends leave no report, and are not the cause."""
    fault = {
        "differs": "dist.reduce(torch.ones(1), dst=0) if rank == 1 else dist.all_reduce(torch.ones(2))",
        "killed": "os.kill(os.getpid(), 9) if rank == 1 else dist.all_reduce(torch.ones(2))",
    }[what]
    script = f"""{BEGIN}
dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(torch.ones(1))
{fault}
dist.all_reduce(torch.ones(3))
"""
    _, lines, _ = told(pool, tmp_path, script, 3)
    cause = facts_of(tmp_path / "meshcomm-reports")["cause"]
    assert cause[0] == lines[0] and cause[0].startswith("rank 1 "), cause
    assert not any("left no report" in line for line in cause)
    if what == "differs":
        assert cause[1].startswith("  given:    rank 1: reduce(") and cause[2].startswith(
            "  expected: as ranks 0 2"
        )


def test_a_call_of_a_mesh_that_blocks_is_told_before_its_timeout(pool: Pool, tmp_path: Path) -> None:
    script = (
        BEGIN
        + """
import dataclasses
from meshcomm.mesh.watchdog import Watchdog
made = Watchdog.__init__
def shorter(self, *arguments):
    *others, options = arguments
    assert options.warn_after_s == 60.0
    made(self, *others, dataclasses.replace(options, warn_after_s=0.5))
Watchdog.__init__ = shorter
with meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=60) as mesh:
    mesh.warm_up()
    if mesh.rank == 1:
        time.sleep(4)
    mesh.all_reduce("dp", torch.ones(1))
"""
    )
    code, lines, err = told(pool, tmp_path, script, 2)
    assert code == 0 and len(lines) == 1, err
    assert lines[0].startswith('rank 0 (dp=0) has waited 0.5 s in all_reduce along "dp"'), err
    assert "rank 1 (dp=1) has not arrived: it is at script.py:" in lines[0]
