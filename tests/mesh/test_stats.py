"""Data sent along each dim: the ledger's counts, compared with plain lists."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshcomm
from meshcomm.config import load_config
from meshcomm.errors import MeshClosed
from meshcomm.mesh import Mesh
from meshcomm.mesh.all_ranks import StatsOfAll
from meshcomm.mesh.stats import CallStats, Stats
from meshcomm.predict.estimate import expected
from tests.group_hooks import HAS_HOOKS

pytestmark = pytest.mark.long

Counted = dict[tuple[str, str, bool], tuple[int, int]]


def counted(stats: Stats) -> Counted:
    return {(row.dim, row.call, row.async_op): (row.calls, row.nbytes) for row in stats.rows}


# -- every kind of call, by hand ------------------------------------------------------------------


def program(mesh: Mesh) -> Counted:
    """Makes each call a known number of times, along dims of size 2; 3 float32 are 12 bytes."""
    tp = mesh.coord("tp")
    x = torch.ones(3)
    for _ in range(300):  # more than the ring holds; most use the prepared call
        mesh.all_reduce("tp", x, op="max")
    for _ in range(2):
        mesh.all_reduce("dp", x, async_op=True).wait()
    mesh.all_reduce("tp", [x, torch.ones(5)])  # one message of 8 floats
    mesh.all_reduce("tp", torch.ones(8), algorithm="ring")  # its messages are part of the call
    mesh.all_reduce(("dp", "tp"), torch.ones(8), algorithm="hierarchical")
    mesh.reduce("dp", x, dst=0)
    mesh.broadcast("dp", x, src=1)
    mesh.all_gather("tp", x)
    mesh.all_gather("tp", torch.ones(1 + tp, 2), uneven=True)  # 1 + 2 rows of 2
    mesh.gather("dp", x, dst=1)
    mesh.gather("dp", torch.ones(1 + mesh.coord("dp")), dst=1, uneven=True)
    mesh.scatter("tp", torch.ones(4) if tp == 0 else None, src=0)
    mesh.reduce_scatter("tp", torch.ones(6))
    mesh.all_to_all("tp", torch.ones(6))
    mesh.all_to_all("dp", torch.ones(5), input_split_sizes=[2, 3])
    mesh.barrier("dp")
    mesh.functional.all_gather(
        "dp", torch.ones(2, requires_grad=True), grad="reduce_scatter"
    ).sum().backward()
    mesh.rearrange(torch.ones(3, 2), "a b -> a (tp b)")
    for _ in range(2):
        mesh.shift("tp", x)
    if tp == 0:
        mesh.send("tp", x, dst=1)
        mesh.isend("tp", x, dst=1, tag=7, handshake=True).wait()
        mesh.objects.send("tp", list(range(10)), dst=1)
    else:
        mesh.recv("tp", torch.empty(3), src=0)
        mesh.recv("tp", src=0, tag=7)
        mesh.objects.recv("tp", src=0)
    mesh.exchange("dp", [(x, 1 - mesh.coord("dp"))], [(torch.empty(3), 1 - mesh.coord("dp"))])
    mesh.exchange("dp")  # an exchange without messages is not a call
    return counted(mesh.stats())


def by_hand(mesh_coords: dict[str, int]) -> Counted:
    found: Counted = {
        ("tp", "all_reduce", False): (301, 300 * 12 + 32),
        ("tp", "all_reduce by ring", False): (1, 32),
        ("dp", "all_reduce", True): (3, 2 * 12 + 16),
        ("tp", "reduce_scatter", True): (1, 32),
        ("tp", "all_gather", True): (1, 32),
        ("dp", "reduce", False): (1, 12),
        ("dp", "broadcast", False): (1, 12),
        ("tp", "all_gather", False): (3, 24 + 24 + 48),
        ("dp", "gather", False): (2, 24 + 12),
        ("tp", "scatter", False): (1, 16),
        ("tp", "reduce_scatter", False): (1, 24),
        ("tp", "all_to_all", False): (1, 24),
        ("dp", "all_to_all", False): (1, 20),
        ("dp", "barrier", False): (1, 0),
        ("dp", "all_gather", False): (1, 16),
        ("dp", "reduce_scatter", False): (1, 16),
        ("tp", "shift", False): (2, 24),
        ("dp", "exchange", False): (1, 12),
    }
    if mesh_coords["tp"] == 0:
        found |= {("tp", "send", False): (1, 12), ("tp", "send", True): (1, 12)}
    else:
        found |= {("tp", "recv", False): (2, 24)}
    return found


def without_objects(found: Counted) -> Counted:
    return {key: value for key, value in found.items() if not key[1].startswith("objects.")}


def test_every_call_by_hand_in_the_simulator() -> None:
    everyone = meshcomm.simulate(lambda mesh: (mesh.coords, program(mesh)), dims={"dp": 2, "tp": 2})
    for coords, found in everyone:
        assert without_objects(found) == by_hand(coords)
        (key,) = set(found) - set(without_objects(found))
        assert key == ("tp", "objects.send" if coords["tp"] == 0 else "objects.recv", False)
        calls, nbytes = found[key]
        assert calls == 1  # the messages that the two ranks exchange first are part of it
        assert 20 < nbytes < 200


@pytest.mark.mesh(dp=2, tp=2, via="gloo", not_via={"emulated_nccl": "times are not known"})
@pytest.mark.deep
def test_the_same_counts_and_the_time_on_real_ranks(mesh: Mesh) -> None:
    x, found = torch.ones(4), program(mesh)
    assert without_objects(found) == by_hand(mesh.coords)
    # Calls of torch are counted separately, if torch has hooks of groups.
    dist.all_reduce(x, group=mesh.group("tp"))
    past = {("tp", "all_reduce (torch)", False): (1, 16)}
    assert counted(mesh.stats()) == found | (past if HAS_HOOKS else {})
    before = mesh.stats()
    if mesh.coord("tp") == 1:
        time.sleep(0.6)
    mesh.all_reduce("tp", x)
    handle = mesh.all_reduce("dp", x, async_op=True)
    time.sleep(0.2)
    handle.wait()
    since = mesh.stats().since(before)
    blocking, later = since.rows[::-1]
    assert (blocking.dim, blocking.calls, later.dim, later.async_op) == ("tp", 1, "dp", True)
    assert blocking.seconds is not None and later.seconds is not None and later.span_s is not None
    # The rank that waits spends that time in the call.
    assert blocking.seconds > (0.1 if mesh.coord("tp") == 0 else 0.0)
    assert later.span_s > 0.19 and later.seconds < later.span_s - 0.19
    assert (
        blocking.algbw == blocking.busbw == pytest.approx(16 / blocking.seconds)
    )  # 2 (n - 1) / n of the bytes, n = 2
    assert (later.algbw, later.ratio) == (None, None)
    assert since.seconds > 0.2
    everyone = mesh.debug.global_stats()
    assert [*map(str, mesh.objects.all_gather("dp", str(everyone)))] == [str(everyone)] * 2
    spread = {(row.dim, row.call, row.async_op): row for row in everyone.rows}
    tp = spread["tp", "all_reduce", False]
    assert (tp.ranks, tp.calls, tp.nbytes) == (4, 4 * 302, 4 * (300 * 12 + 32 + 16))
    assert tp.fastest_s <= tp.mean_s <= tp.slowest_s
    assert {tp.fastest, tp.slowest} <= set(range(4))
    assert spread["tp", "send", False].ranks == 2
    assert "all_reduce, async" in str(before)
    mesh.close()
    with pytest.raises(MeshClosed):
        mesh.stats()


def test_names_that_share_a_group_are_counted_apart() -> None:
    def body(mesh: Mesh) -> Counted:
        mesh.all_reduce("dp", torch.ones(1))
        for _ in range(3):
            mesh.all_reduce("both", torch.ones(2))
        mesh.all_reduce("one", torch.ones(2))  # a single rank: nothing is sent or counted
        return counted(mesh.stats())

    for found in meshcomm.simulate(body, dims={"dp": 2, "one": 1}, merge={"both": ["dp", "one"]}):
        assert found == {("dp", "all_reduce", False): (1, 4), ("both", "all_reduce", False): (3, 24)}


# -- predicted ------------------------------------------------------------------------------------


def test_predicted_seconds_are_those_of_the_model() -> None:
    settings = load_config(
        {
            "mesh": {"dims": {"dp": 2, "tp": 2}},
            "topology": {
                "ranks_per_node": 2,
                "call_us": 5.0,
                "links": {"node": {"latency_us": 10.0, "bandwidth_gbytes_s": 1.0}},
            },
        }
    )

    def body(mesh: Mesh) -> tuple[Stats, Stats]:
        for size in (1000, 3000):
            mesh.all_reduce("tp", torch.ones(size))
            mesh.all_reduce("dp", torch.ones(size))
        before = mesh.stats()
        mesh.shift("tp", torch.ones(250))
        return before, mesh.stats().since(before)

    before, since = meshcomm.simulate(body, settings)[0]
    rows = {row.dim: row for row in before.rows}
    # A ring of two: two steps with half of the bytes each; the mean of 4,000 and 12,000 bytes.
    ring = 2 * 10e-6 + 2 * (1 / 2) * 8000 / 1e9
    assert rows["tp"].predicted_s == pytest.approx(2 * (5e-6 + ring))
    assert rows["tp"].ratio == pytest.approx(rows["tp"].seconds / (2 * (5e-6 + ring)))
    assert rows["dp"].predicted_s is None  # the speed of the network is not configured
    assert since.rows[0].predicted_s == pytest.approx(5e-6 + 10e-6 + 1000 / 1e9)
    assert [row.call for row in since.rows] == ["shift"]


TRAIN: dict[str, Any] = {
    "mesh": {"dims": {"dp": 1, "tp": 1}, "device": "cpu"},
    "parallel": {"data": "dp", "tensor": "tp"},
    "model": {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 64},
    "data": {"seq_len": 32, "max_bytes": 50_000},
    "train": {"steps": 2, "global_batch_size": 8, "micro_batch_size": 2},
}


ROWS = (
    CallStats("dp", "all_reduce", True, 4, 10, 40_000_000, 0.002, 0.5),
    CallStats("tp", "all_gather", False, 2, 20, 2_000_000, 0.01, 0.01, 0.004),
    CallStats("tp", "barrier", False, 2, 1, 0, 0.001, 0.001),
)


def test_seconds_that_nobody_knows_are_none_and_a_dash() -> None:
    def body(mesh: Mesh) -> tuple[Stats, StatsOfAll]:
        mesh.all_reduce("dp", torch.ones(4))
        timed = mesh.stats()
        mesh.device = torch.device("meta")  # as on a device on which calls are only enqueued
        untimed = mesh.stats()
        assert timed.rows[0].seconds is not None
        since = untimed.since(timed)
        assert since.rows == ()
        mesh.device = torch.device("cpu" if mesh.rank else "meta")
        return untimed, mesh.debug.global_stats()

    for own, everyone in meshcomm.simulate(body, dims={"dp": 2}):
        (row,) = own.rows
        assert (row.calls, row.nbytes, row.seconds, row.span_s, row.algbw, row.busbw) == (1, 16, *[None] * 4)
        lines = str(own).splitlines()
        assert lines[3].split() == ["dp", "all_reduce", "1", "16", "B", "-", "-", "-", "-"]
        assert "-: unknown, because these calls return before they complete" in str(own)
        # One rank with unknown seconds makes the times of all ranks unknown.
        (both,) = everyone.rows
        assert (both.calls, both.mean_s, both.fastest_s, both.slowest_s) == (2, None, None, None)
        assert str(everyone).splitlines()[3].split()[-3:] == ["-", "-", "-"]


def test_since_subtracts() -> None:
    earlier = Stats(
        "rank 0", 1.0, (CallStats("tp", "all_gather", False, 2, 5, 500_000, 0.004, 0.004, 0.001),)
    )
    (dp, tp, _) = Stats("rank 0", 2.0, ROWS).since(earlier).rows
    assert dp.calls == 10
    assert (tp.calls, tp.nbytes, tp.seconds) == (15, 1_500_000, pytest.approx(0.006))
    assert Stats("", 2.0, ROWS).since(Stats("", 1.0, ROWS)).rows == ()


def test_the_summary_of_a_run_has_a_table(tmp_path: Path) -> None:
    from meshcomm.train import Callback, run

    settings = load_config(TRAIN, ["mesh.dims={ dp = 2, tp = 1 }", f'train.out="{tmp_path}"'])
    everyone = meshcomm.simulate(lambda mesh: run(mesh, settings, Callback()), settings, world_size=2)
    traffic = everyone[0].traffic
    assert everyone[0].traffic_steps == 2
    assert traffic is not None
    (gradients,) = [row for row in traffic.rows if row.async_op]
    (planned,) = expected(settings, 2)
    assert (gradients.calls, gradients.nbytes) == (2 * planned.calls, 2 * planned.calls * planned.size_bytes)
