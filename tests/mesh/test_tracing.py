"""One trace file of all ranks: valid for Chrome and Perfetto, and true to the calls that were made."""

from __future__ import annotations

import json
import sys
import time
import zlib
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshcomm
from meshcomm.config import load_config
from meshcomm.errors import ConfigError, StoreError, UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.mesh.tracing import events_of, write
from meshcomm.parallel.pipeline import Pipelined
from meshcomm.testing import Pool
from meshcomm.train import Callback, run
from meshcomm.train.run_files import put_aside
from meshcomm.watching.spans import Span
from tests.sizes import model_of, train_of

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"

Event = dict[str, Any]


def check_format(text: str) -> list[Event]:
    """Check the contents of a trace against Chrome's format, and return the events."""
    events: list[Event] = json.loads(text)["traceEvents"]
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    open_spans: dict[tuple[int, int], int] = {}
    for event in events:
        assert event["ph"] in "MXbe", event
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["pid"] in processes
        if event["ph"] == "M":
            continue
        assert event["ts"] >= 0, event
        assert (event["pid"], event["tid"]) in named, event
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["cat"] in ("collective", "message", "program")
        else:
            key = (event["pid"], event["id"])
            open_spans[key] = open_spans.get(key, 0) + (1 if event["ph"] == "b" else -1)
    assert set(open_spans.values()) <= {0}
    # Slices of one lane are nested or disjoint: viewers draw nothing else.
    for pid, tid in named:
        slices = sorted(
            (e["ts"], -e["dur"]) for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (pid, tid)
        )
        ends: list[float] = []
        for began, dur in slices:
            while ends and ends[-1] <= began + 1e-6:
                ends.pop()
            assert not ends or began - dur <= ends[-1] + 1e-3
            ends.append(began - dur)
    return events


def lanes_of(events: list[Event]) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}


# -- on real ranks ----------------------------------------------------------------------------------


def traced(folder: str) -> dict[str, Any]:
    """A 2x2 pipeline by hand: pp 0 sends three activations forward, pp 1 sends gradients back."""
    path = Path(folder) / "new" / "trace.json"
    reports = Path(folder) / "reports"
    config = {"mesh": {"dims": {"pp": 2, "dp": 2}, "device": "cpu", "timeout_s": 30, "reports": str(reports)}}
    with meshcomm.init(config) as mesh:
        x = torch.ones(100)
        for _ in range(80):  # more calls than ranks compare, so the prepared call exists
            mesh.all_reduce("dp", x, op="max")
        pp = mesh.coord("pp")
        with mesh.debug.trace(path) as trace:
            with trace.stretch("load"):
                time.sleep(0.01)
            handles = []
            for number in range(3):
                if pp == 0:
                    handles.append(mesh.isend("pp", x, dst=1, tag=number))
                else:
                    mesh.recv("pp", torch.empty(100), src=0, tag=number)
            for handle in handles:
                handle.wait()
            if pp == 1:
                mesh.send("pp", x, dst=0)
            else:
                mesh.recv_any("pp", torch.empty(100))
            for _ in range(300):
                mesh.all_reduce("dp", x, op="max")
            mesh.all_reduce("dp", torch.ones(4), algorithm="ring")
            mesh.all_reduce("dp", [torch.ones(2), torch.ones(3, dtype=torch.int64)])
            gather = mesh.all_gather("dp", torch.ones(2), async_op=True)
            gather.wait()
            with (
                pytest.raises(UnsupportedOp, match="another trace is active"),
                mesh.debug.trace("other.json"),
            ):
                pass
        assert path.is_file(), "all ranks go on when the file is there"
        mesh.all_reduce("dp", x, op="max")  # behind: quick again
        assert mesh.debug.metrics.spans is None
        with pytest.raises(ZeroDivisionError), mesh.debug.trace(Path(folder) / "failed.json"):
            mesh.barrier("dp")
            raise ZeroDivisionError
        with (
            pytest.raises(
                StoreError, match=r"could not be written\n.*\n.*a writable path on the first rank.s host"
            ),
            mesh.debug.trace(path / "below" / "a.json"),
        ):
            mesh.barrier("dp")
        with mesh.debug.trace(Path(folder) / "created.json"):
            mesh.create_group("all", ("pp", "dp"))
            mesh.all_reduce("all", x)
            mesh.all_reduce(("pp", "dp"), x)
        assert trace.dropped == 0
        mesh._state.watch.own.write()  # type: ignore[union-attr,attr-defined]
        mesh.barrier()
    return {"ranks": {rank: mesh.layout.coords(rank) for rank in range(4)}}


@pytest.fixture(scope="module")
def folder(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("trace")
    pool.run(traced, str(where), ranks=4)
    return where


def test_the_file_is_what_chrome_reads(folder: Path) -> None:
    path = folder / "new" / "trace.json"
    events = check_format(path.read_text())
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        f"rank {rank} (pp={rank // 2} dp={rank % 2})" for rank in range(4)
    }
    lanes = lanes_of(events)
    for rank in range(4):
        assert [lanes[rank, tid] for tid in range(3)] == ["program", "pp", "dp"]
    about = json.loads(path.read_text())["otherData"]
    assert about["meshcomm"] == {"pp": 2, "dp": 2}
    assert about["dropped"] == {}
    assert [each.name for each in path.parent.iterdir()] == ["trace.json"], "nothing half written is left"


def test_the_events_are_the_calls_that_were_made(folder: Path) -> None:
    events = check_format((folder / "new" / "trace.json").read_text())
    lanes = lanes_of(events)
    for rank in range(4):
        here = [e for e in events if e["pid"] == rank and e["ph"] == "X"]
        made = Counter((lanes[rank, e["tid"]], e["name"]) for e in here)
        dp = {
            ("program", "load"): 1,
            ("dp", "all_reduce"): 300,
            # A list with two dtypes takes two messages.
            ("dp", "start all_reduce"): 2,
            ("dp", "wait for all_reduce"): 2,
            ("dp", "all_reduce by ring"): 3,
            ("dp", "start all_gather"): 1,
            ("dp", "wait for all_gather"): 1,
        }
        if rank < 2:
            pp = {("pp", "start send"): 3, ("pp", "wait for send"): 3, ("pp", "recv_any"): 1}
        else:
            pp = {("pp", "recv"): 3, ("pp", "send"): 1}
        assert made == dp | pp
        calls = [e for e in here if e["name"] == "all_reduce" and "number" in e["args"]]
        assert [e["args"]["number"] for e in calls[:300]] == list(range(81, 381))
        assert calls[0]["args"]["shape"] == [100]
        assert (calls[0]["args"]["bytes"], calls[0]["args"]["dtype"]) == (400, "float32")
        assert calls[0]["args"]["group"] == f"dp[pp={rank // 2}]"
        assert Path(calls[0]["args"]["callsite"].rpartition(":")[0]).name == "test_tracing.py"
        messages = [e["args"] for e in here if e["name"].rpartition(" ")[2] in ("send", "recv", "recv_any")]
        ends = [text for args in messages for way in ("to", "from") for text in args.get(way, ())]
        peer = (rank + 2) % 4
        assert ends == [f"rank {peer}, message 1 with tag {tag}" for tag in (0, 1, 2, 0)]
        (load,) = [e for e in here if e["name"] == "load"]
        assert load["dur"] >= 9_000
        assert Path(load["args"]["callsite"].rpartition(":")[0]).name == "test_tracing.py"


def test_a_collective_is_shared_in_time(folder: Path) -> None:
    events = check_format((folder / "new" / "trace.json").read_text())
    for group in ((0, 1), (2, 3)):
        found = {
            rank: {
                e["args"]["number"]: (e["ts"], e["ts"] + e["dur"])
                for e in events
                if e["pid"] == rank and e["name"] == "all_reduce"
            }
            for rank in group
        }
        for number in range(81, 381):
            (a, a_over), (b, b_over) = (found[rank][number] for rank in group)
            assert max(a, b) <= min(a_over, b_over), "nobody leaves an all_reduce before all have come"


def test_groups_made_inside_of_the_block_are_traced_too(folder: Path) -> None:
    events = check_format((folder / "created.json").read_text())
    lanes = lanes_of(events)
    for rank in range(4):
        here = [lanes[rank, e["tid"]] for e in events if e["ph"] == "X" and e["pid"] == rank]
        assert here == ["all", "all"]


def test_a_block_that_raises_leaves_each_rank_its_own_file(folder: Path) -> None:
    assert not (folder / "failed.json").exists()
    for rank in range(4):
        text = (folder / f"failed.rank{rank}.json").read_text()
        events = check_format(text)
        assert [e["name"] for e in events if e["ph"] == "X"] == ["barrier"]
        assert json.loads(text)["otherData"]["alone"] is True


# -- clocks -----------------------------------------------------------------------------------------

AHEAD_S = 100.0


@pytest.mark.mesh(dp=2, via="gloo")
def test_ranks_of_two_hosts_are_put_on_the_wall_clock(mesh: Mesh, tmp_path: Path) -> None:
    """Rank 1 pretends to be on another host, whose monotonic clock is 100 s ahead."""
    path, tracing = tmp_path / "trace.json", import_module("meshcomm.mesh.tracing")
    ours = [m for name, m in sys.modules.items() if name.startswith("meshcomm.")]
    timed = [m for m in ours if getattr(m, "clock", None) is time.perf_counter]
    assert tracing in timed
    with pytest.MonkeyPatch.context() as patch:
        for module in timed if mesh.rank == 1 else ():
            patch.setattr(module, "clock", lambda: time.perf_counter() + AHEAD_S)
        if mesh.rank == 1:
            patch.setattr(tracing, "host", lambda: 99)
        with mesh.debug.trace(path):
            for _ in range(3):
                mesh.all_reduce("dp", torch.ones(1))
    events = check_format(path.read_text())
    for number in (1, 2, 3):
        (a, b) = (
            (e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6)
            for e in events
            if e["ph"] == "X" and e["args"]["number"] == number
        )
        # On a busy machine, a rank may lose its core between the readings of its two clocks.
        assert max(a[0], b[0]) <= min(a[1], b[1]) + AHEAD_S / 4


# -- a pipeline ---------------------------------------------------------------------------------------


@pytest.mark.mesh(pp=2, via="gloo", not_via={"emulated_nccl": "a stage is begun before its input has come"})
def test_passes_of_a_pipeline_are_in_the_trace(mesh: Mesh, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    torch.manual_seed(0)
    stage = nn.Linear(4, 4) if mesh.rank else nn.Embedding(8, 4)
    run = Pipelined(
        mesh,
        "pp",
        stage,
        lambda y, target: (y - target).square().sum(),
        microbatches=3,
        schedule="1f1b",
        shapes=((2, 5), (2, 5, 4), (2, 5, 4)),
        dtype=torch.float32,
    )
    tokens, targets = torch.ones(6, 5, dtype=torch.int64), torch.ones(6, 5, 4)
    run(tokens, targets)
    with mesh.debug.trace(path):
        run(tokens, targets)
    events = check_format(path.read_text())
    lanes = lanes_of(events)
    passes = {
        rank: [
            (e["name"].removesuffix(f" of stage {rank}"), e["ts"], e["ts"] + e["dur"])
            for e in events
            if e["ph"] == "X" and e["pid"] == rank and lanes[rank, e["tid"]] == "passes"
        ]
        for rank in range(2)
    }
    # One forward, one backward: as `meshcomm plan CONFIG --schedule` draws it.
    first = ["forward 0", "forward 1", "backward 0", "forward 2", "backward 1", "backward 2"]
    last = [f"{way} {number}" for number in range(3) for way in ("forward", "backward")]
    assert [name for name, *_ in passes[0]] == first
    assert [name for name, *_ in passes[1]] == last
    at = {(rank, name): (began, over) for rank in range(2) for name, began, over in passes[rank]}
    for number in range(3):
        assert at[0, f"forward {number}"][1] <= at[1, f"forward {number}"][0]
        assert at[1, f"backward {number}"][1] <= at[0, f"backward {number}"][0]


def trained(out: str) -> list[str]:
    config = load_config(
        {
            "mesh": {"dims": {"dp": 2}, "device": "cpu", "timeout_s": 60.0},
            "parallel": {"data": "dp"},
            "model": model_of(1, 16, 2, 2, 16),
            "data": {"seq_len": 16, "max_bytes": 20_000},
            "train": train_of(4, 4, 1, trace_steps=[2, 3], out=out),
        }
    )
    with meshcomm.init(config) as mesh:
        run(mesh, config, Callback())
        return sorted(each.name for each in Path(out).iterdir())


def test_some_steps_of_a_run_are_traced(pool: Pool, tmp_path: Path) -> None:
    assert "trace.json" in pool.run(trained, str(tmp_path), ranks=2)[1]
    events = check_format((tmp_path / "trace.json").read_text())
    passes = Counter(e["name"] for e in events if e["ph"] == "X" and e["pid"] == 1 and e["cat"] == "program")
    # Two steps of two micro-batches.
    steps = {"step 2": 1, "step 3": 1}
    assert passes == {"forward 0": 2, "backward 0": 2, "forward 1": 2, "backward 1": 2, **steps}
    tokens = [
        e for e in events if e["name"] == "all_reduce" and e["pid"] == 0 and e["args"]["bytes"] in (8, 32)
    ]
    # Each of the two steps has two all_reduces: the number of tokens, and the loss with the values for the norm and the data.
    assert len(tokens) == 4
    put_aside(tmp_path)
    assert (tmp_path / "trace.1.json").exists()
    with pytest.raises(ConfigError, match="steps 3 to 9 are not steps of this training"):
        load_config(QUICKSTART, ["train.trace_steps=[3, 9]", "train.steps=8"])


# -- without processes --------------------------------------------------------------------------------


def test_a_single_rank(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with meshcomm.init(dims={"dp": 1}, device="cpu") as mesh, mesh.debug.trace(path) as trace:
        mesh.all_reduce("dp", torch.ones(1))
        with trace.stretch("alone"):
            pass
    events = check_format(path.read_text())
    assert [e["name"] for e in events if e["ph"] == "X"] == ["alone"]  # a dim of size 1 moves nothing


def test_the_simulator_refuses_and_says_what_to_do() -> None:
    def body(mesh: Mesh) -> str:
        with pytest.raises(UnsupportedOp, match="no trace of simulated ranks") as caught:
            mesh.debug.trace("trace.json")
        return str(caught.value)

    assert all("mesh.stats() works" in text for text in meshcomm.simulate(body, dims={"dp": 2}))


def test_a_file_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    groups = {"pp[]": [4, 5]}
    more: dict[str, Any] = {"nbytes": 8, "shape": (2,), "dtype": "float32"}
    sends = Span(
        "pp[]", "pp", "send", "a.py:1", 1.5, left=2.0, parts=(("send", 1, 0, 1), ("send", 1, 0, 2)), **more
    )
    late = Span("pp[]", "pp", "recv", "a.py:1", 1.0, left=1.25, parts=(("recv", 0, 0, 1),), **more)
    late.waits.append((1.5, 2.0))
    parts = [
        zlib.compress(
            ",".join(map(json.dumps, events_of(rank, f"rank {rank}", ["pp"], [span], groups, 1.0))).encode()
        )
        for rank, span in ((4, sends), (5, late))
    ]
    write(path, parts, {"a": 1})
    events = check_format(path.read_text())
    assert json.loads(path.read_text())["otherData"] == {"a": 1}
    shown = [(e["pid"], e["ph"], e["name"], e["ts"], e.get("dur")) for e in events if e["ph"] != "M"]
    assert shown == [
        (4, "X", "send", 2.5e6, 0.5e6),
        (5, "X", "start recv", 2.0e6, 0.25e6),
        (5, "X", "wait for recv", 2.5e6, 0.5e6),
        (5, "b", "recv pp", 2.0e6, None),
        (5, "e", "recv pp", 3.0e6, None),
    ]
    # A failure halfway leaves no file.
    with pytest.raises(zlib.error):
        write(tmp_path / "u.json", [parts[0], b"damaged"], {})
    assert [each.name for each in tmp_path.iterdir()] == ["t.json"]
